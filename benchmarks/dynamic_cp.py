"""Megatron's own example of dynamic context parallelism, both of its sides: predicted, held against its measurements.

    python -m benchmarks.dynamic_cp [--quick] [--check]

The example (`examples/dynamic_context_parallel` of Megatron-LM's branch dev, June 2026) trains a GPT of 0.9B on 4 to 64
GPUs: by `--sequence-packing-scheduler dp_balanced`, with CP 4 for all samples, and by `default_dynamic_cp`, with groups
of 1, 2, 4, ... ranks. Lengths are log-normal; a step has eight samples for every four GPUs. Its README has one measured
run each: the mean of 20 steps without the slowest and the fastest tenth.

Here both schedulers plan steps of such lengths, of which the order is not known. A micro-batch takes its predicted time
on a GPU. Ranks of a group wait for each other, and all for the update. The README does not name the GPU: GB200, of
which nodes have four, is assumed, with H100 beside it. `only launches` is the ratio if all micro-batches took the same
time, as where the host launches kernels more slowly than the GPU runs them. Errors are standard errors, of ratios of
means over so many steps as were measured. Writes benchmarks/results/dynamic_cp.json in some minutes.
"""

from collections.abc import Sequence
from functools import cache
from math import log

import numpy as np

from benchmarks import results
from benchmarks.results import Row
from megatron_wlb.cli.analyze.report import ratio_of
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import shape
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import pass_times
from megatron_wlb.simulate.step import simulate_step

MEASURED = {
    4: (195.269, 151.906),
    8: (220.119, 155.850),
    16: (226.775, 187.125),
    32: (286.206, 208.088),
    64: (271.988, 181.912),
}
"""Milliseconds of a step, `dp_balanced` and `default_dynamic_cp`, by GPUs."""
MEASURED_STEPS = 20
PROFILES = ("gb200-cudnn-9.22", "h100-cudnn")
CP, ROOM, WINDOW, PER_RANK = 4, 2048, 8192, 8
"""Ranks of a fixed group, tokens of a rank, longest sample, samples of a data-parallel rank."""
SLACK = 1.05
"""By which a rank may have more work than the longest sample gives it."""
MODEL = shape(12, 2048, 8192, 16, 16, 131_072)
STEPS, QUICK_STEPS = 100, 4

Groups = list[tuple[int, list[int]]]
"""Of a micro-batch: ranks, and samples, of every group."""


def sampled(steps: int, dp: int) -> np.ndarray:
    """Tokens of samples, int64 [steps, samples]."""
    sigma = 1.5
    lengths = np.random.default_rng(0).lognormal(log(1024) - sigma**2 / 2, sigma, (steps, PER_RANK * dp))
    return np.clip(lengths, 128, WINDOW).astype(np.int64) - 1


def dp_balanced(lengths: Sequence[int], dp: int, room: int = CP * ROOM) -> list[list[int]]:
    """Packs of samples in their order, each up to `room` tokens, as many as `dp` divides.

    Where some are missing, the last samples of the last packs that have several become packs of their own.
    """
    packs: list[list[int]] = [[]]
    held = 0
    for sample, length in enumerate(lengths):
        if packs[-1] and held + length > room:
            packs.append([])
            held = 0
        packs[-1].append(sample)
        held += length
    at = len(packs) - 1
    while len(packs) % dp:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
        else:
            at -= 1
    return packs


def default_dynamic_cp(lengths: Sequence[int], ranks: int, room: int = ROOM) -> list[Groups]:
    """Micro-batches over all `ranks`, a power of two, in groups from the first rank on.

    The longest samples come first. Each joins a group of 2^i ranks that has room for it, or opens one, whichever leaves
    the busiest rank the least work (quadratic), at most `SLACK` of the longest sample's on the fewest ranks; otherwise
    it waits for the next micro-batch. Ranks that are left over double the smallest groups.
    """
    waiting = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    made = []
    while waiting:
        groups, later = list[tuple[int, list[int]]](), list[int]()
        tokens, work = list[float](), list[float]()
        most = SLACK * lengths[waiting[0]] * room
        for sample in waiting:
            length, best = lengths[sample], None
            for size in sizes(length, ranks, room)[: None if groups else 1]:
                share, cost = length / size, length**2 / size
                joined = [i for i, (of, _) in enumerate(groups) if of == size and tokens[i] + share <= room]
                tried = [(max(*work, work[i] + cost), i) for i in joined]
                if sum(of for of, _ in groups) + size <= ranks:
                    tried.append((max([*work, cost]), len(groups)))
                for busiest, i in tried:
                    if busiest <= most and (best is None or busiest < best[0]):
                        best = busiest, i, size
            if best is None:
                later.append(sample)
                continue
            _, i, size = best
            if i == len(groups):
                groups.append((size, []))
                tokens.append(0.0)
                work.append(0.0)
            groups[i][1].append(sample)
            tokens[i] += length / size
            work[i] += length**2 / size
        while sum(size for size, _ in groups) < ranks:
            smallest = min(range(len(groups)), key=lambda i: groups[i][0])
            groups[smallest] = (2 * groups[smallest][0], groups[smallest][1])
        made.append(groups)
        waiting = later
    return made


