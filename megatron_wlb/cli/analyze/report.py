"""The numbers: packed, sharded and simulated steps of every scheme."""

import contextlib
import datetime
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cli.analyze.setup import MEGATRON, WARM_UP, Megatron, Setup, schemes
from megatron_wlb.describe.alternatives import gib, layout_flags
from megatron_wlb.describe.price import SIMULATED, prices
from megatron_wlb.hardware.network import NETWORKS
from megatron_wlb.hardware.profile import Profile, generations, gpu_of, load_profile, profile_file
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.plan import metrics
from megatron_wlb.plan.micro_batches import ALIKE
from megatron_wlb.settings import flag_with_value
from megatron_wlb.simulate.memory import peak_bytes
from megatron_wlb.simulate.published import errors_like
from megatron_wlb.simulate.step import SimulatedStep, breakdown, imbalances

FORMAT = "megatron-wlb-analysis"
VERSION = 13
MAX_STEPS, LEAST_SIMULATED, LEAST_PACKED = 200, 4, 40
PASSES, MICRO_BATCHES = 60_000, 20_000
"""Approximate passes to simulate and micro-batches to pack per scheme, within the bounds above."""
OTHER_SIMULATED = 24
"""Most steps to simulate of every other layout and other flag."""
MOST_LAYOUTS = 3
"""Layouts that are shown, the fastest."""
CLOSE = 0.02
"""Gain or loss up to which neither way is advised, and a delay is not mentioned."""
READING_STEPS = 8
"""Steps that tell a speed-up under other assumptions."""
KERNELS_OF = "kernels of "
"""How readings by other profiles of the same device begin."""
ATTENTION_TAKES = "attention takes "
"""How readings begin in which attention alone is as far off as predicted steps like the run's are (p90)."""

Advance = Callable[[int], None]


class Sample(NamedTuple):
    """A simulated step."""

    step: SimulatedStep
    documents: list[np.ndarray]
    """Document lengths of its micro-batches."""
    work: int
    """Tokens where these attend across documents."""


class Measured(NamedTuple):
    """A scheme: its numbers as JSON types, and the steps that were simulated."""

    numbers: dict[str, Any]
    delays: bool
    """Whether its steps train other tokens than Megatron's."""
    samples: list[Sample]
    us: np.ndarray
    """Times of the steps, float64 [steps]."""
    tokens: np.ndarray
    work: np.ndarray

    def typical(self) -> int:
        """Return the step whose time per token is nearest to the mean."""
        return int(np.abs(self.us / self.tokens - self.us.sum() / self.tokens.sum()).argmin())


class Report(NamedTuple):
    """Everything that is shown."""

    setup: Setup
    entries: dict[str, Any]
    """The numbers, as JSON types."""
    examples: dict[str, Sample]
    """A typical step, the same of all schemes: of the same tokens without a delay."""


