"""Compares the runs of `benchmarks/convergence.py` with the baseline, seed by seed: a table, a picture and a page."""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import results
from benchmarks.results import Row

BASELINE = "original"
CONTROL = "original-shuffled"
"""The baseline with another order of documents, whose distance from it is noise."""
CONFIDENCE = 0.95
MARGIN_PERCENT = 0.5
"""Equivalent is what two one-sided tests, of 1 - CONFIDENCE each, show to be less than this from the baseline, above
and below, in percent of its loss. Set before there were results. The paper saw 1.6 % for packing over 8 global batches.
"""
HALF_WIDTH_PERCENT = 0.4
"""Goal for the interval of a difference: so many seeds are enough."""
MEASURES = {"imbalance": "imbalance_mean", "late_steps": "late_steps", "token_cv": "token_cv"}
"""Columns that are means over seeds of `metrics.summarise`."""
COLORS = {
    "original": "#000000",
    "original-shuffled": "#8c8c8c",
    "paper": "#009e73",
    "delay": "#0072b2",
    "fixed-8": "#d55e00",
}


def read(folder: Path) -> list[Row]:
    """The logs of finished runs, in the order of COLORS. Raises ValueError if they do not share their settings."""
    logs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for key in ("scale", "corpus", "device"):
        if any(log[key] != logs[0][key] for log in logs):
            raise ValueError(f"the runs in {folder} differ in their {key}; keep those of one setting there")
    return sorted(logs, key=lambda log: (list(COLORS).index(log["variant"]), log["seed"]))


def compare(logs: list[Row]) -> list[Row]:
    """One row for each variant; differences are to the baseline with the same seed, in percent of its loss.

    Variants of which fewer than two seeds have finished, beside the baseline, are left out.
    """
    runs: dict[str, dict[int, Row]] = {BASELINE: {}}
    for log in logs:  # the baseline's come first
        if log["variant"] == BASELINE or log["seed"] in runs[BASELINE]:
            runs.setdefault(log["variant"], {})[log["seed"]] = log
    return [_row(name, by_seed, runs[BASELINE]) for name, by_seed in runs.items() if len(by_seed) > 1]


def _row(name: str, runs: dict[int, Row], baseline: dict[int, Row]) -> Row:
    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    packings = [log["packing"] for log in runs.values()]
    losses = [_final(runs[seed], "all") for seed in sorted(runs)]
    row = {
        "variant": name,
        "seeds": sorted(runs),
        "loss_of_seeds": losses,
        **{key: mean(p[measure] for p in packings) for key, measure in MEASURES.items()},
        "p99_delay_steps": _p99(sum((Counter(log["tokens_by_delay"]) for log in runs.values()), Counter())),
        "max_delay_steps": max(p["max_delay_steps"] for p in packings),
        "long_share_with_tokens": mean(map(_long_share_with_tokens, runs.values())),
    }
    if name != BASELINE:
        for key, measure in (("difference", "all"), ("difference_long", "long")):
            ratios = [_final(runs[seed], measure) / _final(baseline[seed], measure) for seed in sorted(runs)]
            percent = [100 * (ratio - 1) for ratio in ratios]
            row[f"{key}_percent"], row[f"{key}_half_width"] = float(np.mean(percent)), half_width(percent)
            row[f"{key}_of_seeds"] = percent
        row["difference_std"] = float(np.std(row["difference_of_seeds"], ddof=1))
        row["equivalence_p"] = equivalence(row["difference_of_seeds"], MARGIN_PERCENT)
    return row


def half_width(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean (Student's t)."""
    return float(stats.sem(values)) * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))


def equivalence(values: list[float], margin: float) -> float:
    """p of two one-sided t-tests that the mean lies within +-margin (Schuirmann 1987)."""
    sides = (-margin, "greater"), (margin, "less")
    return max(float(stats.ttest_1samp(values, edge, alternative=side).pvalue) for edge, side in sides)


def _p99(tokens_by_delay: Counter[str]) -> int:
    """The least delay, at least 0, that 99 % of the tokens do not exceed."""
    delays = sorted(map(int, tokens_by_delay))
    tokens = np.cumsum([tokens_by_delay[str(delay)] for delay in delays])
    return max(0, delays[int(np.searchsorted(tokens, 0.99 * tokens[-1]))])


def _long_share_with_tokens(log: Row) -> float:
    """Correlation of steps' tokens with their share in long documents; 0 if all steps have equally many."""
    tokens, long = (np.array(log["steps"][key], float) for key in ("tokens", "long_tokens"))
    return float(np.corrcoef(tokens, long / tokens)[0, 1]) if tokens.std() else 0.0


def _final(log: Row, measure: str) -> float:
    return float(log["validation"][-1][measure])


def _compared(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["variant"] != BASELINE]


def verdicts(rows: list[Row]) -> list[str]:
    """The outcome of the intervals and tests, a sentence for each variant."""
    sentences = []
    for row in _compared(rows):
        name, mean, half = row["variant"], row["difference_percent"], row["difference_half_width"]
        found = [] if abs(mean) <= half else ["worse" if mean > 0 else "better"]
        if row["equivalence_p"] <= 1 - CONFIDENCE:
            found.append(f"equivalent within {MARGIN_PERCENT} %")
        sentences.append(
            f"`{name}`: {' and '.join(found) or 'open, neither different nor equivalent'} (p of equivalence "
            f"{row['equivalence_p']:.2g}, {len(row['difference_of_seeds'])} seeds)."
        )
    return sentences


