"""Compares the runs of `benchmarks/convergence.py`: over the seeds that are there, paired by seed with the baseline."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks import results

DOCS = Path(__file__).parent.parent / "docs"
BASELINE = "original"
CONFIDENCE = 0.95
GOAL_PERCENT = 0.5
"""The paper saw 1.6 % for packing over 8 global batches, and none for its own."""
JUDGED = ("wlb", "adaptive")
"""Beginnings of the names of variants that are to lose no more than GOAL_PERCENT."""
Row = dict[str, Any]
COLOURS = {
    "original": "#000000",
    "fixed-1": "#8c8c8c",
    "fixed-8": "#d55e00",
    "wlb": "#009e73",
    "adaptive-constant-tokens": "#0072b2",
    "adaptive-low-displacement": "#cc79a7",
    "adaptive-low-displacement-weighted": "#e69f00",
}


def read(folder: Path) -> list[Row]:
    """The logs of the runs that are finished, in the order of COLOURS.

    Raises ValueError if there is none, or if they do not share their settings.
    """
    logs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not logs:
        raise ValueError(f"{folder} holds no finished run; run python -m benchmarks.convergence first")
    for key in ("scale", "corpus", "device"):
        if any(log[key] != logs[0][key] for log in logs):
            raise ValueError(f"the runs in {folder} differ in their {key}; keep those of one setting there")
    return sorted(logs, key=lambda log: (list(COLOURS).index(log["variant"]), log["seed"]))


def compare(logs: list[Row]) -> list[Row]:
    """One row a variant; differences are to the baseline with the same seed, in percent of its loss."""
    of_variant = defaultdict(dict)
    for log in logs:
        of_variant[log["variant"]][log["seed"]] = log
    baseline = of_variant.get(BASELINE, {})
    return [_row(name, runs, baseline) for name, runs in of_variant.items()]


def _row(name: str, runs: dict[int, Row], baseline: dict[int, Row]) -> Row:
    def mean(key: str) -> float:
        return float(np.mean([log["packing"][key] for log in runs.values()]))

    norms = [_late_norms(log) for log in runs.values()]
    row = {
        "variant": name,
        "seeds": sorted(runs),
        "loss": float(np.mean([_final(log, "all") for log in runs.values()])),
        "loss_of_seeds": [_final(runs[seed], "all") for seed in sorted(runs)],
        "loss_long": float(np.mean([_final(log, "long") for log in runs.values()])),
        "optimizer_steps": mean("steps"),
        "imbalance": mean("imbalance_mean"),
        "late_steps": mean("late_steps"),
        "spread_steps": mean("spread_steps"),
        "max_delay_steps": max(log["packing"]["max_delay_steps"] for log in runs.values()),
        "token_cv": mean("token_cv"),
        "long_share_mean": mean("long_share_mean"),
        "long_share_std": mean("long_share_std"),
        "gradient_norm_mean": float(np.mean([n.mean() for n in norms])),
        "gradient_norm_variance": float(np.mean([n.var(ddof=1) for n in norms])),
    }
    paired = sorted(runs.keys() & baseline.keys()) if name != BASELINE else []
    for key, measure in (("difference", "all"), ("difference_long", "long")):
        percent = [100 * (_final(runs[s], measure) / _final(baseline[s], measure) - 1) for s in paired]
        row[f"{key}_percent"], row[f"{key}_half_width"] = interval(percent)
        row[f"{key}_of_seeds"] = percent
    return row


def interval(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and half of the width of its 95 % interval (Student's t); None where there are too few values."""
    if not values:
        return None, None
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, None
    error = float(stats.sem(values)) * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return mean, error


def _final(log: Row, measure: str) -> float:
    return float(log["validation"][-1][measure])


