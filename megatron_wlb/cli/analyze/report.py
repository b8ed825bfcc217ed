"""The numbers: packed, sharded and simulated steps of every scheme."""

import contextlib
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_wlb.cli.analyze.lengths import Documents, documents_of
from megatron_wlb.cli.analyze.setup import Scheme, Schemes, Setup
from megatron_wlb.cli.common import Advance, Begin
from megatron_wlb.describe.alternatives import Alternative, Kind
from megatron_wlb.describe.price import SIMULATED, Price, prices
from megatron_wlb.hardware.profile import Profile, generations, gpu_of, load_profile
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.plan import metrics
from megatron_wlb.plan.alone import best_size
from megatron_wlb.simulate.published import FLAGS, Errors, errors_like
from megatron_wlb.simulate.step import TIME_SHARES, SimulatedStep, breakdown, imbalances

MAX_STEPS, LEAST_SIMULATED, LEAST_PACKED = 200, 4, 40
PASSES, MICRO_BATCHES = 60_000, 20_000
"""Approximate passes to simulate and micro-batches to pack per scheme, within the bounds above."""
OTHER_SIMULATED = 24
"""Most steps to simulate of every other layout and other flag."""
MOST_LAYOUTS = 3
"""Layouts that are shown, the fastest."""
READING_STEPS = 8
"""Steps that tell a speed-up under other assumptions."""
HALF_THE_NETWORK = "half the bandwidth between nodes"
KERNELS_OF = "kernels of "
"""How readings by other profiles of the same device begin."""
ATTENTION_TAKES = "attention takes "
"""How readings begin in which attention alone is as far off as predicted steps like the run's are (p90)."""


SOURCES = {
    "balance": TIME_SHARES["waiting"],
    "exchange": TIME_SHARES["exchange"],
    "pipeline": TIME_SHARES["bubble"],
    "attention": ("attention",),
    "micro-batches": tuple(part for part in TIME_SHARES["busy"] if part != "attention"),
}
"""Where a gain comes from, and the fields of `Breakdown` that it saves. A ring calls attention's kernel for the keys of
every rank; other micro-batches compute at other rates."""
RING = ("exchange", "attention")
"""Sources that are Megatron's ring, if there are context-parallel ranks."""


class Steps(NamedTuple):
    """Numbers of steps of a scheme."""

    packed: int
    simulated: int
    """Of these, evenly spread."""


class Ratio(NamedTuple):
    """A speed-up and its standard error."""

    value: float
    error: float


class Sample(NamedTuple):
    """A simulated step."""

    step: SimulatedStep
    documents: list[np.ndarray]
    """Document lengths of its micro-batches."""
    work: int
    """Tokens where these attend across documents."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A scheme and the steps that were simulated of it."""

    scheme: Scheme
    samples: list[Sample]
    us: np.ndarray
    """Times of the steps, float64 [simulated]."""
    tokens: np.ndarray
    work: np.ndarray
    counted: float
    """Tokens that the time is divided by."""
    late_steps: float
    """Mean delay of a token."""
    max_delay_steps: int
    token_cv: float
    """Of packed steps."""
    work_imbalance: np.ndarray
    """Largest over mean work of the micro-batches, of packed steps."""

    @property
    def us_per_token(self) -> float:
        return float(self.us.sum() / self.counted)

    @property
    def relative_error(self) -> float:
        """Return the standard error of the time per work, as a share of it."""
        us_per_work, error = ratio_of(self.us, self.work)
        return error / us_per_work

    @property
    def step_ms(self) -> float:
        return float(self.us.mean()) / 1e3

    @cached_property
    def parts_ms(self) -> dict[str, float]:
        """Where the time of a step goes on average, by the fields of `Breakdown`."""
        of_steps = [asdict(breakdown(sample.step)) for sample in self.samples]
        return {part: float(np.mean([each[part] for each in of_steps])) / 1e3 for part in of_steps[0]}

    @cached_property
    def imbalance(self) -> dict[str, float]:
        """Slowest over mean of micro-batches, DP ranks and CP ranks."""
        levels = [imbalances(sample.step) for sample in self.samples]
        return {level: float(np.mean([each[level] for each in levels])) for level in levels[0]}

    @property
    def activation_gib(self) -> float:
        return self.scheme.activation_bytes() / 2**30

    def at_work_of(self, apart: "Measured") -> "Measured":
        """Return it with its time per work, at the work per token of Megatron's steps, if its own steps differ."""
        if self.scheme.same_steps:
            return self
        return replace(self, counted=self.work.sum() * apart.tokens.sum() / apart.work.sum())

    def us_of(self, *parts: str) -> float:
        """Return the time per token that fields of `Breakdown` take."""
        return self.us_per_token / self.step_ms * sum(self.parts_ms[part] for part in parts)

    def typical(self) -> int:
        """Return the step whose time per token is nearest to the mean."""
        return int(np.abs(self.us / self.tokens - self.us.sum() / self.tokens.sum()).argmin())


