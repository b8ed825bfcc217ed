"""The numbers: packed, sharded and simulated steps of every scheme."""

import datetime
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cli.analyze import layouts
from megatron_wlb.cli.analyze.setup import MEGATRON, WARM_UP, Megatron, Setup, schemes
from megatron_wlb.hardware.network import NETWORKS
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, Profile, load_profile, profile_file
from megatron_wlb.job import Job
from megatron_wlb.micro_batches import ALIKE
from megatron_wlb.plan import metrics
from megatron_wlb.simulate.memory import peak_bytes
from megatron_wlb.simulate.step import SimulatedStep, breakdown, imbalances, limit_time
from megatron_wlb.types import document_work

FORMAT = "megatron-wlb-analysis"
VERSION = 9
MAX_STEPS, LEAST_SIMULATED, LEAST_PACKED = 200, 4, 40
PASSES, MICRO_BATCHES = 60_000, 20_000
"""Approximate passes to simulate and micro-batches to pack per scheme, within the bounds above."""
OTHER_SIMULATED, OTHER_PACKED = 24, 96
"""Steps to simulate and to pack, of every other layout and other flag."""
LOST_STEPS = 20
"""Steps that determine what Megatron would lose without a flag."""

READING_STEPS = 8
"""Steps that tell a speed-up under other assumptions."""
KERNELS = ("h100-fa2", "h100-cudnn", "h100-fa3")
"""Profiles of the same device with other kernels."""

Advance = Callable[[int], None]


class Sample(NamedTuple):
    """A simulated step."""

    step: SimulatedStep
    limit_us: float
    documents: list[np.ndarray]
    """Document lengths of its micro-batches."""
    work: int


class Report(NamedTuple):
    """Everything that is shown."""

    setup: Setup
    entries: dict[str, Any]
    """The numbers, as JSON types."""
    examples: dict[str, Sample]
    """A typical step of every scheme: the one whose time per token is nearest to the mean."""