def steps_of(job: Job) -> tuple[int, int]:
    """Return how many steps of each scheme are packed, and how many simulated."""
    parallel, count = job.parallel, job.num_micro_batches
    passes = count * (parallel.pp * parallel.vpp + 2 * parallel.cp)
    simulated = min(MAX_STEPS, max(LEAST_SIMULATED, PASSES // passes))
    packed = min(MAX_STEPS, max(LEAST_PACKED, MICRO_BATCHES // count))
    return packed // simulated * simulated or simulated, simulated


def analyse(setup: Setup, packed: int, simulated: int, advance: Advance) -> Report:
    """Simulate all schemes; calls `advance` for every step."""
    measured: dict[str, Measured] = {}
    jobs = schemes(setup)
    for name, job in jobs.items():
        measured[name] = measure(setup, name, job, packed, simulated, measured.get("thd"), advance)
    numbers = {name: each.numbers for name, each in measured.items()}
    same, examples = measured["thd"].typical(), {}
    for name, each in measured.items():
        examples[name] = each.samples[same]
        ratio, error = _speedup(each, measured["thd"])
        numbers[name].update({"speedup": ratio, "speedup_error": error, "parts_ms": _parts_ms(each.samples)})
    others = Others(setup, measured, packed // simulated)
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
        "scheme_of_run": setup.megatron.name,
        "steps": {"warm_up": WARM_UP, "packed": packed, "simulated": simulated},
        "profile": profile_entries(setup),
        "published": errors_like(setup.job)._asdict(),
        "single_windows": others.single_windows(),
        **others.prices(),
        "readings": readings(setup, jobs, numbers, min(simulated, READING_STEPS)),
        "micro_batches": [
            {"micro_batches": each.job.num_micro_batches, "time": each.time, "late_steps": each.late_steps}
            for each in setup.tried
        ],
        "schemes": numbers,
        "layouts": others.layouts(),
        "recompute": others.recompute(),
        "delay": others.delay(),
        "other_flags": others.flags(),
        "flags": setup.flags(),
        "pins": setup.pins(),
        "warnings": setup.run.judged.remarks + setup.data.remarks,
        "notes": setup.notes,
        "ignored": setup.run.judged.ignored,
        "refused": setup.run.judged.refused,
    }
    return Report(setup, entries, examples)


class Others(NamedTuple):
    """Other ways to train that are faster with --wlb than the run's, on the first of its steps."""

    setup: Setup
    measured: dict[str, Measured]
    stride: int

    def single_windows(self) -> float:
        """Return the speed-up of Megatron, documents apart, by --micro-batch-size 1."""
        if self.setup.megatron.micro_batch_size == 1:
            return 1.0
        single = self._measure("thd", self.setup.without_wlb("thd"), micro_batch_size=1)
        return _speedup(single, self.measured["thd"])[0]

    def prices(self) -> dict[str, Any]:
        """Return what --wlb brings where both sides lack the features that it switches off, and their prices."""
        job, balance = self.setup.job, self.measured["ours"].numbers["speedup"]
        found = prices(job, self.setup.run.arguments, lambda of: float(self._measure("thd", of).us.mean()))
        if any(each.source == SIMULATED for each in found):
            bare = self._measure("thd", without_wlb(job), micro_batch_size=1)
            balance = _speedup(self.measured["ours"], bare)[0]
        return {"balance": balance, "prices": [each._asdict() for each in found]}

    def layouts(self) -> list[dict[str, Any]]:
        """Return the layouts that are faster, the fastest first, with what Megatron would gain in them."""
        tried = [(job, faster) for job in self.setup.layouts if (faster := self._faster(job, ALIKE)) is not None]
        tried.sort(key=lambda each: -each[1]["gain"])
        sizes, of_job = ("tp", "cp", "pp", "vpp", "dp"), ("num_micro_batches", "max_tokens")
        return [
            {name: getattr(job.parallel, name) for name in sizes}
            | {name: getattr(job, name) for name in of_job}
            | {"gib": gib(job), "megatron": self._of_megatron(job), "flags": layout_flags(job)}
            | faster
            for job, faster in tried[:MOST_LAYOUTS]
        ]

    def _of_megatron(self, job: Job) -> float | None:
        """Return the speed-up of Megatron in another layout; None if it cannot train there."""
        with contextlib.suppress(ValueError):  # such as of a micro-batch size that does not divide the windows
            return _speedup(self._measure("thd", self.setup.without_wlb("thd", job)), self.measured["thd"])[0]
        return None

    def recompute(self) -> dict[str, Any] | None:
        """Return the recomputation with which the run is fastest within memory, if that is not its own."""
        job = self.setup.recomputed
        if job.recompute == self.setup.job.recompute or (faster := self._faster(job, ALIKE)) is None:
            return None
        return {"flags": job.recompute.flags, "gib": gib(job)} | faster

    def delay(self) -> dict[str, Any] | None:
        """Return what a delay brings; None if little."""
        job = self.setup.delayed
        if job is None or (faster := self._faster(job, CLOSE)) is None:
            return None
        flag = flag_with_value("packing", job.packing)
        return {"flag": flag, "num_micro_batches": job.num_micro_batches} | faster

    def flags(self) -> list[dict[str, Any]]:
        """Return flags that are faster."""
        tried = {flag: self._faster(job, ALIKE) for flag, job in self.setup.others.items()}
        return [{"flag": flag} | faster for flag, faster in tried.items() if faster is not None]

    def _faster(self, job: Job, least: float) -> dict[str, Any] | None:
        """Return the speed-up of a job and its delay, if it gains over `least` and two standard errors on ours."""
        each = self._measure("", job)
        gain, error = _speedup(each, self.measured["ours"])
        if gain - 1 <= max(least, 2 * error):
            return None
        speedup, of_ours = (self.measured["ours"].numbers[name] for name in ("speedup", "speedup_error"))
        found = {"gain": gain, "speedup": gain * speedup, "late_steps": each.numbers["late_steps"]}
        return found | {"speedup_error": math.hypot(error * speedup, gain * of_ours)}

    def _measure(self, name: str, job: Job, **changes: Any) -> Measured:
        simulated = min(len(self.measured["ours"].us), steps_of(job)[1], OTHER_SIMULATED)
        return measure(self.setup, name, job, self.stride * simulated, simulated, self.measured["thd"], **changes)


def readings(
    setup: Setup, jobs: dict[str, Job], numbers: dict[str, dict[str, Any]], steps: int
) -> list[dict[str, Any]]:
    """Return --wlb's speed-up over Megatron's schemes under other assumptions, by what the same few steps say."""
    profile = setup.job.profile
    slower = replace(profile.network, link_gb_per_s=profile.network.link_gb_per_s / 2)
    changed = {"": profile, "half the bandwidth between nodes": replace(profile, network=slower)}
    names = generations(gpu_of(profile.device or ""))
    if profile.name in names:
        changed |= {f"{KERNELS_OF}{name}": load_profile(name) for name in names if name != profile.name}
    if p90 := errors_like(setup.job).p90:
        for factor in (math.exp(-p90), math.exp(p90)):
            changed[f"{ATTENTION_TAKES}{factor:.2f} times as long"] = profile.with_attention(factor)

    def speedups(other: Profile) -> dict[str, float]:
        of: dict[str, Measured] = {}
        for name, job in jobs.items():
            of[name] = measure(setup, name, replace(job, profile=other), steps, steps, of.get("thd"))
        return {name: _speedup(of["ours"], of[name])[0] for name in MEGATRON}

    found = {what: speedups(other) for what, other in changed.items()}
    same = found.pop("")
    of_all = {name: numbers[name]["us_per_token"] / numbers["ours"]["us_per_token"] for name in MEGATRON}
    return [
        {"what": what} | {name: of_all[name] * each[name] / same[name] for name in MEGATRON}
        for what, each in found.items()
    ]


def _speedup(one: Measured, over: Measured) -> tuple[float, float]:
    """Return how many times as many tokens a second `one` trains, and the standard error.

    Of two that train the same tokens every step it is a ratio of times, of the steps that both simulated.
    """
    if one.delays or over.delays:
        ratio = over.numbers["us_per_token"] / one.numbers["us_per_token"]
        errors = (0.0,) if one is over else (each.numbers["us_per_token_error"] for each in (one, over))
        return ratio, ratio * math.hypot(*errors)
    count = min(len(one.us), len(over.us))
    mine, theirs = (each.us[:count] / each.tokens[:count].sum() for each in (one, over))
    return ratio_of(theirs, mine)


def ratio_of(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Return the ratio of the sums of paired values, float64 [n] each, and its standard error, linearised."""
    ratio = above.sum() / below.sum()
    return float(ratio), float(np.std(above - ratio * below) * math.sqrt(len(above)) / below.sum())


def measure(
    setup: Setup,
    name: str,
    job: Job,
    packed: int,
    simulated: int,
    apart: Measured | None,
    advance: Advance = lambda steps: None,
    **changes: Any,
) -> Measured:
    """Pack `packed` steps of a scheme and simulate `simulated` of them, evenly spread; `changes` are of `Megatron`.

    Steps of a scheme that delays have other documents than Megatron's. So its time per token is time per work, at the
    work per token of Megatron's steps, `apart`.
    """
    megatron = setup.megatron._replace(name=name, **changes) if name in MEGATRON else Megatron()
    steps: list[tuple[float, int, int, int]] = []
    samples: list[Sample] = []
    for i, step in enumerate(setup.steps(job, packed)):
        works = step.batch.sums(job.work(step.batch.documents["length"]))
        delays = metrics.delays(step.batch, step.step)
        late = sum(max(0, delay) * tokens for delay, tokens in delays.items())
        steps.append((metrics.imbalance(works), sum(delays.values()), late, max(delays, default=0)))
        if i % (packed // simulated) == 0:
            result = megatron.simulate(job, step.batch)
            work = sum(delays.values()) if name == "plain" else int(works.sum())
            samples.append(Sample(result, step.batch.lengths, work))
        advance(1)
    imbalance, step_tokens, late_tokens, most_late = map(np.array, zip(*steps, strict=True))
    time, works = np.array([(sample.step.time, sample.work) for sample in samples]).T
    tokens = np.array([sum(int(lengths.sum()) for lengths in sample.documents) for sample in samples])
    counted, (us_per_work, error) = tokens.sum(), ratio_of(time, works)
    if apart is not None and job.packing.delays:
        counted = works.sum() * apart.tokens.sum() / apart.work.sum()
    longest = megatron.micro_batch_size * job.context_length if job.packing.fixed_length else job.max_tokens
    held = _of_windows(job, megatron.micro_batch_size)
    levels = [imbalances(sample.step) for sample in samples]
    numbers = {
        "packing": job.packing.name,
        "num_micro_batches": job.num_micro_batches // megatron.micro_batch_size,
        "cp_sharding": job.sharding.cp_sharding if job.parallel.cp > 1 else None,
        "step_ms": float(time.mean()) / 1e3,
        "us_per_token": float(time.sum() / counted),
        "us_per_token_error": error / us_per_work,
        "late_steps": float(late_tokens.sum() / step_tokens.sum()),
        "max_delay_steps": int(most_late.max()),
        "token_cv": float(step_tokens.std() / step_tokens.mean()),
        "longest_micro_batch_tokens": longest,
        "activation_gib": max(peak_bytes(held, stage, longest) for stage in range(job.parallel.pp)) / 2**30,
        "imbalance": {
            **{level: float(np.mean([each[level] for each in levels])) for level in levels[0]},
            "work_mean": float(imbalance.mean()),
            "work_p95": float(np.quantile(imbalance, 0.95)),
        },
    }
    return Measured(numbers, job.packing.delays, samples, time, tokens, works)


def _of_windows(job: Job, size: int) -> Job:
    """Return the job with so many windows per micro-batch, whose activations are Megatron's."""
    if size == 1:
        return job
    count, tokens = job.num_micro_batches // size, size * job.context_length
    job = replace(job, max_tokens=max(job.max_tokens, tokens), parallel=replace(job.parallel, group_size=None))
    return replace(job, num_micro_batches=count, global_batch_size=count, context_length=tokens)


def _parts_ms(samples: list[Sample]) -> dict[str, float]:
    """Return where the time of the steps goes on average."""
    of_steps = [asdict(breakdown(sample.step)) for sample in samples]
    return {part: float(np.mean([each[part] for each in of_steps])) / 1e3 for part in of_steps[0]}


def data_entries(setup: Setup) -> dict[str, Any]:
    """Return documents and tokens of the training split, and shares by length."""
    every = np.concatenate(setup.data.lengths)
    lengths, counts = np.unique(every, return_counts=True)
    edges = 2 ** np.arange(0, math.ceil(math.log2(max(2, int(lengths[-1])))) + 1)
    # A document counts in the bin of its length. One longer than the window is attended to window by window.
    job = setup.job
    full, rest = np.divmod(lengths, job.context_length)
    work = full * float(job.work(np.array(job.context_length))) + job.work(rest)
    place = np.searchsorted(edges, lengths, side="left")
    shares = {
        name: (np.bincount(place, weights=counts * values, minlength=len(edges)) / (counts * values).sum()).tolist()
        for name, values in (("documents", lengths > 0), ("tokens", lengths), ("work", work))
    }
    quantiles = np.quantile(every, (0.5, 0.9, 0.99, 1.0)).astype(int).tolist()
    return {
        "prefixes": setup.data.prefixes,
        "documents": len(every),
        "tokens": int(every.sum()),
        "length_quantiles": dict(zip(("p50", "p90", "p99", "max"), quantiles, strict=True)),
        "up_to": edges.tolist(),
        "shares": shares,
    }


def profile_entries(setup: Setup) -> dict[str, Any]:
    """Return origin and stated errors of the profile and of its network."""
    profile = setup.job.profile
    stated = json.loads(profile_file(setup.run.profile).read_text())
    shipped = {file.name: file for file in NETWORKS.iterdir()}
    network = shipped.get(f"{profile.network.name}.json")
    of_network = json.loads(network.read_text()) if network else {"name": profile.network.name}
    origin = ("name", "device", "source", "kernel_measured", "date", "error")
    return {
        **{key: stated[key] for key in origin if key in stated},
        "versions": {name: version for name, version in asdict(profile.versions).items() if version},
        "backward_measured": profile.backward is not None,
        "linear_measured": profile.linear_tflops is not None,
        "network": {key: of_network[key] for key in origin if key in of_network},
    }
