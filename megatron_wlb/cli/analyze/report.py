"""The numbers: steps of plain Megatron, of the paper's scheme and of ours, packed, sharded and simulated."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli import tune
from megatron_wlb.cli.analyze.setup import Setup
from megatron_wlb.cli.job import DEFAULT_PROFILE, cp_imbalance, layout_of, pasted, shards_of
from megatron_wlb.config import PACKING_MODES, SHORTEST_DELAY_BOUND
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import PackedStep, make_packer
from megatron_wlb.plan.step import Layout, is_order_free
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.plan.workload import document_work, shipped_profiles
from megatron_wlb.simulate import Job, SimulatedStep, balanced_time, breakdown, simulate_step
from megatron_wlb.simulate.costs import Passes

FORMAT = "megatron-wlb-analysis"
VERSION = 1
WARM_UP = 30
"""Steps that are packed and not counted: queues fill."""
MAX_STEPS, LEAST_SIMULATED, LEAST_PACKED = 200, 4, 40
PASSES, MICRO_BATCHES = 60_000, 20_000
"""About how much is simulated and packed of each scheme, where that is between the bounds above."""
FRONT_STEPS, FRONT_MICRO_BATCHES = 150, 6_000
FRONT_THRESHOLDS = ((0.5,), (0.75,), (0.25, 0.5), (0.5, 0.75), (0.375, 0.625, 0.875))

Advance = Callable[[int], None]


class Scheme(NamedTuple):
    """A way to train the same data."""

    name: str
    title: str
    packing: str
    cp_sharding: str
    head_groups: int
    upstream: bool
    """As Megatron and the paper do it: micro-batches keep their places, and all K and V are exchanged."""
    ring: bool = False
    """K and V go from rank to rank, in place of head groups."""


class Sample(NamedTuple):
    """A step that was simulated."""

    step: SimulatedStep
    limit_us: float
    documents: list[np.ndarray]
    """Lengths of the documents of its micro-batches."""
    work: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a scheme comes to; see `measure`."""

    scheme: Scheme
    numbers: dict[str, Any]
    """As JSON types."""
    example: Sample
    """A typical step, for the pictures: the median of time over limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is shown."""

    setup: Setup
    results: tuple[Result, ...]
    """plain, paper, ours."""
    entries: dict[str, Any]
    """As JSON types."""


def schemes(setup: Setup) -> tuple[Scheme, ...]:
    """Plain Megatron exchanges K and V in a ring (`--cp-comm-type p2p`, its default); the paper's scheme, at once."""
    config, groups = setup.config, setup.job.cp_head_groups
    return (
        Scheme("plain", "Megatron", "original", "per-sequence", 1, upstream=True, ring=True),
        Scheme("paper", "paper", "wlb", "paper", 1, upstream=True),
        Scheme("ours", "--wlb", config.packing, config.cp_sharding, groups, upstream=False),
    )