class Reading(NamedTuple):
    """The speed-up of --wlb over both ways of Megatron under another assumption."""

    what: str
    plain: float
    thd: float


class Faster(NamedTuple):
    """An alternative that is faster with --wlb than the run."""

    way: Alternative
    gain: float
    """Over the run with --wlb."""
    speedup: float
    """Over Megatron with intra-document attention, in the run's layout."""
    late_steps: float
    speedup_error: float
    megatron: float | None = None
    """Speed-up of Megatron in another layout; None if it cannot train there."""


class Report(NamedTuple):
    """Everything that is shown."""

    setup: Setup
    documents: Documents
    published: Errors
    """Of steps like the run's."""
    steps: Steps
    schemes: Schemes[Measured]
    """Megatron with intra-document attention is at its best `--micro-batch-size`."""
    speedups: Schemes[Ratio]
    """Over Megatron with intra-document attention."""
    best_size: float
    """Speed-up of Megatron with intra-document attention, by that size over the run's."""
    balance: float
    """Speed-up by --wlb where both sides lack the features that it switches off."""
    prices: list[Price]
    """Prices of these features."""
    readings: list[Reading]
    faster: list[Faster]
    """Of layouts the fastest, the fastest first."""

    def of_kind(self, kind: Kind) -> list[Faster]:
        return [each for each in self.faster if each.way.kind == kind]

    def example(self, measured: Measured) -> Sample:
        """Return a typical step, the same of all schemes: of the same tokens without a delay."""
        return measured.samples[self.schemes.thd.typical()]


