"""Compares the runs of `benchmarks/convergence.py` with the baseline, seed by seed: a table, a picture and a page."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.results import Row

BASELINE = "original"
CONFIDENCE = 0.95
GOAL_PERCENT = 0.5
"""The paper saw 1.6 % for packing over 8 global batches, and none for its own."""
JUDGED = ("wlb", "adaptive")
"""Beginnings of the names of variants that may lose no more than GOAL_PERCENT."""
MEASURES = {
    "optimizer_steps": "steps",
    "imbalance": "imbalance_mean",
    **{name: name for name in ("late_steps", "spread_steps", "token_cv", "long_share_mean", "long_share_std")},
}
"""Columns that are means over seeds of what `metrics.Summary` has."""
COLORS = {
    "original": "#000000",
    "fixed-1": "#8c8c8c",
    "fixed-8": "#d55e00",
    "wlb": "#009e73",
    "adaptive-constant-tokens": "#0072b2",
}


def read(folder: Path) -> list[Row]:
    """The logs of finished runs, in the order of COLORS.

    Raises ValueError if there is none, or if they do not share their settings.
    """
    logs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not logs:
        raise ValueError(f"{folder} holds no finished run; run python -m benchmarks.convergence first")
    for key in ("scale", "corpus", "device"):
        if any(log[key] != logs[0][key] for log in logs):
            raise ValueError(f"the runs in {folder} differ in their {key}; keep those of one setting there")
    return sorted(logs, key=lambda log: (list(COLORS).index(log["variant"]), log["seed"]))


def compare(logs: list[Row]) -> list[Row]:
    """One row for each variant; differences are to the baseline with the same seed, in percent of its loss."""
    runs: dict[str, dict[int, Row]] = {}
    for log in logs:
        runs.setdefault(log["variant"], {})[log["seed"]] = log
    return [_row(name, by_seed, runs.get(BASELINE, {})) for name, by_seed in runs.items()]


def _row(name: str, runs: dict[int, Row], baseline: dict[int, Row]) -> Row:
    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    packings = [log["packing"] for log in runs.values()]
    # In the second half of the steps gradients hardly become smaller any more.
    norms = [np.array(n[len(n) // 2 :]) for n in (log["steps"]["gradient_norm"] for log in runs.values())]
    losses = [_final(runs[seed], "all") for seed in sorted(runs)]
    row = {
        "variant": name,
        "seeds": sorted(runs),
        "loss": mean(losses),
        "loss_of_seeds": losses,
        "loss_long": mean(_final(log, "long") for log in runs.values()),
        **{key: mean(p[measure] for p in packings) for key, measure in MEASURES.items()},
        "max_delay_steps": max(p["max_delay_steps"] for p in packings),
        "gradient_norm_mean": mean(n.mean() for n in norms),
        "gradient_norm_variance": mean(n.var(ddof=1) for n in norms),
    }
    paired = sorted(runs.keys() & baseline.keys()) if name != BASELINE else []
    for key, measure in (("difference", "all"), ("difference_long", "long")):
        percent = [100 * (_final(runs[s], measure) / _final(baseline[s], measure) - 1) for s in paired]
        row[f"{key}_percent"], row[f"{key}_half_width"] = interval(percent)
        row[f"{key}_of_seeds"] = percent
    return row


def interval(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and half the width of its 95 % interval (Student's t); None where there are too few values."""
    mean = float(np.mean(values)) if values else None
    if len(values) < 2:
        return mean, None
    from scipy import stats  # which machines that only measure may lack

    return mean, float(stats.sem(values)) * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))


def _final(log: Row, measure: str) -> float:
    return float(log["validation"][-1][measure])


def verdicts(rows: list[Row]) -> list[str]:
    """What the intervals say, in one sentence for each variant."""
    sentences = []
    for row in rows:
        name, mean, half = row["variant"], row["difference_percent"], row["difference_half_width"]
        if name == BASELINE:
            continue
        if half is None:
            seeds = len(row["difference_of_seeds"])
            sentences.append(f"`{name}`: {seeds} seed(s) to compare with `{BASELINE}`; no interval yet.")
            continue
        verdict = "no difference is seen" if abs(mean) <= half else "worse" if mean > 0 else "better"
        bounds = f"{mean - half:+.2f} to {mean + half:+.2f} %"
        sentences.append(f"`{name}`: {verdict}: {mean:+.2f} % of the loss, interval {bounds}.")
    return sentences


def goals(rows: list[Row]) -> list[results.Goal]:
    """Variants that are judged lose no more than GOAL_PERCENT, as far as their intervals reach."""
    name = f"{{}}: final validation loss over {BASELINE}, upper end of the 95 % interval, percent"
    return [
        results.at_most(name.format(r["variant"]), r["difference_percent"] + r["difference_half_width"], GOAL_PERCENT)
        for r in rows
        if r["variant"].startswith(JUDGED) and r["difference_half_width"] is not None
    ]


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "seeds": lambda r: str(len(r["seeds"])),
    "validation loss": lambda r: f"{r['loss']:.4f}",
    "to original, %": lambda r: _with_error(r, "difference"),
    "long documents, %": lambda r: _with_error(r, "difference_long"),
    "steps": lambda r: f"{r['optimizer_steps']:.0f}",
    "imbalance": lambda r: f"{r['imbalance']:.3f}",
    "delay mean": lambda r: f"{r['late_steps']:.2f}",
    "delay max": lambda r: str(r["max_delay_steps"]),
    "token CV": lambda r: f"{r['token_cv']:.3f}",
    "long share": lambda r: f"{r['long_share_mean']:.2f} ± {r['long_share_std']:.2f}",
    "gradient norm": lambda r: f"{r['gradient_norm_mean']:.3f}",
    "its variance": lambda r: f"{r['gradient_norm_variance']:.2e}",
}


