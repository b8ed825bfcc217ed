"""How far packing moves documents, by planning alone: delay in steps and in tokens, and what steps then hold."""

from typing import Any

import numpy as np

from benchmarks.lengths import packer
from benchmarks.results import Row
from megatron_wlb.job import Job
from megatron_wlb.plan import metrics

LENGTHS = ("F2", "dist_wlbllm", "two humps")
"""Of `benchmarks.packing.distributions`."""
STEPS = 300
COLUMNS = {
    "delay: mean": "{mean_delay_steps:.2f} steps, {mean_delay_tokens:.2f} M tokens",
    "p99": "{p99_delay_steps} steps, {p99_delay_tokens:.1f} M",
    "largest": "{max_delay_steps} steps, {max_delay_tokens:.1f} M",
    "token CV": "{token_cv:.3f}",
    "long share": "{long_share_mean:.2f} ± {long_share_std:.2f}",
}


def displacement(job: Job, lengths: np.ndarray, steps: int = STEPS) -> Row:
    """Pack `lengths` in order. Means and quantiles are over tokens, as in `metrics.Summary` without the first and last
    tenth of the steps; extremes are of all. A delay in tokens is what was trained since the step of arrival began.
    """
    packs = packer(lengths, job)
    packed = [packs.next() for _ in range(steps)]
    measured = [metrics.measure(each.packing, each.step, job) for each in packed]
    trained = np.cumsum([0, *(m.tokens for m in measured)])
    documents = np.concatenate([each.packing.documents for each in packed])
    ran = np.repeat(np.arange(steps), [len(each.packing.documents) for each in packed])
    late = np.maximum(0, ran - documents["arrival"])
    row: dict[str, Any] = {}
    middle = (ran >= steps // 10) & (ran < steps - steps // 10)
    weights = documents["length"][middle]
    for unit, delay in (("steps", late), ("tokens", trained[ran] - trained[ran - late])):
        row[f"mean_delay_{unit}"] = float(np.average(delay[middle], weights=weights))
        row[f"p99_delay_{unit}"] = int(np.quantile(delay[middle], 0.99, weights=weights, method="inverted_cdf"))
        row[f"max_delay_{unit}"] = int(delay.max())
    summary = metrics.summarise(measured, num_waiting=packed[-1].num_waiting)
    return row | {key: getattr(summary, key) for key in ("token_cv", "long_share_mean", "long_share_std")}


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table; tokens in millions."""
    lines = [f"| lengths | policy | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for row in rows:
        shown = row | {key: value / 1e6 for key, value in row.items() if key.endswith("_tokens")}
        cells = [column.format(**shown) for column in COLUMNS.values()]
        lines.append(f"| {row['data']} | `{row['variant']}` | {' | '.join(cells)} |")
    return lines