def steps_of(job: Job) -> tuple[int, int]:
    """Return how many steps of each scheme are packed, and how many simulated."""
    parallel, count = job.parallel, job.num_micro_batches
    passes = count * (parallel.pp * parallel.vpp + 2 * parallel.cp)
    simulated = min(MAX_STEPS, max(LEAST_SIMULATED, PASSES // passes))
    packed = min(MAX_STEPS, max(LEAST_PACKED, MICRO_BATCHES // count))
    return packed // simulated * simulated or simulated, simulated


def analyse(setup: Setup, packed: int, simulated: int, advance: Advance) -> Report:
    """Simulate all schemes; calls `advance` for every step."""
    numbers, examples, jobs = {}, {}, schemes(setup)
    for name, job in jobs.items():
        megatron = setup.megatron._replace(name=name) if name in MEGATRON else Megatron()
        numbers[name], examples[name] = measure(setup, job, packed, simulated, advance, megatron)
    reference = setup.megatron.name
    limit = _compare(numbers, numbers[reference])
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "prediction": True,
        "job": setup.job.to_json(),
        "model": setup.run.model,
        "data": data_entries(setup),
        "launch": setup.run.launched.source,
        "date": datetime.date.today().isoformat(),
        "release": __version__,
        "left_out": setup.run.judged.left_out,
        "reference": reference,
        "lost": lost(setup, jobs[reference], min(packed, LOST_STEPS)),
        "steps": {"warm_up": WARM_UP, "packed": packed, "simulated": simulated},
        "profile": profile_entries(setup),
        "limit": limit,
        "readings": readings(setup, jobs, numbers, min(simulated, READING_STEPS)),
        "micro_batches": [
            {"micro_batches": each.job.num_micro_batches, "time": each.time, "late_steps": each.late_steps}
            for each in setup.tried
        ],
        "schemes": numbers,
        "layouts": other_layouts(setup, numbers["ours"], numbers[reference]),
        "other_flags": other_flags(setup, numbers["ours"], numbers[reference]),
        "flags": setup.flags(),
        "warnings": setup.run.judged.remarks + setup.data.remarks,
        "notes": setup.notes,
        "ignored": setup.run.judged.ignored,
        "refused": setup.run.judged.refused,
    }
    return Report(setup, entries, examples)


def other_layouts(setup: Setup, best: dict[str, Any], reference: dict[str, Any]) -> list[dict[str, Any]]:
    """Return layouts that are faster than `best` by `_is_faster`, the fastest first."""
    measured = [(job, _measure_other(setup, job)) for job in setup.layouts]
    found = [
        {name: getattr(job.parallel, name) for name in ("tp", "cp", "pp", "vpp", "dp")}
        | {name: numbers[name] for name in ("us_per_token", "num_micro_batches", "late_steps")}
        | _speedup(numbers, reference)
        | {"gib": layouts.gib(job), "max_tokens": job.max_tokens}
        for job, numbers in measured
        if _is_faster(numbers, best)
    ]
    return sorted(found, key=lambda each: each["us_per_token"])


def other_flags(setup: Setup, best: dict[str, Any], reference: dict[str, Any]) -> list[dict[str, Any]]:
    """Return flags of `Setup.others` that are faster than `best` by `_is_faster`."""
    measured = [(flag, _measure_other(setup, job)) for flag, job in setup.others.items()]
    return [{"flag": flag} | _speedup(numbers, reference) for flag, numbers in measured if _is_faster(numbers, best)]


def _measure_other(setup: Setup, job: Job) -> dict[str, Any]:
    simulated = min(steps_of(job)[1], OTHER_SIMULATED)
    return measure(setup, job, OTHER_PACKED // simulated * simulated, simulated, lambda _: None, Megatron())[0]


def _speedup(numbers: dict[str, Any], over: dict[str, Any]) -> dict[str, float]:
    speedup = over["us_per_token"] / numbers["us_per_token"]
    error = math.hypot(numbers["us_per_token_error"], over["us_per_token_error"])
    return {"speedup": speedup, "speedup_error": 0.0 if numbers is over else speedup * error}


def lost(setup: Setup, job: Job, steps: int) -> dict[str, float]:
    """Return Megatron's loss of speed without each flag that --wlb refuses."""
    without = setup.megatron.refused
    ways = {"": setup.megatron, **without} if without else {}
    times = dict.fromkeys(ways, 0.0)
    for step in setup.steps(job, steps if ways else 0):
        for flag, megatron in ways.items():
            times[flag] += megatron.simulate(job, step.batch.lengths).time
    return {flag: 1 - times[""] / times[flag] for flag in without}


def readings(
    setup: Setup, jobs: dict[str, Job], numbers: dict[str, dict[str, Any]], steps: int
) -> list[dict[str, Any]]:
    """Return --wlb's speed-up over Megatron's schemes under other assumptions, by what the same few steps say."""
    profile = setup.job.profile
    slower = replace(profile.network, link_gb_per_s=profile.network.link_gb_per_s / 2)
    changed = {"": profile, "half the bandwidth between nodes": replace(profile, network=slower)}
    if profile.name in KERNELS:
        changed |= {f"kernels of {name}": load_profile(name) for name in KERNELS if name != profile.name}

    def speedups(other: Profile, ring: str) -> dict[str, float]:
        times = {}
        for name in (*MEGATRON, "ours"):
            megatron = setup.megatron._replace(name=name) if name in MEGATRON else Megatron()
            job = replace(jobs[name], profile=other)
            job = replace(job, cp_exchange=ring) if name == "thd" else job
            times[name] = measure(setup, job, steps, steps, lambda _: None, megatron)[0]["us_per_token"]
        return {name: times[name] / times["ours"] for name in MEGATRON}

    found = {what: speedups(other, "ring") for what, other in changed.items()}
    if setup.job.parallel.cp > 1:
        found["a ring with the tiles of every step"] = speedups(profile, "thd_ring")
    same = found.pop("")
    of_all = {name: numbers[name]["us_per_token"] / numbers["ours"]["us_per_token"] for name in MEGATRON}
    return [
        {"what": what} | {name: of_all[name] * each[name] / same[name] for name in MEGATRON}
        for what, each in found.items()
    ]


def _is_faster(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `one` is faster than `other` by over 1 % and by two standard errors."""
    ratio = other["us_per_token"] / one["us_per_token"]
    error = math.hypot(one["us_per_token_error"], other["us_per_token_error"])
    return bool(ratio - 1 > max(ALIKE, 2 * ratio * error))


def _compare(schemes: dict[str, dict[str, Any]], plain: dict[str, Any]) -> dict[str, float]:
    """Add to each scheme's numbers its gain over `plain`, and its share of its own limit. Returns the least limit."""
    us_per_token = min(numbers["limit_us_per_token"] for numbers in schemes.values())
    most = max(numbers["pairs_per_token"] for numbers in schemes.values())
    for numbers in schemes.values():
        numbers |= _speedup(numbers, plain)
        numbers["of_limit"] = numbers["limit_us_per_token"] / numbers["us_per_token"]
        numbers["attention_kept"] = numbers["pairs_per_token"] / most
    return {"us_per_token": us_per_token, "speedup": plain["us_per_token"] / us_per_token}


def measure(
    setup: Setup, job: Job, packed: int, simulated: int, advance: Advance, megatron: Megatron
) -> tuple[dict[str, Any], Sample]:
    """Pack `packed` steps of a scheme and simulate `simulated` of them, evenly spread.

    Returns means as JSON types, and an example. A few steps have more or fewer long documents than all data, so time
    per token is the simulated steps' time per work, times the work per token of all packed steps.
    """
    steps: list[tuple[float, int, int, int]] = []
    samples: list[Sample] = []
    total_work, pairs = 0, 0.0
    for i, step in enumerate(setup.steps(job, packed)):
        works = step.batch.sums(document_work(step.batch.documents["length"], job.crossover_tokens))
        delays, work = metrics.delays(step.batch, step.step), int(works.sum())
        late = sum(max(0, delay) * tokens for delay, tokens in delays.items())
        steps.append((metrics.imbalance(works), sum(delays.values()), late, max(delays, default=0)))
        if megatron.name == "plain":
            work = sum(delays.values())
        total_work += work
        pairs += float((step.batch.documents["length"].astype(float) ** 2).sum())
        if i % (packed // simulated) == 0:
            result = megatron.simulate(job, step.batch.lengths)
            samples.append(Sample(result, limit_time(result), step.batch.lengths, work))
        advance(1)
    imbalance, step_tokens, late_tokens, most_late = map(np.array, zip(*steps, strict=True))
    work_per_token = total_work / int(step_tokens.sum())
    middle = slice(packed // 10, packed - packed // 10)  # queues fill and drain at either end
    time, limit, work_of = np.array([(sample.step.time, sample.limit_us, sample.work) for sample in samples]).T
    us_per_work = time.sum() / work_of.sum()
    us_per_token = float(us_per_work * work_per_token)
    longest = megatron.micro_batch_size * job.context_length if job.packing.fixed_length else job.max_tokens
    tokens = np.array([sum(int(lengths.sum()) for lengths in sample.documents) for sample in samples])
    example = samples[int(np.abs(time / tokens - us_per_token).argmin())]
    levels = [imbalances(sample.step) for sample in samples]
    numbers = {
        "packing": job.packing.name,
        "outlier_thresholds": getattr(job.packing, "outlier_thresholds", None),
        "num_micro_batches": job.num_micro_batches // megatron.micro_batch_size,
        "cp_sharding": job.sharding.cp_sharding if job.parallel.cp > 1 else None,
        "step_ms": float(time.mean()) / 1e3,
        "us_per_token": us_per_token,
        # Of a ratio of means over steps.
        "us_per_token_error": float(np.std(time - us_per_work * work_of) / np.sqrt(len(samples)) / time.mean()),
        "limit_us_per_token": float(limit.sum() / work_of.sum() * work_per_token),
        "pairs_per_token": pairs / int(step_tokens.sum()),
        "late_steps": float(late_tokens[middle].sum() / step_tokens[middle].sum()),
        "max_delay_steps": int(most_late.max()),
        "token_cv": float(step_tokens[middle].std() / step_tokens[middle].mean()),
        "longest_micro_batch_tokens": longest,
        "activation_gib": max(peak_bytes(job, stage, longest) for stage in range(job.parallel.pp)) / 2**30,
        "imbalance": {
            **{level: float(np.mean([each[level] for each in levels])) for level in levels[0]},
            "work_mean": float(imbalance[middle].mean()),
            "work_p95": float(np.quantile(imbalance[middle], 0.95)),
        },
        "typical_step_ms": {
            "step": example.step.time / 1e3,
            **{part: us / 1e3 for part, us in asdict(breakdown(example.step)).items()},
        },
    }
    return numbers, example


def data_entries(setup: Setup) -> dict[str, Any]:
    """Return documents and tokens of the training split, and shares by length."""
    every = np.concatenate([source.lengths for source in setup.data.sources])
    lengths, counts = np.unique(every, return_counts=True)
    edges = 2 ** np.arange(0, math.ceil(math.log2(max(2, int(lengths[-1])))) + 1)
    # A document counts in the bin of its length. One longer than the window is attended to window by window.
    window, crossover_tokens = setup.job.context_length, setup.job.crossover_tokens
    full, rest = np.divmod(lengths, window)
    work = lengths.astype(np.float64) * crossover_tokens + full * float(window) ** 2 + rest.astype(np.float64) ** 2
    place = np.searchsorted(edges, lengths, side="left")
    shares = {
        name: (np.bincount(place, weights=counts * values, minlength=len(edges)) / (counts * values).sum()).tolist()
        for name, values in (("documents", lengths > 0), ("tokens", lengths), ("work", work))
    }
    quantiles = np.quantile(every, (0.5, 0.9, 0.99, 1.0)).astype(int).tolist()
    return {
        "prefixes": setup.data.prefixes,
        "seed": setup.run.arguments.seed,
        "documents": len(every),
        "tokens": int(every.sum()),
        "length_quantiles": dict(zip(("p50", "p90", "p99", "max"), quantiles, strict=True)),
        "up_to": edges.tolist(),
        "shares": shares,
    }


def profile_entries(setup: Setup) -> dict[str, Any]:
    """Return origin and stated errors of the profile and of its network."""
    profile = setup.job.profile
    stated = json.loads(profile_file(setup.run.settings.profile or DEFAULT_PROFILE).read_text())
    shipped = {file.name: file for file in NETWORKS.iterdir()}
    network = shipped.get(f"{profile.network.name}.json")
    of_network = json.loads(network.read_text()) if network else {"name": profile.network.name}
    origin = ("name", "device", "source", "kernel_measured", "date", "error")
    return {
        **{key: stated[key] for key in origin if key in stated},
        "backward_measured": profile.backward is not None,
        "linear_measured": profile.linear_tflops is not None,
        "network": {key: of_network[key] for key in origin if key in of_network},
    }
