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
from megatron_wlb.cli.job import DEFAULT_PROFILE, Planning, cp_imbalance
from megatron_wlb.config import PACKING_MODES
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import PackedStep, make_packer
from megatron_wlb.plan.packing.adaptive import SHORTEST_DELAY_BOUND
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.plan.workload import document_work, shipped_profiles
from megatron_wlb.simulate import SimulatedStep, balanced_time, breakdown, simulate_step

FORMAT = "megatron-wlb-analysis"
VERSION = 1
WARM_UP = 30
"""Steps that are packed and not counted: queues fill."""
MAX_STEPS, LEAST_SIMULATED, LEAST_PACKED = 200, 4, 40
PASSES, MICRO_BATCHES = 60_000, 20_000
"""About how much is simulated and packed of each scheme, where that is between the bounds above."""
FRONT_STEPS, FRONT_MICRO_BATCHES = 150, 6_000
FRONT_WINDOWS = (1.1, 1.25, 1.5, 2.0)
FRONT_THRESHOLDS = ((0.5,), (0.75,), (0.25, 0.5), (0.5, 0.75), (0.375, 0.625, 0.875))

Advance = Callable[[int], None]


class Scheme(NamedTuple):
    """A way to train the same data."""

    name: str
    title: str
    packing: str
    cp_sharding: str
    head_groups: int
    """Parts in which K and V travel while another computes."""
    upstream: bool
    """As Megatron and the paper do it: micro-batches keep their places, and all K and V are exchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a scheme comes to; see `measure`."""

    scheme: Scheme
    numbers: dict[str, Any]
    """As JSON types."""
    example: SimulatedStep
    """A typical step, for the pictures: the median of time over limit."""
    example_documents: list[np.ndarray]
    """Lengths of the documents of its micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is shown."""

    setup: Setup
    results: tuple[Result, ...]
    """plain, paper, ours."""
    entries: dict[str, Any]
    """As JSON types."""


def schemes(setup: Setup) -> tuple[Scheme, ...]:
    """Plain Megatron exchanges K and V in a ring (`--cp-comm-type p2p`, its default): CP parts."""
    config, groups = setup.config, setup.job.cp_head_groups
    return (
        Scheme("plain", "Megatron", "original", "per-sequence", setup.job.cp, upstream=True),
        Scheme("paper", "paper", "wlb", "paper", groups, upstream=True),
        Scheme("ours", "--wlb", config.packing, config.cp_sharding, groups, upstream=False),
    )


