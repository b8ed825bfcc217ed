"""The arithmetic of `end_to_end_cpu`: what steps must take of the measured passes, and what balance gains of it."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from benchmarks.results import Row
from benchmarks.training_cpu import Steps
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import makespans


class Costs(NamedTuple):
    """Times as planning predicts them; what they predict is called "by trained", as they are fitted to training."""

    crossover: int
    """A whole micro-batch costs rows * crossover + pairs."""
    row: float
    """A shard costs rows * this + kernel_us."""

    def work(self, layout: str, step: Row) -> list[float]:
        """Cost of every micro-batch of a rank, in a unit that all ranks share."""
        if layout.startswith("CP"):
            return [self.row * rows + us for rows, us in zip(step["rows"], step["kernel_us"], strict=True)]
        return [float(rows * self.crossover + pairs) for rows, pairs in zip(step["rows"], step["pairs"], strict=True)]


def fit(steps: Steps) -> Costs:
    """Costs of micro-batches that one rank holds whole, by least squares of relative errors."""
    busy, rows, pairs, kernel = (np.concatenate([s[k] for s in steps]) for k in ("busy", "rows", "pairs", "kernel_us"))

    def ratio(other: np.ndarray) -> float:
        """Cost of a row in units of `other`."""
        row, one = np.linalg.lstsq(np.stack((rows, other), 1) / busy[:, None], np.ones(len(busy)))[0]
        if not (row > 0 and one > 0):
            raise ValueError("micro-batches took no longer for more attention; run while nothing else does")
        return float(row / one)

    return Costs(round(ratio(pairs)), ratio(kernel))


def critical_path(layout: str, busy: np.ndarray, group: int | None = None) -> float:
    """Time of a step that computing takes, of busy times float64 [ranks, micro-batches of a rank], in their unit.

    The slower rank under data parallelism. Under context parallelism the slower rank of every micro-batch, since ranks
    wait for each other within it. In a pipeline 1F1B, interleaved with VPP=2, of the mean over stages; `group` is
    the schedule's.
    """
    if layout.startswith("DP"):
        return float(busy.sum(axis=1).max())
    if layout.startswith("CP"):
        return float(busy.max(axis=0).sum())
    chunks, (stages, count) = 2 if "VPP=2" in layout else 1, busy.shape
    sizes = {"num_stages": stages, "micro_batches_per_rank": count, "num_chunks": chunks, "group_size": group}
    schedule = Schedule(**sizes, overlap_transfers=chunks > 1)
    # In whole numbers, a third of a pass forward and two backward.
    scale = 2**40 / busy.sum()
    work = np.rint(busy.mean(axis=0) * scale).astype(np.int64)
    return float(makespans(schedule, work[None])[0]) / 3 / scale / chunks


def even_path(layout: str, busy: np.ndarray, count: int | None = None) -> float:
    """The critical path if all ranks and micro-batches had the mean, of `count` on a rank (default: as many)."""
    count = count or busy.shape[1]
    return critical_path(layout, np.full((len(busy), count), busy.sum() / len(busy) / count))


def totals(layout: str, ranks: list[Steps], costs: Costs, count: int) -> Counter[str]:
    """Sums over steps, measured and as `costs` predict.

    Even is with `count` micro-batches on a rank, plain's, so that it measures work whatever a method has.
    """
    sums: Counter[str] = Counter()
    for of_ranks in zip(*ranks, strict=True):
        sums["seconds"] += float(np.mean([step["seconds"] for step in of_ranks]))
        busy = np.array([step["busy"] for step in of_ranks])
        work = np.array([costs.work(layout, step) for step in of_ranks])
        for times, kind in ((busy, ""), (work, " by trained")):
            sums[f"critical{kind}"] += critical_path(layout, times, of_ranks[0]["group"])
            sums[f"even{kind}"] += even_path(layout, times, count)
    return sums


def summarise(layout: str, count: int, measured: dict[str, list[Steps]], costs: Costs) -> list[Row]:
    """A row for each method; the error of its speed-up is by jackknife over steps.

    Args:
        layout: its name.
        count: plain's micro-batches of a rank.
        measured: of every method the steps of each rank, plain first.
        costs: by which imbalance is predicted.

    Raises ValueError if methods trained other numbers of tokens.
    """
    plain, *_ = measured.values()
    of_plain, rows = totals(layout, plain, costs, count), []
    # If plain's critical path were even.
    gain = of_plain["seconds"] / (of_plain["seconds"] - of_plain["critical"] + of_plain["even"])
    for method, ranks in measured.items():
        if [step["tokens"] for step in ranks[0]] != [step["tokens"] for step in plain[0]]:
            raise ValueError(f"{layout}, {method}: its steps have other tokens than plain's; compare the same steps")
        found = totals(layout, ranks, costs, count)
        speedup = of_plain["seconds"] / found["seconds"]
        seconds = np.array([[step["seconds"] for step in of[0]] for of in (plain, ranks)])
        row: Row = {"layout": layout, "windows": count, "method": method, "speedup": speedup}
        row |= {"speedup_error": ratio_error(*seconds), "attainable": gain, "fraction": (speedup - 1) / (gain - 1)}
        kinds = ("", " by trained")
        rows.append(row | {f"imbalance{kind}": found[f"critical{kind}"] / found[f"even{kind}"] for kind in kinds})
    return rows


def ratio_error(above: np.ndarray, below: np.ndarray) -> float:
    """Standard error of the ratio of two sums of paired values, float64 [n] each, by jackknife."""
    left_out = (above.sum() - above) / (below.sum() - below)
    return float(np.sqrt((len(left_out) - 1) * left_out.var()))