def goals(rows: list[Row]) -> list[results.Goal]:
    """Every interval is narrow enough to decide, and the judged variants are equivalent to the baseline."""
    wanted = []
    for row in _compared(rows):
        name = f"{row['variant']}: half of the 95 % interval of the difference to {BASELINE}, percent of the loss"
        wanted.append(results.at_most(name, row["difference_half_width"], HALF_WIDTH_PERCENT))
        if row["variant"] in ("paper", "delay"):
            name = f"{row['variant']}: p of the two one-sided tests within {MARGIN_PERCENT} % of {BASELINE}"
            wanted.append(results.at_most(name, row["equivalence_p"], round(1 - CONFIDENCE, 2)))
    return wanted


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "seeds": lambda r: str(len(r["seeds"])),
    "to original, %": lambda r: _with_error(r, "difference"),
    "long documents, %": lambda r: _with_error(r, "difference_long"),
    "imbalance": lambda r: f"{r['imbalance']:.3f}",
    "delay: mean, p99, largest": lambda r: f"{r['late_steps']:.2f}, {r['p99_delay_steps']}, {r['max_delay_steps']}",
    "tokens per step, CV": lambda r: f"{r['token_cv']:.3f}",
    "correlation of long share and tokens": lambda r: f"{r['long_share_with_tokens']:z.2f}",
}


def _with_error(row: Row, key: str) -> str:
    return "" if row["variant"] == BASELINE else f"{row[f'{key}_percent']:+.2f} ± {row[f'{key}_half_width']:.2f}"


def report(args: Namespace, logs: list[Row]) -> None:
    """Print the comparison, and write it with its picture."""
    rows = compare(logs)
    if few := sorted({log["variant"] for log in logs} - {row["variant"] for row in rows}):
        print(f"left out, since fewer than two seeds of them and of {BASELINE} have finished: {', '.join(few)}")
    if len(rows) < 2:
        return
    cells = [{name: column(row) for name, column in _COLUMNS.items()} for row in rows]
    results.show([{"policy": row["variant"]} | cell for row, cell in zip(rows, cells, strict=True)], width=200)
    print(*verdicts(rows), sep="\n")
    settings = {key: logs[0][key] for key in ("scale", "corpus", "parameters")}
    settings["runs"] = [f"{log['variant']}-{log['seed']}" for log in logs]
    results.finish(args, "convergence", settings=settings, rows=rows, goals=goals(rows), draw=partial(draw, logs, rows))


def page(data: Row) -> str:
    """The text of docs/convergence.md on convergence.json; `python -m scripts.docs` puts it there."""
    settings, rows = data["settings"], data["rows"]
    scale, train, held_out = settings["scale"], settings["corpus"]["train"], settings["corpus"]["held_out"]
    tokens = scale["global_batches"] * scale["global_batch_size"] * scale["context_length"]
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
        "",
        "![Validation loss over tokens, and final differences](convergence.png)",
    ]
    return "\n".join(lines) + "\n"


def _resolution(rows: list[Row]) -> list[str]:
    """The least difference that these runs could have shown, and the difference without a cause."""
    (baseline,), others = ([row for row in rows if (row["variant"] == BASELINE) is is_it] for is_it in (True, False))
    noise = [row["difference_std"] for row in others if row["variant"] == CONTROL]
    halves, losses = [row["difference_half_width"] for row in others], baseline["loss_of_seeds"]
    enough = "enough" if max(halves) <= HALF_WIDTH_PERCENT else "not enough yet"
    return [
        *(
            f"- Noise: two orders of the same documents under `{BASELINE}` end {each:.2f} % apart (standard deviation "
            f"over seeds), and `{BASELINE}` itself {100 * (max(losses) / min(losses) - 1):.2f} % between its seeds."
            for each in noise
        ),
        f"- Seeds: the intervals reach {min(halves):.2f} to {max(halves):.2f} % to either side; "
        f"{HALF_WIDTH_PERCENT} % is the goal, so there are {enough}.",
    ]


def draw(logs: list[Row], rows: list[Row], folder: Path) -> Path:
    """Loss over tokens, of the seeds that all variants have, and the final differences with their intervals."""
    figure: Any = results.figure(12, 4.2)
    left, right = figure.subplots(1, 2)
    shared = set[int].intersection(*(set(row["seeds"]) for row in rows))
    for variant, color in COLORS.items():
        runs = [log["validation"] for log in logs if log["variant"] == variant and log["seed"] in shared]
        if runs:
            tokens, losses = (np.mean([[v[key] for v in run] for run in runs], axis=0) for key in ("tokens", "all"))
            left.plot(tokens / 1e6, losses, color=color, label=variant, lw=1.2)
    left.set(xlabel="trained tokens (millions)", ylabel=f"validation loss (mean of {len(shared)} seeds)", yscale="log")
    left.yaxis.set_minor_formatter(lambda value, _: f"{value:.1f}")
    left.legend(frameon=False, fontsize=8)
    compared = _compared(rows)[::-1]
    for place, row in enumerate(compared):
        color, seeds = COLORS[row["variant"]], row["difference_of_seeds"]
        right.scatter(seeds, [place] * len(seeds), color=color, s=14, alpha=0.5)
        error = row["difference_half_width"]
        right.errorbar(row["difference_percent"], place, xerr=error, color=color, marker="s", capsize=4)
    right.axvline(0, color="black", lw=0.8)
    right.set_yticks(range(len(compared)), [row["variant"] for row in compared])
    right.set_xlabel(f"final loss to {BASELINE}, %: mean, 95 % interval, seeds")
    return results.save(figure, "convergence", folder)