def sizes(length: int, ranks: int, room: int) -> list[int]:
    """Sizes of groups that hold a sample, the smallest first."""
    return [size for size in (1 << i for i in range(ranks.bit_length())) if size <= ranks and length <= size * room]


@cache
def job_of(profile: str, cp: int, dp: int = 1) -> Job:
    """The example's model as Megatron trains it, with a ring per sample."""
    sizes = {"context_length": WINDOW, "global_batch_size": dp, "parallel": Parallel(cp=cp, dp=dp)}
    return without_wlb(make_job(model=MODEL, profile=load_profile(profile), **sizes))


def padded(lengths: np.ndarray, gpus: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples as both schedulers have them, whose chunks are whole tokens on as many ranks as may share them."""
    fixed, dynamic = (-(-lengths // unit) * unit for unit in (2 * CP, 2 * gpus))
    return fixed, dynamic


def planned(lengths: np.ndarray, gpus: int) -> tuple[list[list[int]], list[Groups]]:
    fixed, dynamic = padded(lengths, gpus)
    return dp_balanced(fixed.tolist(), gpus // CP), default_dynamic_cp(dynamic.tolist(), gpus)


def predicted(lengths: np.ndarray, gpus: int, profile: str) -> tuple[float, float]:
    """Time of a step, us, by both schedulers."""
    dp, (fixed, dynamic), (packs, micro_batches) = gpus // CP, padded(lengths, gpus), planned(lengths, gpus)
    job = job_of(profile, CP, dp)
    step = simulate_step(job, [[shard(fixed[pack], job) for pack in packs[rank::dp]] for rank in range(dp)])
    clocks = np.zeros(gpus)
    for groups in micro_batches:
        first = 0
        for size, samples in groups:
            alone = job_of(profile, size)
            passes = pass_times(alone, [shard(dynamic[samples], alone)])
            mine = slice(first, first + size)
            clocks[mine] = clocks[mine].max() + passes.forward.sum() + passes.backward.sum()
            first += size
    return step.time, float(clocks.max() + step.gradients + step.optimizer + step.parameters)


def row_of(gpus: int, steps: int) -> Row:
    dp, measured = gpus // CP, np.array(MEASURED[gpus])
    batches = sampled(steps, dp)
    counts = np.array([[len(packs) / dp, len(groups)] for packs, groups in (planned(each, gpus) for each in batches)])
    row: Row = {"gpus": gpus, "measured": measured[0] / measured[1], "measured_ms": measured.tolist()}
    row["micro_batches"] = counts.mean(axis=0).tolist()
    ms = {profile: np.array([predicted(each, gpus, profile) for each in batches]) / 1e3 for profile in PROFILES}
    for name, values in ({"only launches": counts} | ms).items():
        row[name], error = ratio_of(*values.T)
        row[f"{name}, error"] = error * (steps / MEASURED_STEPS) ** 0.5
    for profile, values in ms.items():
        row |= {f"{profile}, ms": values.mean(axis=0).tolist()}
        row |= {f"{profile}, of measured": (values.mean(axis=0) / measured).tolist()}
    return row


def goals(rows: list[Row]) -> list[results.Goal]:
    name = "error of the predicted ratio"
    return [
        results.at_most(f"{row['gpus']} GPUs: {name}", abs(log(row[PROFILES[0]] / row["measured"])), 0.1)
        for row in rows
    ]


def main() -> None:
    args = results.parser(__doc__, "few steps on 4 and 8 GPUs").parse_args()
    rows = [row_of(n, QUICK_STEPS if args.quick else STEPS) for n in list(MEASURED)[: 2 if args.quick else None]]
    results.show(rows, [name for name in rows[0] if not name.endswith(", ms")])
    results.finish(args, "dynamic_cp", settings={"steps": STEPS}, rows=rows, goals=goals(rows))


if __name__ == "__main__":
    main()
