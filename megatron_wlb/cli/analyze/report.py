"""The numbers: steps of plain Megatron, of the paper's scheme and of --wlb, packed, sharded and simulated."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli import tune
from megatron_wlb.cli.analyze.setup import WARM_UP, Setup, flags_of, schemes
from megatron_wlb.cli.balance import imbalances
from megatron_wlb.cli.flags import DEFAULT_PROFILE
from megatron_wlb.cost.attention import Profile, shipped_profiles
from megatron_wlb.cost.memory import peak_bytes
from megatron_wlb.cost.work import document_work
from megatron_wlb.job import Job
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.packing.wlb import WlbPacking
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate import SimulatedStep, breakdown, limit_time, simulate_step
from megatron_wlb.simulate.micro_batches import ALIKE

FORMAT = "megatron-wlb-analysis"
VERSION = 2
MAX_STEPS, LEAST_SIMULATED, LEAST_PACKED = 200, 4, 40
PASSES, MICRO_BATCHES = 60_000, 20_000
"""About how much is simulated and packed of each scheme, where that is between the bounds above."""
FRONT_STEPS, FRONT_MICRO_BATCHES = 150, 6_000
FRONT_THRESHOLDS = ((0.5,), (0.75,), (0.25, 0.5), (0.5, 0.75), (0.375, 0.625, 0.875))

Advance = Callable[[int], None]


class Sample(NamedTuple):
    """A step that was simulated."""

    step: SimulatedStep
    limit_us: float
    documents: list[np.ndarray]
    """Lengths of the documents of its micro-batches."""
    work: int


class Report(NamedTuple):
    """Everything that is shown."""

    setup: Setup
    entries: dict[str, Any]
    """As JSON types."""
    examples: dict[str, Sample]
    """A typical step of every scheme, for the pictures: the median of time over limit."""


def steps_of(job: Job) -> tuple[int, int]:
    """How many steps of each scheme are packed, and how many of those are simulated."""
    parallel, count = job.parallel, job.num_micro_batches
    passes = count * (parallel.pp * parallel.vpp + 2 * parallel.cp)
    simulated = min(MAX_STEPS, max(LEAST_SIMULATED, PASSES // passes))
    packed = min(MAX_STEPS, max(LEAST_PACKED, MICRO_BATCHES // count))
    return packed // simulated * simulated or simulated, simulated


def analyse(setup: Setup, packed: int, simulated: int, advance: Advance) -> Report:
    """Simulate all schemes and sweep the front. `advance` is told of every step and every tuning."""
    numbers, examples, jobs = {}, {}, schemes(setup.job, setup.free)
    for name, job in jobs.items():
        numbers[name], examples[name] = measure(setup, job, packed, simulated, advance)
    limit = _compare(numbers)
    better = "free" in jobs and numbers["free"]["speedup"] > (1 + ALIKE) * numbers["ours"]["speedup"]
    proposed = "free" if better else "ours"
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "prediction": True,
        "job": setup.job.to_json(),
        "model": setup.model,
        "data": data_entries(setup),
        "steps": {"warm_up": WARM_UP, "packed": packed, "simulated": simulated},
        "profile": profile_entries(setup.settings.profile or DEFAULT_PROFILE, setup.job.profile),
        "limit": limit,
        "micro_batches": [
            {"micro_batches": each.job.num_micro_batches, "time": each.time, "late_steps": each.late_steps}
            for each in setup.tried
        ],
        "schemes": numbers,
        "front": front(setup, advance),
        "proposed": proposed,
        "flags": flags_of(setup, jobs[proposed]),
        "notes": setup.notes,
        "ignored": setup.ignored,
        "refused": setup.refused,
    }
    return Report(setup, entries, examples)


def _compare(schemes: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Add to the numbers of schemes what they bring over plain Megatron. Returns what nobody could exceed."""
    plain = schemes["plain"]
    us_per_token = min(numbers["limit_us_per_token"] for name, numbers in schemes.items() if name in ("ours", "free"))
    limit = {"us_per_token": us_per_token, "speedup": plain["us_per_token"] / us_per_token}
    for name, numbers in schemes.items():
        speedup = plain["us_per_token"] / numbers["us_per_token"]
        error = math.hypot(numbers["us_per_token_error"], plain["us_per_token_error"])
        numbers["speedup"] = speedup
        numbers["speedup_error"] = 0.0 if numbers is plain else speedup * error
        # Megatron has its own, since it cuts documents where windows end, which is less work a token.
        own = numbers["limit_us_per_token"] if name == "plain" else us_per_token
        numbers["of_limit"] = own / numbers["us_per_token"]
    return limit