def steps_of(setup: Setup) -> tuple[int, int]:
    """How many steps of each scheme are packed, and how many of those are simulated."""
    job, count = setup.job, setup.num_micro_batches
    simulated = PASSES // (count * (job.pp * job.vpp + 2 * job.cp))
    simulated = min(MAX_STEPS, max(LEAST_SIMULATED, simulated))
    packed = min(MAX_STEPS, max(LEAST_PACKED, MICRO_BATCHES // count))
    return packed // simulated * simulated or simulated, simulated


def analyse(setup: Setup, packed: int, simulated: int, advance: Advance) -> Report:
    """Simulate all schemes and sweep the front. `advance` is told of every step and every tuning."""
    measured = [measure(setup, scheme, packed, simulated, advance) for scheme in schemes(setup)]
    plain = measured[0].numbers["us_per_token"]
    ours = measured[-1].numbers
    limit = {"us_per_token": ours["limit_us_per_token"], "speedup": plain / ours["limit_us_per_token"]}
    for result in measured:
        numbers = result.numbers
        numbers["speedup"] = plain / numbers["us_per_token"]
        errors = math.hypot(numbers["us_per_token_error"], measured[0].numbers["us_per_token_error"])
        numbers["speedup_error"] = 0.0 if result is measured[0] else numbers["speedup"] * errors
        # Nothing to be had, nothing to have a share of.
        attainable = limit["speedup"] - 1
        numbers["of_attainable"] = (numbers["speedup"] - 1) / attainable if attainable > 0.005 else None
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "prediction": True,
        "job": setup.described,
        "data": data_of(setup),
        "steps": {"warm_up": WARM_UP, "packed": packed, "simulated": simulated},
        "profile": provenance(setup),
        "schemes": {result.scheme.name: result.numbers for result in measured},
        "limit": limit,
        "front": front(setup, advance),
        "flags": flags_to_paste(setup),
        "notes": setup.notes,
        "ignored": setup.ignored,
    }
    return Report(setup=setup, results=tuple(measured), entries=entries)


def measure(setup: Setup, scheme: Scheme, packed: int, simulated: int, advance: Advance) -> Result:
    """Pack `packed` steps of a scheme, simulate `simulated` of them, evenly spread, and take means.

    Few steps have more or fewer long documents than all data has. So time per token is time per work of what was
    simulated, times the work per token of everything that was packed.
    """
    job = replace(setup.job, gather_all=scheme.upstream, cp_head_groups=scheme.head_groups)
    planning = Planning(
        job=job,
        crossover_tokens=setup.crossover_tokens,
        cp_sharding=scheme.cp_sharding,
        balance=not scheme.upstream and scheme.packing != "original",
        in_given_order=scheme.upstream,
        use_native=setup.use_native,
    )
    measured: list[metrics.StepMetrics] = []
    rows: list[list[float]] = []
    examples: list[SimulatedStep] = []
    documents: list[list[np.ndarray]] = []
    total_work = total_tokens = waiting = 0
    for i, step in enumerate(_packed_steps(setup, scheme, packed)):
        packing = step.packing
        work = packing.sums(document_work(packing.documents["length"], setup.crossover_tokens))
        measured.append(
            metrics.measure(
                packing,
                step.step,
                crossover_tokens=setup.crossover_tokens,
                context_length=setup.context_length,
            )
        )
        total_work, total_tokens = total_work + int(work.sum()), total_tokens + measured[-1].tokens
        waiting = step.num_waiting
        if i % (packed // simulated) == 0:
            lengths = [packing.micro_batch(k)["length"] for k in range(len(packing))]
            result = simulate_step(job, planning.step(lengths))
            rows.append([result.time, balanced_time(result), work.sum(), measured[-1].tokens, *imbalances(result)])
            examples.append(result)
            documents.append(lengths)
        advance(1)
    over_limit = np.array([row[0] / row[1] for row in rows])
    chosen = int(np.abs(over_limit - np.median(over_limit)).argmin())
    typical = {name: us / 1e3 for name, us in asdict(breakdown(examples[chosen])).items()}
    summary = metrics.summarise(measured, num_waiting=waiting)
    return Result(
        scheme=scheme,
        numbers=_numbers(setup, scheme, np.array(rows), total_work / total_tokens, summary)
        | {"typical_step_ms": {"step": examples[chosen].time / 1e3, **typical}},
        example=examples[chosen],
        example_documents=documents[chosen],
    )


def _packed_steps(setup: Setup, scheme: Scheme, count: int) -> Iterator[PackedStep]:
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
    return np.array(
        [
            sum(layer.total - layer.attention.max(axis=1) + layer.attention.mean(axis=1) for layer in p.layers)
            for p in step.passes
        ]
    )


def imbalances(step: SimulatedStep) -> tuple[float, float, float]:
    """Slowest over mean: micro-batches of a pipeline (mean over pipelines), data-parallel ranks, and CP ranks."""
    times = micro_batch_times(step)
    pp = float((times.max(axis=1) / times.mean(axis=1)).mean())
    dp = float(times.sum(axis=1).max() / times.sum(axis=1).mean())
    return pp, dp, cp_imbalance(step)


def _numbers(
    setup: Setup, scheme: Scheme, rows: np.ndarray, work_per_token: float, summary: metrics.Summary
) -> dict[str, Any]:
    time, limit, work = rows[:, 0], rows[:, 1], rows[:, 2]
    per_work = time.sum() / work.sum()
    # Of a ratio of means over steps.
    error = float(np.std(time - per_work * work) / np.sqrt(len(rows)) / time.mean())
    longest = setup.context_length if scheme.packing in ("original", "fixed") else setup.max_tokens
    per_rank = setup.num_micro_batches // setup.job.dp
    peaks = setup.memory.peak_bytes_of_stages(longest, per_rank)
    return {
        "packing": scheme.packing,
        "cp_sharding": scheme.cp_sharding if setup.job.cp > 1 else None,
        "imbalance": {
            "pp": float(rows[:, 4].mean()),
            "dp": float(rows[:, 5].mean()),
            "cp": float(rows[:, 6].mean()),
            "work_mean": summary.imbalance_mean,
            "work_p95": summary.imbalance_p95,
        },
        "step_ms": float(time.mean()) / 1e3,
        "us_per_token": float(per_work * work_per_token),
        "us_per_token_error": error,
        "limit_us_per_token": float(limit.sum() / work.sum() * work_per_token),
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
        name: np.bincount(place, weights=values, minlength=len(edges)) / values.sum()
        for name, values in (("documents", (pairs > 0).astype(np.float64)), ("tokens", pairs), ("work", work))
    }
    quantiles = np.quantile(pairs, (0.5, 0.9, 0.99, 1.0)).astype(int).tolist()
    return {
        "documents": len(pairs),
        "tokens": int(pairs.sum()),
        "length_quantiles": dict(zip(("p50", "p90", "p99", "max"), quantiles, strict=True)),
        "over_window": int((pairs > window).sum()),
        "up_to": edges.tolist(),
        "shares": {name: values.tolist() for name, values in shares.items()},
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
        if "held_out_median" in entry:
            yield f"{what}: median {entry['held_out_median']:.1%}, p90 {entry['held_out_p90']:.1%}"
        elif "error_median" in entry:
            yield f"{what}: median {entry['error_median']:.1%}, p90 {entry['error_p90']:.1%}"
        for key, value in entry.items():
            yield from walk(f"{what}, {key}" if what else key, value)

    return list(walk("", profile.get("error", {})))


def front(setup: Setup, advance: Advance) -> list[dict[str, Any]]:
    """What `megatron-wlb tune` finds of some tunings that no other one beats, on documents in the order of training."""
    window, count = setup.context_length, setup.num_micro_batches
    steps = min(FRONT_STEPS, max(tune.LEAST_STEPS, FRONT_MICRO_BATCHES // count))
    stream = DocumentStream(setup.sources, seed=setup.seed, context_length=window)
    lengths = stream.take(steps * count * window)["length"].astype(np.int64)
    found = []
    for tuning in tunings(setup):
        summary = tune.run_half(
            lengths, tuning, num_micro_batches=count, context_length=window, crossover_tokens=setup.crossover_tokens
        )
        if summary is not None:
            found.append((tuning, summary))
        advance(1)
    best = {id(tuning) for tuning, _ in tune.front(found)}
    return [tune.point(tuning, summary, best=id(tuning) in best) for tuning, summary in found]


def tunings(setup: Setup) -> Sequence[tune.Tuning]:
    window, unit = setup.context_length, setup.unit_tokens
    chosen: list[tuple[str, dict[str, Any]]] = [
        ("adaptive", {"mode": mode, "max_delay_steps": delay})
        for mode in PACKING_MODES
        for delay in (SHORTEST_DELAY_BOUND, 30)
    ]
    for shares in FRONT_THRESHOLDS:
        thresholds = tuple(sorted({max(2, int(share * window)) for share in shares}))
        chosen.append(("wlb", {"outlier_thresholds": thresholds}))
    return [
        tune.Tuning(policy=policy, max_tokens=math.ceil(windows * window / unit) * unit, settings=settings)
        for windows in FRONT_WINDOWS
        for policy, settings in chosen
    ]


def flags_to_paste(setup: Setup) -> str:
    """What a launch line needs for the run that was simulated, beside what it has."""
    config, defaults = setup.config, type(setup.config)()
    flags = ["--wlb --calculate-per-token-loss --attention-dropout 0 --micro-batch-size 1"]
    flags.append(f"--global-batch-size {setup.num_micro_batches} --wlb-packing {config.packing}")
    for name in config.__dataclass_fields__:
        value, flag = getattr(config, name), f"--wlb-{name.replace('_', '-')}"
        if name in ("packing", "max_tokens") or value == getattr(defaults, name):
            continue
        if value is True:
            flags.append(flag)
        else:
            flags.append(f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join([*flags, f"--wlb-max-tokens {setup.max_tokens}"])