def _late_norms(log: Row) -> np.ndarray:
    """Gradient norms in the second half of the steps, where they hardly fall any more."""
    norms = np.array(log["steps"]["gradient_norm"])
    return norms[len(norms) // 2 :]


def verdicts(rows: list[Row]) -> list[str]:
    """What the intervals say, a sentence each."""
    said = []
    for row in rows:
        name, mean, half = row["variant"], row["difference_percent"], row["difference_half_width"]
        if name == BASELINE:
            continue
        if half is None:
            said.append(f"`{name}`: {len(row['difference_of_seeds'])} seed(s) beside `{BASELINE}`; no interval yet.")
        elif abs(mean) > half:
            word = "worse" if mean > 0 else "better"
            said.append(f"`{name}` is {word}: {mean:+.2f} % of the loss, {_range(mean, half)}.")
        else:
            said.append(
                f"`{name}`: no difference is seen; it is from {_range(mean, half)} with {mean:+.2f} % in the middle."
            )
    return said


def _range(mean: float, half: float) -> str:
    return f"{mean - half:+.2f} to {mean + half:+.2f} %"


def goals(rows: list[Row]) -> list[results.Goal]:
    return [
        results.Goal(
            name=f"{row['variant']}: final validation loss over {BASELINE}, upper end of the 95 % interval, percent",
            value=row["difference_percent"] + row["difference_half_width"],
            goal=GOAL_PERCENT,
            direction="<=",
        )
        for row in rows
        if row["variant"].startswith(JUDGED) and row["difference_half_width"] is not None
    ]


_COLUMNS = {
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
    table = Table("policy", "seeds", *_COLUMNS)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(row["variant"], str(len(row["seeds"])), *(column(row) for column in _COLUMNS.values()))
    console = Console(width=200)
    console.print(table)
    for sentence in verdicts(rows):
        console.print(sentence)


def write(logs: list[Row]) -> list[Path]:
    """The JSON and the picture of these runs; those on a CPU are the ones that docs/convergence.md reports."""
    rows, first = compare(logs), logs[0]
    suffix = "" if first["scale"]["name"] == "cpu" else f".{first['scale']['name']}"
    settings = {key: first[key] for key in ("scale", "corpus", "parameters")}
    settings["runs"] = [f"{log['variant']}-{log['seed']}" for log in logs]
    device = None if first["device"] == "cpu" else first["device"]
    written = [
        results.write("convergence", settings=settings, rows=rows, goals=goals(rows), device=device, suffix=suffix)
    ]
    written.append(_draw(logs, rows, DOCS / f"convergence{suffix}.png"))
    if not suffix:
        written.append(_document(logs, rows, DOCS / "convergence.md"))
    return written


def _document(logs: list[Row], rows: list[Row], path: Path) -> Path:
    """Exchange what is between the two marks of the page."""
    begin, end = "<!-- results: written by python -m benchmarks.convergence -->\n", "<!-- end of results -->"
    page = path.read_text()
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} must have the lines {begin.strip()!r} and {end!r} once each")
    first, scale = logs[0], logs[0]["scale"]
    corpus = first["corpus"]
    train, held_out = corpus["train"], corpus["held_out"]
    tokens = scale["global_batches"] * scale["num_micro_batches"] * scale["context_length"]
    lines = [
        f"{len(logs)} runs of {tokens:,} tokens, {first['parameters']:,} parameters. Training text: "
        f"{train['documents']:,} documents of {train['tokens']:,} tokens (p50 {train['p50']:,}, p90 {train['p90']:,}, "
        f"longest {train['longest']:,}); held out: {held_out['documents']:,} of {held_out['tokens']:,}; digest "
        f"`{corpus['digest']}`.",
        "",
        "| policy | seeds | " + " | ".join(_COLUMNS) + " |",
        "|---" * (2 + len(_COLUMNS)) + "|",
        *(
            f"| `{row['variant']}` | {len(row['seeds'])} | " + " | ".join(c(row) for c in _COLUMNS.values()) + " |"
            for row in rows
        ),
        "",
        *(f"- {sentence}" for sentence in verdicts(rows)),
        *_resolution(rows),
    ]
    before, rest = page.split(begin)
    path.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1])
    return path


def _resolution(rows: list[Row]) -> list[str]:
    """How small a difference these runs could have shown."""
    halves = [row["difference_half_width"] for row in rows if row["difference_half_width"] is not None]
    seeds = next((row["loss_of_seeds"] for row in rows if row["variant"] == BASELINE), [])
    if not halves or len(seeds) < 2:
        return []
    spread = 100 * (max(seeds) / min(seeds) - 1)
    return [
        f"- What can be resolved: the intervals reach {min(halves):.2f} to {max(halves):.2f} % to either side of the "
        f"mean, so anything smaller stays hidden. Between its seeds `{BASELINE}` itself differs by {spread:.2f} %."
    ]


def _draw(logs: list[Row], rows: list[Row], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), constrained_layout=True)
    for name, colour in COLOURS.items():
        runs = [log["validation"] for log in logs if log["variant"] == name]
        if not runs:
            continue
        tokens = np.mean([[v["tokens"] for v in run] for run in runs], axis=0) / 1e6
        left.plot(tokens, np.mean([[v["all"] for v in run] for run in runs], axis=0), color=colour, label=name, lw=1.2)
    left.set(xlabel="trained tokens (millions)", ylabel="validation loss (mean over seeds)", yscale="log")
    left.yaxis.set_minor_formatter(lambda value, _: f"{value:.1f}")
    left.legend(frameon=False, fontsize=8)
    compared = [row for row in rows if row["difference_percent"] is not None]
    for place, row in enumerate(reversed(compared)):
        colour, seeds = COLOURS[row["variant"]], row["difference_of_seeds"]
        right.scatter(seeds, [place] * len(seeds), color=colour, s=14, alpha=0.5)
        error = row["difference_half_width"]
        right.errorbar(row["difference_percent"], place, xerr=error, color=colour, marker="s", capsize=4)
    right.axvline(0, color="black", lw=0.8)
    right.set_yticks(range(len(compared)), [row["variant"] for row in reversed(compared)])
    right.set_xlabel(f"final loss to {BASELINE}, %: mean, 95 % interval, seeds")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