def measure(setup: Setup, job: Job, packed: int, simulated: int, advance: Advance) -> tuple[dict[str, Any], Sample]:
    """Pack `packed` steps of a scheme, simulate `simulated` of them, evenly spread; means as JSON types, an example.

    Few steps have more or fewer long documents than all data has. So time per token is time per work of what was
    simulated, times the work per token of everything that was packed.
    """
    measured: list[metrics.StepMetrics] = []
    samples: list[Sample] = []
    total_work = waiting = 0
    for i, step in enumerate(setup.steps(job, packed)):
        packing = step.packing
        measured.append(metrics.measure(packing, step.step, job))
        work = int(document_work(packing.documents["length"], job.crossover_tokens).sum())
        total_work, waiting = total_work + work, step.num_waiting
        if i % (packed // simulated) == 0:
            lengths = [packing.micro_batch(k)["length"] for k in range(len(packing))]
            result = simulate_step(job, shard_step(job, lengths))
            samples.append(Sample(result, limit_time(result), lengths, work))
        advance(1)
    summary = metrics.summarise(measured, num_waiting=waiting)
    over_limit = np.array([sample.step.time / sample.limit_us for sample in samples])
    example = samples[int(np.abs(over_limit - np.median(over_limit)).argmin())]
    typical = {part: us / 1e3 for part, us in asdict(breakdown(example.step)).items()}
    numbers = {
        "packing": job.packing.name,
        "num_micro_batches": job.num_micro_batches,
        "cp_sharding": job.cp_sharding if job.parallel.cp > 1 else None,
        **_times(samples, total_work / sum(step.tokens for step in measured)),
        **_packing(job, summary),
        "imbalance": _imbalance(samples, summary),
        "typical_step_ms": {"step": example.step.time / 1e3, **typical},
    }
    return numbers, example


def _times(samples: Sequence[Sample], work_per_token: float) -> dict[str, Any]:
    """The time of a step and of a token, and their error."""
    time, limit, work = np.array([(sample.step.time, sample.limit_us, sample.work) for sample in samples]).T
    per_work = time.sum() / work.sum()
    # Of a ratio of means over steps.
    error = float(np.std(time - per_work * work) / np.sqrt(len(samples)) / time.mean())
    return {
        "step_ms": float(time.mean()) / 1e3,
        "us_per_token": float(per_work * work_per_token),
        "us_per_token_error": error,
        "limit_us_per_token": float(limit.sum() / work.sum() * work_per_token),
    }


def _imbalance(samples: Sequence[Sample], summary: metrics.Summary) -> dict[str, float]:
    """Slowest over mean by predicted times, and largest over mean by the work of lengths; means over steps."""
    levels = [imbalances(sample.step) for sample in samples]
    means = {level: float(np.mean([each[level] for each in levels])) for level in levels[0]}
    return means | {"work_mean": summary.imbalance_mean, "work_p95": summary.imbalance_p95}


def _packing(job: Job, summary: metrics.Summary) -> dict[str, Any]:
    """What packing costs in delay, in even steps and in memory."""
    longest = job.context_length if job.packing.fixed_length else job.max_tokens
    return {
        "late_steps": summary.late_steps,
        "max_delay_steps": summary.max_delay_steps,
        "token_cv": summary.token_cv,
        "longest_micro_batch_tokens": longest,
        "activation_gib": max(peak_bytes(job, stage, longest) for stage in range(job.parallel.pp)) / 2**30,
    }


def data_entries(setup: Setup) -> dict[str, Any]:
    """Documents and tokens of the training split, and their shares by length (powers of 2)."""
    lengths = np.concatenate([source.lengths for source in setup.data.sources])
    edges = 2 ** np.arange(0, math.ceil(math.log2(max(2, int(lengths.max())))) + 1)
    # Every share of a document counts where its length is; one over the window is attended to window by window.
    window, crossover_tokens = setup.job.context_length, setup.job.crossover_tokens
    full, rest = np.divmod(lengths, window)
    work = lengths.astype(np.float64) * crossover_tokens + full * float(window) ** 2 + rest.astype(np.float64) ** 2
    place = np.searchsorted(edges, lengths, side="left")
    shares = {
        name: (np.bincount(place, weights=values, minlength=len(edges)) / values.sum()).tolist()
        for name, values in (("documents", (lengths > 0).astype(np.float64)), ("tokens", lengths), ("work", work))
    }
    quantiles = np.quantile(lengths, (0.5, 0.9, 0.99, 1.0)).astype(int).tolist()
    return {
        "prefixes": setup.data.prefixes,
        "seed": setup.seed,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "length_quantiles": dict(zip(("p50", "p90", "p99", "max"), quantiles, strict=True)),
        "over_window": int((lengths > window).sum()),
        "up_to": edges.tolist(),
        "shares": shares,
    }


def profile_entries(name: str, profile: Profile) -> dict[str, Any]:
    """The profile of that name or path, what it says of its own errors, and the network."""
    cost = resources.files("megatron_wlb.cost")
    shipped = cost / "profiles" / f"{name}.json"
    stated = json.loads((shipped if name in shipped_profiles() else Path(name)).read_text())
    network = json.loads((cost / "network-h100.json").read_text())
    origin = ("name", "device", "source", "kernel_measured", "date", "error")
    return {
        **{key: stated[key] for key in origin if key in stated},
        "backward_measured": profile.backward is not None,
        "linear_measured": profile.linear_tflops is not None,
        "network": {key: network[key] for key in ("name", "device", "source", "error")},
    }


def tunings(job: Job) -> list[Job]:
    """What `front` tries, to make micro-batches alike: one for every window, on a data-parallel rank each."""
    window, count = job.context_length, job.global_batch_size
    ranks = replace(job.parallel, pp=1, vpp=1, group_size=None, dp=count, ep=1, etp=None)
    job = replace(job, parallel=ranks, num_micro_batches=count)
    packings = [
        *(AdaptivePacking(max_delay_steps=delay) for delay in tune.MAX_DELAYS[::2]),
        *(WlbPacking(outlier_thresholds=tune.thresholds_at(shares, window)) for shares in FRONT_THRESHOLDS),
    ]
    return list(tune.variants(job, tune.s_max_candidates(job), packings))


def front(setup: Setup, advance: Advance) -> list[dict[str, Any]]:
    """What `megatron-wlb tune` finds of some tunings that no other one beats, on documents in the order of training."""
    job = setup.job
    tokens = job.batch_tokens * min(FRONT_STEPS, max(tune.LEAST_STEPS, FRONT_MICRO_BATCHES // job.num_micro_batches))
    lengths = setup.data.stream(setup.seed, job.context_length).take(tokens)["length"].astype(np.int64)
    results = tune.sweep(lengths, tunings(job), advance)
    best = {tuning for tuning, _ in tune.front(results)}
    return [tune.point(tuning, summary, best=tuning in best) for tuning, summary in results]