def steps_of(job: Job) -> Steps:
    """Return how many steps of each scheme are packed, and how many simulated."""
    parallel, count = job.parallel, job.num_micro_batches
    passes = count * (parallel.pp * parallel.vpp + 2 * parallel.cp)
    simulated = min(MAX_STEPS, max(LEAST_SIMULATED, PASSES // passes))
    packed = min(MAX_STEPS, max(LEAST_PACKED, MICRO_BATCHES // count))
    return Steps(packed // simulated * simulated or simulated, simulated)


def analyse(setup: Setup, steps: Steps, begin: Begin) -> Report:
    """Simulate all schemes; tells `begin` each stage."""
    few = min(steps.simulated, READING_STEPS)
    begin("Megatron's micro-batch sizes")
    thd, best_size = at_its_best(setup.without_wlb(), setup.run.budget or 0.0, Steps(few, few))
    plain, ours = setup.without_wlb(crosses=True), setup.with_wlb(setup.job)
    advance = begin("simulating steps", len(Schemes._fields) * steps.packed)
    schemes = compared(Schemes(plain, thd, ours), steps, advance)
    speedups = Schemes(*(speedup(each, schemes.thd) for each in schemes))
    others = Others(setup, schemes, speedups.ours, steps.packed // steps.simulated)
    begin("other layouts and flags")
    balance, found = others.prices()
    launched = setup.run.launched
    stated = launched.source != "flags" or any(launched.stated.get(name) for name in FLAGS)
    published = errors_like(setup.job, flags=stated)
    return Report(
        setup=setup,
        documents=documents_of(setup),
        published=published,
        steps=steps,
        schemes=schemes,
        speedups=speedups,
        best_size=best_size,
        balance=balance,
        prices=found,
        readings=readings(schemes, published.p90, few),
        faster=others.faster(),
    )


class Others(NamedTuple):
    """Other ways to train that are faster with --wlb than the run's, on the first of its steps."""

    setup: Setup
    schemes: Schemes[Measured]
    of_ours: Ratio
    """The speed-up of --wlb."""
    stride: int

    def prices(self) -> tuple[float, list[Price]]:
        """Return the gain of --wlb where both sides lack the features that it switches off, and their prices."""
        job, thd = self.setup.job, self.schemes.thd.scheme
        found = prices(job, self.setup.run.arguments, lambda of: float(self._measure(thd._replace(job=of)).us.mean()))
        if not any(each.source == SIMULATED for each in found):
            return self.of_ours.value, found
        bare = self._measure(thd._replace(job=without_wlb(job)))
        return speedup(self.schemes.ours, bare).value, found

    def faster(self) -> list[Faster]:
        """Return the ways that are faster, of layouts the fastest, with Megatron's gain in each."""
        tried = [found for way in self.setup.others() if (found := self._faster(way)) is not None]
        layouts = sorted((each for each in tried if each.way.kind == "layouts"), key=lambda each: -each.gain)
        there = [each._replace(megatron=self._of_megatron(each.way.job)) for each in layouts[:MOST_LAYOUTS]]
        return [*there, *(each for each in tried if each.way.kind != "layouts")]

    def _of_megatron(self, job: Job) -> float | None:
        """Return the speed-up of Megatron in another layout, at its best size there; None if it cannot train there."""
        few, budget = min(len(self.schemes.thd.us), READING_STEPS), self.setup.run.budget_bytes(job)
        with contextlib.suppress(ValueError):  # such as of a micro-batch size that does not divide the windows
            best, _ = at_its_best(self.setup.without_wlb(job), budget or 0.0, Steps(few, few))
            return speedup(self._measure(best), self.schemes.thd).value
        return None

    def _faster(self, way: Alternative) -> Faster | None:
        """Return the speed-up of a way and its delay, if it gains over its least and two standard errors on ours."""
        each = self._measure(self.setup.with_wlb(way.job))
        gain, error = speedup(each, self.schemes.ours)
        if gain - 1 <= max(way.least, 2 * error):
            return None
        ours = self.of_ours
        found = math.hypot(error * ours.value, gain * ours.error)
        return Faster(way, gain, gain * ours.value, each.late_steps, found)

    def _measure(self, scheme: Scheme) -> Measured:
        simulated = min(len(self.schemes.ours.us), steps_of(scheme.job).simulated, OTHER_SIMULATED)
        return measure(scheme, Steps(self.stride * simulated, simulated)).at_work_of(self.schemes.thd)


def at_its_best(own: Scheme, budget_bytes: float, steps: Steps) -> tuple[Scheme, float]:
    """Return Megatron at its best micro-batch size whose activations fit, and its speed-up over its own size."""

    def time(size: int) -> float:
        return measure(own._replace(micro_batch_size=size), steps).us_per_token

    size, faster = best_size(own.job, own.micro_batch_size, budget_bytes, time)
    return own._replace(micro_batch_size=size), faster


def sources(schemes: Schemes[Measured]) -> dict[str, float]:
    """Return the percentages of speed that --wlb gains over Megatron by `SOURCES`; they sum to its whole gain."""
    saved = {name: schemes.thd.us_of(*of) - schemes.ours.us_of(*of) for name, of in SOURCES.items()}
    return {name: 100 * us / schemes.ours.us_per_token for name, us in saved.items()}


def readings(schemes: Schemes[Measured], error: float | None, steps: int) -> list[Reading]:
    """Return --wlb's speed-up over Megatron's schemes under other assumptions, by the same few steps.

    `error` is how far off attention may be.
    """
    profile = schemes.ours.scheme.job.profile
    slower = replace(profile.network, link_gb_per_s=profile.network.link_gb_per_s / 2)
    changed = {HALF_THE_NETWORK: replace(profile, network=slower)}
    names = generations(gpu_of(profile.device or ""))
    if profile.name in names:
        changed |= {f"{KERNELS_OF}{name}": load_profile(name) for name in names if name != profile.name}
    if error:
        for factor in (math.exp(-error), math.exp(error)):
            changed[f"{ATTENTION_TAKES}{factor:.2f} times as long"] = profile.with_attention(factor)

    def over(other: Profile) -> tuple[float, float]:
        """Return the speed-up over both ways of Megatron by another profile."""
        each = (of.scheme._replace(job=replace(of.scheme.job, profile=other)) for of in schemes)
        of = compared(Schemes(*each), Steps(steps, steps))
        return speedup(of.ours, of.plain).value, speedup(of.ours, of.thd).value

    same = over(profile)
    of_all = [each.us_per_token / schemes.ours.us_per_token for each in (schemes.plain, schemes.thd)]
    return [
        Reading(what, *(whole * mine / first for whole, mine, first in zip(of_all, over(other), same, strict=True)))
        for what, other in changed.items()
    ]


def speedup(one: Measured, base: Measured) -> Ratio:
    """Return the tokens per second of `one` over `base`'s.

    Of two that train the same tokens every step it is a ratio of times, of the steps that both simulated.
    """
    if not (one.scheme.same_steps and base.scheme.same_steps):
        ratio = base.us_per_token / one.us_per_token
        errors = (0.0,) if one is base else (each.relative_error for each in (one, base))
        return Ratio(ratio, ratio * math.hypot(*errors))
    count = min(len(one.us), len(base.us))
    mine, theirs = (each.us[:count] / each.tokens[:count].sum() for each in (one, base))
    return Ratio(*ratio_of(theirs, mine))


def ratio_of(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Return the ratio of the sums of paired values, float64 [n] each, and its standard error, linearised."""
    ratio = above.sum() / below.sum()
    return float(ratio), float(np.std(above - ratio * below) * math.sqrt(len(above)) / below.sum())


def compared(schemes: Schemes[Scheme], steps: Steps, advance: Advance = lambda steps: None) -> Schemes[Measured]:
    """Measure the schemes on the same steps."""
    plain, thd, ours = (measure(scheme, steps, advance) for scheme in schemes)
    return Schemes(plain, thd, ours.at_work_of(thd))


def measure(scheme: Scheme, steps: Steps, advance: Advance = lambda steps: None) -> Measured:
    """Pack steps of a scheme and simulate some of them, evenly spread."""
    job = scheme.job
    packed: list[tuple[float, int, int, int]] = []
    samples: list[Sample] = []
    for i, step in enumerate(scheme.steps(steps.packed)):
        works = step.batch.sums(job.work(step.batch.documents["length"]))
        count, late = int(step.batch.documents["length"].sum()), metrics.lateness(step.batch, step.step)
        packed.append((metrics.imbalance(works), count, *late))
        if i % (steps.packed // steps.simulated) == 0:
            work = count if scheme.crosses else int(works.sum())
            samples.append(Sample(scheme.simulate(step.batch), step.batch.lengths, work))
        advance(1)
    imbalance, step_tokens, late_tokens, most_late = map(np.array, zip(*packed, strict=True))
    us, work = np.array([(sample.step.time, sample.work) for sample in samples]).T
    tokens = np.array([sum(int(lengths.sum()) for lengths in sample.documents) for sample in samples])
    return Measured(
        scheme=scheme,
        samples=samples,
        us=us,
        tokens=tokens,
        work=work,
        counted=float(tokens.sum()),
        late_steps=float(late_tokens.sum() / step_tokens.sum()),
        max_delay_steps=int(most_late.max()),
        token_cv=float(step_tokens.std() / step_tokens.mean()),
        work_imbalance=imbalance,
    )