def steps_of(setup: Setup) -> tuple[int, int]:
    """How many steps of each scheme are packed, and how many of those are simulated."""
    job, count = setup.job, setup.num_micro_batches
    simulated = min(MAX_STEPS, max(LEAST_SIMULATED, PASSES // (count * (job.pp * job.vpp + 2 * job.cp))))
    packed = min(MAX_STEPS, max(LEAST_PACKED, MICRO_BATCHES // count))
    return packed // simulated * simulated or simulated, simulated


def analyse(setup: Setup, packed: int, simulated: int, advance: Advance) -> Report:
    """Simulate all schemes and sweep the front. `advance` is told of every step and every tuning."""
    results = tuple(measure(setup, scheme, packed, simulated, advance) for scheme in schemes(setup))
    limit = _compare([result.numbers for result in results])
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "prediction": True,
        "job": setup.described,
        "data": data_of(setup),
        "steps": {"warm_up": WARM_UP, "packed": packed, "simulated": simulated},
        "profile": provenance(setup),
        "schemes": {result.scheme.name: result.numbers for result in results},
        "limit": limit,
        "front": front(setup, advance),
        "flags": flags_to_paste(setup),
        "notes": setup.notes,
        "ignored": setup.ignored,
        "refused": setup.refused,
    }
    return Report(setup=setup, results=results, entries=entries)


def _compare(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Add to the numbers of schemes what they bring over the first one. Returns what the last one could bring."""
    plain, ours = results[0], results[-1]
    us_per_token = ours["limit_us_per_token"]
    limit = {"us_per_token": us_per_token, "speedup": plain["us_per_token"] / us_per_token}
    attainable = limit["speedup"] - 1
    for numbers in results:
        speedup = plain["us_per_token"] / numbers["us_per_token"]
        error = math.hypot(numbers["us_per_token_error"], plain["us_per_token_error"])
        numbers["speedup"] = speedup
        numbers["speedup_error"] = 0.0 if numbers is plain else speedup * error
        # Nothing to be had, nothing to have a share of.
        numbers["of_attainable"] = (speedup - 1) / attainable if attainable > 0.005 else None
    return limit


def measure(setup: Setup, scheme: Scheme, packed: int, simulated: int, advance: Advance) -> Result:
    """Pack `packed` steps of a scheme, simulate `simulated` of them, evenly spread, and take means.

    Few steps have more or fewer long documents than all data has. So time per token is time per work of what was
    simulated, times the work per token of everything that was packed.
    """
    job, layout = placed(setup, scheme)
    sizes = {"crossover_tokens": setup.crossover_tokens, "context_length": setup.context_length}
    measured: list[metrics.StepMetrics] = []
    samples: list[Sample] = []
    total_work = waiting = 0
    for i, step in enumerate(packed_steps(setup, scheme, packed)):
        packing = step.packing
        measured.append(metrics.measure(packing, step.step, **sizes))
        work = int(document_work(packing.documents["length"], setup.crossover_tokens).sum())
        total_work, waiting = total_work + work, step.num_waiting
        if i % (packed // simulated) == 0:
            lengths = [packing.micro_batch(k)["length"] for k in range(len(packing))]
            result = simulate_step(job, shards_of(job, layout, lengths))
            samples.append(Sample(result, balanced_time(result), lengths, work))
        advance(1)
    summary = metrics.summarise(measured, num_waiting=waiting)
    example = _typical(samples)
    numbers = {
        "packing": scheme.packing,
        "cp_sharding": scheme.cp_sharding if setup.job.cp > 1 else None,
        **_times(samples, total_work / sum(step.tokens for step in measured)),
        **_of_packing(setup, scheme, summary),
    }
    numbers["imbalance"] |= {"work_mean": summary.imbalance_mean, "work_p95": summary.imbalance_p95}
    typical = {name: us / 1e3 for name, us in asdict(breakdown(example.step)).items()}
    numbers["typical_step_ms"] = {"step": example.step.time / 1e3, **typical}
    numbers["over_head_groups"] = {} if scheme.upstream else over_head_groups(setup, scheme, samples)
    return Result(scheme=scheme, numbers=numbers, example=example)


def placed(setup: Setup, scheme: Scheme) -> tuple[Job, Layout]:
    """How a scheme runs the job."""
    job = replace(setup.job, gather_all=scheme.upstream, cp_head_groups=scheme.head_groups, cp_ring=scheme.ring)
    return job, layout_of(
        job,
        crossover_tokens=setup.crossover_tokens,
        cp_sharding=scheme.cp_sharding,
        balance=not scheme.upstream and scheme.packing != "original",
        unit_tokens=setup.unit_tokens,
        free_order=not scheme.upstream and is_order_free(scheme.packing, scheme.cp_sharding),
        use_native=setup.use_native,
    )


def over_head_groups(setup: Setup, scheme: Scheme, samples: Sequence[Sample]) -> dict[str, float]:
    """How many times as fast every tenth step is with other powers of 2 of head groups that divide key heads."""
    job, found = setup.job, {}
    key_heads = job.model.num_query_groups // job.tp if job.cp > 1 else 0
    some = samples[:: max(2, len(samples) // 10)]
    for groups in (1 << n for n in range(key_heads.bit_length())):
        if key_heads % groups == 0 and groups != scheme.head_groups:
            other, layout = placed(setup, scheme._replace(head_groups=groups))
            time = sum(simulate_step(other, shards_of(other, layout, sample.documents)).time for sample in some)
            found[str(groups)] = sum(sample.step.time for sample in some) / time
    return found


def _typical(samples: Sequence[Sample]) -> Sample:
    over_limit = np.array([sample.step.time / sample.limit_us for sample in samples])
    return samples[int(np.abs(over_limit - np.median(over_limit)).argmin())]


def packed_steps(setup: Setup, scheme: Scheme, count: int) -> Iterator[PackedStep]:
    """`count` steps as a run would train them, after those that warm up."""
    packer = make_packer(
        DocumentStream(setup.sources, seed=setup.seed, context_length=setup.context_length),
        num_micro_batches=setup.num_micro_batches,
        crossover_tokens=setup.crossover_tokens,
        policy=scheme.packing,
        max_tokens=setup.max_tokens,
        fingerprint="",
        use_native=setup.use_native,
        **setup.config.policy_settings(setup.context_length),
    )
    for _ in range(WARM_UP):
        packer.next()
    for _ in range(count):
        yield packer.next()


def micro_batch_times(step: SimulatedStep) -> np.ndarray:
    """Forward and backward of one layer of every micro-batch if its CP ranks were alike, in us: float64 [dp, M]."""
    return np.array([layer_times(passes) for passes in step.passes])


def layer_times(passes: Passes) -> np.ndarray:
    """The same of the micro-batches of one data-parallel rank, float64 [M]."""
    return sum(layer.total - layer.attention.max(axis=1) + layer.attention.mean(axis=1) for layer in passes.layers)


def imbalances(step: SimulatedStep) -> tuple[float, float, float]:
    """Slowest over mean: micro-batches of a pipeline (mean over pipelines), data-parallel ranks, and CP ranks."""
    times = micro_batch_times(step)
    pp = float((times.max(axis=1) / times.mean(axis=1)).mean())
    dp = float(times.sum(axis=1).max() / times.sum(axis=1).mean())
    return pp, dp, cp_imbalance(step)


def _times(samples: Sequence[Sample], work_per_token: float) -> dict[str, Any]:
    """Of a step and of a token, and the imbalance of what takes them."""
    time, limit, work = np.array([(sample.step.time, sample.limit_us, sample.work) for sample in samples]).T
    per_work = time.sum() / work.sum()
    # Of a ratio of means over steps.
    error = float(np.std(time - per_work * work) / np.sqrt(len(samples)) / time.mean())
    levels = zip(*(imbalances(sample.step) for sample in samples), strict=True)
    return {
        "imbalance": {name: float(np.mean(each)) for name, each in zip(("pp", "dp", "cp"), levels, strict=True)},
        "step_ms": float(time.mean()) / 1e3,
        "us_per_token": float(per_work * work_per_token),
        "us_per_token_error": error,
        "limit_us_per_token": float(limit.sum() / work.sum() * work_per_token),
    }


def _of_packing(setup: Setup, scheme: Scheme, summary: metrics.Summary) -> dict[str, Any]:
    longest = setup.context_length if scheme.packing in ("original", "fixed") else setup.max_tokens
    peaks = setup.memory.peak_bytes_of_stages(longest, setup.num_micro_batches // setup.job.dp)
    return {
        "late_steps": summary.late_steps,
        "max_delay_steps": summary.max_delay_steps,
        "token_cv": summary.token_cv,
        "longest_micro_batch_tokens": longest,
        "activation_gib": max(peaks) / 2**30,
    }


def data_of(setup: Setup) -> dict[str, Any]:
    """Documents and tokens of the training split, and their shares by length (powers of 2)."""
    pairs = np.concatenate([source.pairs for source in setup.sources])
    edges = 2 ** np.arange(0, math.ceil(math.log2(max(2, int(pairs.max())))) + 1)
    # Every share of a document counts where its length is; one over the window is attended to window by window.
    window, crossover = setup.context_length, setup.crossover_tokens
    full, rest = np.divmod(pairs, window)
    work = pairs.astype(np.float64) * crossover + full * float(window) ** 2 + rest.astype(np.float64) ** 2
    place = np.searchsorted(edges, pairs, side="left")
    shares = {
        name: (np.bincount(place, weights=values, minlength=len(edges)) / values.sum()).tolist()
        for name, values in (("documents", (pairs > 0).astype(np.float64)), ("tokens", pairs), ("work", work))
    }
    quantiles = np.quantile(pairs, (0.5, 0.9, 0.99, 1.0)).astype(int).tolist()
    return {
        "documents": len(pairs),
        "tokens": int(pairs.sum()),
        "length_quantiles": dict(zip(("p50", "p90", "p99", "max"), quantiles, strict=True)),
        "over_window": int((pairs > window).sum()),
        "up_to": edges.tolist(),
        "shares": shares,
    }


def provenance(setup: Setup) -> dict[str, Any]:
    """The profile, what it says of its own errors, and the network."""
    name = setup.config.profile or DEFAULT_PROFILE
    shipped = resources.files("megatron_wlb.plan") / "profiles" / f"{name}.json"
    profile = json.loads((shipped if name in shipped_profiles() else Path(name)).read_text())
    network = json.loads((resources.files("megatron_wlb.simulate") / "network-h100.json").read_text())
    kept = ("name", "device", "source", "kernel_measured", "date", "error")
    return {
        **{key: profile[key] for key in kept if key in profile},
        "backward_measured": setup.job.hardware.attention.backward is not None,
        "linear_measured": setup.job.hardware.attention.linear_tflops is not None,
        "network": {key: network[key] for key in ("name", "device", "source", "error")},
    }


def errors_of(profile: dict[str, Any]) -> list[str]:
    """What a profile says of its errors on what it was not fitted to, one sentence each."""

    def walk(what: str, entry: Any) -> Iterator[str]:
        if not isinstance(entry, dict):
            return
        for kind in ("held_out", "error"):
            if f"{kind}_median" in entry:
                yield f"{what}: median {entry[f'{kind}_median']:.1%}, p90 {entry[f'{kind}_p90']:.1%}"
        for key, value in entry.items():
            yield from walk(f"{what}, {key}" if what else key, value)

    return list(walk("", profile.get("error", {})))


def front(setup: Setup, advance: Advance) -> list[dict[str, Any]]:
    """What `megatron-wlb tune` finds of some tunings that no other one beats, on documents in the order of training."""
    window, count = setup.context_length, setup.num_micro_batches
    steps = min(FRONT_STEPS, max(tune.LEAST_STEPS, FRONT_MICRO_BATCHES // count))
    stream = DocumentStream(setup.sources, seed=setup.seed, context_length=window)
    lengths = stream.take(steps * count * window)["length"].astype(np.int64)
    sizes = {"num_micro_batches": count, "context_length": window, "crossover_tokens": setup.crossover_tokens}
    sizes["use_native"] = setup.use_native
    found = tune.sweep(lengths, tunings(setup), advance, **sizes)
    best = {id(tuning) for tuning, _ in tune.front(found)}
    return [tune.point(tuning, summary, best=id(tuning) in best) for tuning, summary in found]


def tunings(setup: Setup) -> Sequence[tune.Tuning]:
    """Those that `front` tries."""
    window = setup.context_length
    chosen: list[tuple[str, dict[str, Any]]] = [
        ("adaptive", {"mode": mode, "max_delay_steps": delay})
        for mode in PACKING_MODES
        for delay in (SHORTEST_DELAY_BOUND, 30)
    ]
    chosen += [("wlb", {"outlier_thresholds": tune.thresholds_at(shares, window)}) for shares in FRONT_THRESHOLDS]
    return [
        tune.Tuning(policy=policy, max_tokens=max_tokens, settings=settings)
        for max_tokens in tune.s_max_candidates(window, setup.unit_tokens)
        for policy, settings in chosen
    ]


def flags_to_paste(setup: Setup) -> str:
    """What a launch line needs for the run that was simulated, beside what it has."""
    config, defaults = setup.config, type(setup.config)()
    flags = ["--wlb --calculate-per-token-loss --attention-dropout 0 --micro-batch-size 1"]
    flags.append(f"--global-batch-size {setup.num_micro_batches} --wlb-packing {config.packing}")
    for name in config.__dataclass_fields__:
        value = getattr(config, name)
        if name not in ("packing", "max_tokens") and value != getattr(defaults, name):
            flags.append(pasted(name, value))
    flags.append(f"--wlb-max-tokens {setup.max_tokens}")
    if setup.empty_validation:
        flags.append("--eval-iters 0")
    return " ".join(flags)