def _with_error(row: Row, key: str) -> str:
    mean, half = row[f"{key}_percent"], row[f"{key}_half_width"]
    if mean is None:
        return ""
    return f"{mean:+.2f}" if half is None else f"{mean:+.2f} ± {half:.2f}"


def show(rows: list[Row]) -> None:
    cells = [{name: column(row) for name, column in _COLUMNS.items()} for row in rows]
    results.show([{"policy": row["variant"]} | cell for row, cell in zip(rows, cells, strict=True)], width=200)
    print(*verdicts(rows), sep="\n")


def write(logs: list[Row]) -> list[Path]:
    """Write the JSON and the picture of these runs, and return their paths."""
    rows, first = compare(logs), logs[0]
    suffix = "" if first["scale"]["name"] == "cpu" else f".{first['scale']['name']}"
    settings = {key: first[key] for key in ("scale", "corpus", "parameters")}
    settings["runs"] = [f"{log['variant']}-{log['seed']}" for log in logs]
    device = None if first["device"] == "cpu" else first["device"]
    path = results.write("convergence", settings=settings, rows=rows, goals=goals(rows), device=device, suffix=suffix)
    return [path, draw(logs, rows, f"convergence{suffix}")]


def page(data: Row) -> str:
    """What docs/convergence.md says of convergence.json; `python -m scripts.docs` puts it there."""
    settings, rows = data["settings"], data["rows"]
    scale, train, held_out = settings["scale"], settings["corpus"]["train"], settings["corpus"]["held_out"]
    tokens = scale["global_batches"] * scale["num_micro_batches"] * scale["context_length"]
    lines = [
        f"{len(settings['runs'])} runs of {tokens:,} tokens, {settings['parameters']:,} parameters. Training text: "
        f"{train['documents']:,} documents of {train['tokens']:,} tokens (p50 {train['p50']:,}, p90 {train['p90']:,}, "
        f"longest {train['longest']:,}); held out: {held_out['documents']:,} of {held_out['tokens']:,}; digest "
        f"`{settings['corpus']['digest']}`.",
        "",
        f"| policy | {' | '.join(_COLUMNS)} |",
        "|---" * (1 + len(_COLUMNS)) + "|",
        *(f"| `{row['variant']}` | {' | '.join(column(row) for column in _COLUMNS.values())} |" for row in rows),
        "",
        *(f"- {sentence}" for sentence in verdicts(rows)),
        *_resolution(rows),
    ]
    return "\n".join(lines) + "\n"


def _resolution(rows: list[Row]) -> list[str]:
    """How small a difference these runs could have shown."""
    halves = [row["difference_half_width"] for row in rows if row["difference_half_width"] is not None]
    seeds = next((row["loss_of_seeds"] for row in rows if row["variant"] == BASELINE), [])
    if not halves or len(seeds) < 2:
        return []
    return [
        f"- What can be resolved: the intervals reach {min(halves):.2f} to {max(halves):.2f} % to either side of the "
        f"mean, so anything smaller stays hidden. Between its seeds `{BASELINE}` itself differs by "
        f"{100 * (max(seeds) / min(seeds) - 1):.2f} %."
    ]


def draw(logs: list[Row], rows: list[Row], name: str) -> Path:
    """Loss over tokens, and the final differences with their intervals."""
    figure: Any = results.figure(12, 4.2)
    left, right = figure.subplots(1, 2)
    for variant, color in COLORS.items():
        runs = [log["validation"] for log in logs if log["variant"] == variant]
        if runs:
            tokens, losses = (np.mean([[v[key] for v in run] for run in runs], axis=0) for key in ("tokens", "all"))
            left.plot(tokens / 1e6, losses, color=color, label=variant, lw=1.2)
    left.set(xlabel="trained tokens (millions)", ylabel="validation loss (mean over seeds)", yscale="log")
    left.yaxis.set_minor_formatter(lambda value, _: f"{value:.1f}")
    left.legend(frameon=False, fontsize=8)
    compared = [row for row in reversed(rows) if row["difference_percent"] is not None]
    for place, row in enumerate(compared):
        color, seeds = COLORS[row["variant"]], row["difference_of_seeds"]
        right.scatter(seeds, [place] * len(seeds), color=color, s=14, alpha=0.5)
        error = row["difference_half_width"]
        right.errorbar(row["difference_percent"], place, xerr=error, color=color, marker="s", capsize=4)
    right.axvline(0, color="black", lw=0.8)
    right.set_yticks(range(len(compared)), [row["variant"] for row in compared])
    right.set_xlabel(f"final loss to {BASELINE}, %: mean, 95 % interval, seeds")
    return results.save(figure, name)
