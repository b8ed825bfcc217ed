"""The report in words: rows and sentences for both the terminal and the page."""

import datetime
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cli import common
from megatron_wlb.cli.analyze.entries import origin_of
from megatron_wlb.cli.analyze.report import (
    ATTENTION_TAKES,
    HALF_THE_NETWORK,
    KERNELS_OF,
    RING,
    Measured,
    Ratio,
    Report,
    sources,
)
from megatron_wlb.cli.analyze.setup import WARM_UP, Schemes
from megatron_wlb.cli.common import render
from megatron_wlb.describe.alternatives import CLOSE, TOLD, WORTH, gib
from megatron_wlb.describe.price import sentence as sentence_on_prices
from megatron_wlb.simulate.step import TIME_SHARES

TITLES = Schemes("Megatron", "Megatron, intra-document attention", "--wlb")
"""Names of the schemes."""
SPEEDUP, IDLE = "speed-up per token", "idle, % of a step"
SHORT = (SPEEDUP, "tokens per second and GPU", IDLE, "delay of a token, steps", "activations, GiB")
"""Titles of the rows to read first."""
CLEAR = 0.05
"""Gain from which --wlb is advised: the gain of a long run can be off by as much."""
NOTHING = 0.5
"""Percentage of a step below which Megatron's GPUs do not wait for each other."""
MOST_FACTS = 6
"""Sentences that are shown first."""

Row = tuple[str, ...]
"""A title, and its value for every scheme."""


def rows(report: Report) -> list[Row]:
    """Return the column titles, then a row per number."""
    parallel = report.setup.job.parallel
    pp, dp, cp, gpus = parallel.pp, parallel.dp, parallel.cp, parallel.num_gpus

    def row(title: str, show: Callable[[Measured], str]) -> Row:
        return title, *map(show, report.schemes)

    def speedups(title: str, show: Callable[[Ratio], str]) -> Row:
        return title, *map(show, report.speedups)

    def imbalance(title: str, name: str) -> Row:
        return row(title, lambda n: f"{n.imbalance[name]:.3f}")

    def part(title: str, *names: str) -> Row:
        return row(title, lambda n: f"{percent(n, *names) + 0:.1f}")  # never -0.0

    finer = {
        "exchange": [part("    for the slowest CP rank", "cp_wait")],
        "waiting": [part("    for the slowest EP rank", "ep_wait")] if parallel.pooling_ranks > 1 else [],
    }
    has = {"bubble": pp > 1, "exchange": cp > 1, "waiting": pp * dp > 1, "busy": False}
    words = [
        [part(f"  {word}", *parts), *finer.get(word, [])] for word, parts in TIME_SHARES.items() if has.get(word, True)
    ]
    levels = (("pp", "micro-batches", pp), ("dp", "DP ranks", dp), ("cp", "CP ranks", cp))
    return [
        ("", *TITLES),
        speedups(SPEEDUP, lambda n: f"{n.value:.3f}"),
        speedups("  standard error", lambda n: f"{n.error:.3f}" if n.error else ""),
        row("micro-batches per step", lambda n: f"{n.scheme.num_micro_batches:,}"),
        row("time per million tokens, s", lambda n: f"{n.us_per_token:.3f}"),
        row("tokens per second and GPU", lambda n: f"{1e6 / n.us_per_token / gpus:,.0f}"),
        *(imbalance(f"{title}: slowest / mean", name) for name, title, size in levels if size > 1),
        row("work: largest / mean", lambda n: f"{n.work_imbalance.mean():.3f}"),
        row("  p95 over steps", lambda n: f"{np.quantile(n.work_imbalance, 0.95):.3f}"),
        row(IDLE, lambda n: f"{idle(n) + 0:.1f}"),
        *chain(*words),
        row("delay of a token, steps", lambda n: f"{n.late_steps:.2f}"),
        row("  of the latest", lambda n: str(n.max_delay_steps)),
        row("tokens per step, CV", lambda n: f"{n.token_cv:.3f}"),
        row("S_max, tokens", lambda n: f"{n.scheme.longest_tokens:,}"),
        row("activations, GiB", lambda n: f"{n.activation_gib:.1f}"),
    ]


def idle(numbers: Measured) -> float:
    """Return the percentage of a step in which GPUs do no work of their own."""
    return round(100 - percent(numbers, *TIME_SHARES["busy"]), 1)


def percent(numbers: Measured, *parts: str) -> float:
    """Return the percentage that parts of a `Breakdown` take, to one digit."""
    share: float = round(100 * sum(numbers.parts_ms[part] for part in parts) / numbers.step_ms, 1)
    return share


def gain(report: Report) -> float:
    """Return --wlb's net gain over Megatron at its best, as a share of the speed; 0 if not certain."""
    ours = report.speedups.ours
    brings = ours.value - 1
    return brings if abs(brings) > max(0.005, 2 * ours.error) else 0.0


def verdict(report: Report) -> tuple[str, str]:
    """Return the advice, by the net gain, in words, and "gain", "close" or "loss"."""
    setup = report.setup
    several = setup.run.budget is None and setup.of_run.micro_batch_size > 1  # of which training may make one
    if gain(report) < 0 and not several:
        return "Do not use it", "loss"
    if percent(report.schemes.thd, *TIME_SHARES["waiting"]) < NOTHING:
        return "Nothing to balance", "close"
    if gain(report) >= CLEAR and _least_and_most(report)[0] > 1:
        return "Use it", "gain"
    return "No clear gain", "close"


def priced(report: Report) -> str:
    """Return the gain of balance, its cost and the net gain, in words; "" if it costs nothing."""
    if not report.prices:
        return ""
    return sentence_on_prices(report.balance, report.speedups.ours.value, report.prices)


def sentences(report: Report) -> list[str]:
    """Return the lines that come first: the number, its source, its possible errors, and the rest."""
    size = report.schemes.thd.scheme.micro_batch_size
    first = (
        f"{verdict(report)[0]}. {_predicted(report)}: {report.speedups.ours.value:.2f} times as many tokens per second "
        f"as Megatron at its best in this layout (intra-document attention, --micro-batch-size {size})."
    )
    if prices := priced(report):
        first += f" {prices}"
    rest = [_tokens(report), *_idle(report), *_across(report)]
    if report.best_size > 1 + CLOSE:
        own = report.setup.run.arguments.micro_batch_size
        rest.insert(
            0, f"--micro-batch-size {size} alone makes Megatron {report.best_size:.2f} times as fast as {own} does."
        )
    return [line for line in (first, _sources(report), _doubts(report), " ".join(rest)) if line]


def _predicted(report: Report) -> str:
    """Return the kind of the number, and its assumptions that the run does not state."""
    run, profile = report.setup.run, report.setup.job.profile
    left_out = ", ".join(run.screened.left_out)
    words = f"An estimate without {left_out}" if left_out else "Predicted"
    if run.assumes_device:
        words += f" for an assumed {profile.device or profile.name}"
    if run.launched.is_log and run.launched.stated.get("distributed_backend") == "gloo":
        words += ", from the log of a run on CPUs (gloo)"
    if run.arguments.mock_data:
        words += ", on mock data"
    return words


def _sources(report: Report) -> str:
    """Return where the gain or loss comes from, the largest part first; "" for none."""
    if not (whole := gain(report)):
        return ""
    found = sources(report.schemes)
    shown = sorted((name for name in found if abs(found[name]) >= 0.5), key=lambda name: -abs(found[name]))
    text = f"Where it comes from: {', '.join(f'{name} {found[name]:+.0f} %' for name in shown)}."
    if report.setup.job.parallel.cp > 1 and sum(found[name] for name in RING) > 50 * whole > 0:
        text += " Most of it is Megatron's ring, its exchange and its calls, not balance, and no run has confirmed it."
    return text


def _doubts(report: Report) -> str:
    """Return by how much the number could be wrong: kernels, network, published steps like the run's."""
    least, most = (f"{each:.2f}" for each in _least_and_most(report, (KERNELS_OF, ATTENTION_TAKES)))
    kernels = least if least == most else f"{least} to {most}"
    (of_network,) = (each.thd for each in report.readings if each.what == HALF_THE_NETWORK)
    kind, count, median, p90, least_time, most_time, flags = report.published
    if median is None or p90 is None:
        alike = f"The error is not known: no step of {kind} is published that was predicted."
    elif not flags:
        alike = (
            f"The run's CUDA graphs, dispatcher, overlap and fusion of experts are not given: at least 80 % of {count} "
            f"published steps of {kind} took {least_time:.2f} to {most_time:.2f} times the time predicted without them."
        )
    else:
        errors = f"{100 * median:.0f} % (median) and {100 * p90:.0f} % (p90)"
        alike = f"Predicted times of {count} published steps of {kind} are off by {errors}."
    return (
        f"How it could be wrong: {kernels} by kernels and their error, {of_network:.2f} with half the bandwidth "
        f"between nodes. {alike} No run on several GPUs has confirmed a gain."
    )


def _idle(report: Report) -> Iterator[str]:
    yield f"GPUs idle {idle(report.schemes.ours):.0f} % of a step instead of {idle(report.schemes.thd):.0f} %."


def _across(report: Report) -> Iterator[str]:
    """Yield the speed-up over Megatron with attention across documents."""
    across, apart, ours = (each.us_per_token for each in report.schemes)
    if not report.setup.masks_documents:
        run = "without --wlb" if report.setup.run.launched.stated.get("wlb") else "as it is"
        yield (
            f"Over the run {run}, whose attention crosses documents: {across / ours:.2f} times. Attention inside "
            f"documents alone, which Megatron can do, too, brings {across / apart:.2f}."
        )
    if across * (1 + CLOSE) < ours:
        yield "A run that can train across documents is better off without --wlb."


def _tokens(report: Report) -> str:
    """Return which tokens steps train with --wlb, compared with Megatron's."""
    if not report.schemes.ours.scheme.same_steps:
        return f"Tokens run {report.schemes.ours.late_steps:.2f} steps late on average."
    return "Both train the same tokens every step."


def _least_and_most(report: Report, what: str | tuple[str, ...] = "") -> tuple[float, float]:
    """Return the range of --wlb's speed-up over Megatron with intra-document attention, under all assumptions or those
    that begin with `what`."""
    others = [each.thd for each in report.readings if each.what.startswith(what)]
    found = [report.schemes.thd.us_per_token / report.schemes.ours.us_per_token, *others]
    return min(found), max(found)


def facts(report: Report) -> list[str]:
    """Return sentences on the basis of the numbers."""
    setup, job, schemes = report.setup, report.setup.job, report.schemes
    profile = origin_of(setup)
    text = render(
        "facts.txt",
        report=report,
        job=job,
        screened=setup.run.screened,
        profile=profile,
        gib=gib,
        errors=_errors_of(profile.get("error")),
        fp8_attention=setup.run.arguments.fp8_dot_product_attention,
        precision="bf16" if job.profile.gain(job.precision, "mlp") == (1, 0) else job.precision,
        warm_up=WARM_UP,
        ep_wait=[f"{percent(each, 'ep_wait'):.1f} %" for each in (schemes.thd, schemes.ours)],
        over_device=any(each.activation_gib > job.profile.memory_gib for each in schemes),
        negative=any(percent(each, *TIME_SHARES["waiting"]) < 0 for each in schemes),
    )
    return [line for line in text.splitlines() if line]


def _errors_of(error: Any, what: str = "") -> Iterator[str]:
    """Yield the errors that a profile states for held-out data, one sentence each."""
    if not isinstance(error, dict):
        return
    for kind in ("held_out", "error"):
        if f"{kind}_median" in error:
            yield f"{what}: median {error[f'{kind}_median']:.1%}, p90 {error[f'{kind}_p90']:.1%}"
    for key, value in error.items():
        yield from _errors_of(value, f"{what}, {key}" if what else key)


PARTS = {
    "attention": ("attention",),
    "linear layers and launches": ("linear", "vocabulary", "launches"),
    "tensor parallelism": ("tensor",),
    "gradients and optimizer": ("gradients", "optimizer", "parameters"),
    "exchange of K and V": TIME_SHARES["exchange"],
    "waiting": (*TIME_SHARES["bubble"], *TIME_SHARES["waiting"]),
}
"""Short names for where the time goes, and the fields of `Breakdown` that each sums."""


def parts(scheme: Measured) -> dict[str, float]:
    """Return seconds per million tokens by `PARTS`."""
    return {title: scheme.us_of(*names) for title, names in PARTS.items()}


def rendered(report: Report) -> dict[str, Any]:
    """Return the report as terminal and page show it; the first `MOST_FACTS` facts matter most."""
    setup, every, (first, *rest) = report.setup, rows(report), sentences(report)
    screened, launched = setup.run.screened, setup.run.launched
    tone = verdict(report)[1]
    flags = {"Add to the command" if tone == "gain" else "To try it": setup.flags()}
    flags["To pin the choices of auto"] = setup.pins()
    flags["Take out"] = " ".join(screened.refused)
    advised = gain(report) > 0 and not screened.stops
    run = launched.source if launched.is_log else "flags and command as given"
    data = ", ".join(setup.data.prefixes)
    return {
        "tone": tone,
        "first": first,
        "headline": " ".join([first, *rest]),
        "rest": rest,
        "warnings": screened.remarks + setup.data.remarks,
        "faster": list(_faster(report)),
        "job": _job(report),
        "source": f"{run}; data: {data}; {datetime.date.today().isoformat()}, megatron_wlb {__version__}",
        "rows": every,
        "short": [row for row in every if row[0] in ("", *SHORT)],
        "flags": [(title, text) for title, text in flags.items() if text and advised],
        "facts": facts(report),
    }


def _faster(report: Report) -> Iterator[str]:
    """Yield the ways with which the same GPUs are faster, the fastest of each kind, if by `WORTH`."""
    fastest = [each for kind in TOLD for each in report.of_kind(kind)[:1] if each.gain >= WORTH]
    for each in fastest:
        there, how = "", each.way.words
        if each.megatron:
            over = each.speedup / each.megatron
            there = f" Megatron there is {each.megatron:.2f} times as fast; over it, --wlb is {over:.2f} times as fast."
        yield (
            f"{how[0].upper()}{how[1:]} on the same GPUs, --wlb is predicted to be {each.gain:.2f} times as fast as "
            f"here, with {gib(each.way.job):.0f} GiB a GPU. Over {TITLES.thd} here it is {each.speedup:.2f} times."
            f"{there}"
        )


def _job(report: Report) -> str:
    job, documents = report.setup.job, report.documents
    parallel, quantiles = job.parallel, documents.length_quantiles
    model = report.setup.run.model or f"{job.model.num_layers} layers of {job.model.hidden_size}"
    vpp = f" x VPP {parallel.vpp}" if parallel.vpp > 1 else ""
    return (
        f"{model}, window {job.context_length:,}, {parallel.num_gpus:,} GPUs: TP {parallel.tp} x CP {parallel.cp} x PP "
        f"{parallel.pp}{vpp} x DP {parallel.dp}, {job.num_micro_batches:,} micro-batches per step. "
        f"{documents.documents:,} documents, {documents.tokens:,} tokens: median {quantiles['p50']:,}, p99 "
        f"{quantiles['p99']:,}, longest {quantiles['max']:,}."
    )


def show(words: dict[str, Any], console: Any, *, verdict_only: bool) -> None:
    """Print a report `rendered`, or its first sentence."""
    from rich.text import Text

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    say(words["first"], "bold")
    if verdict_only:
        return
    for sentence in words["rest"]:
        say(sentence)
    for warning in words["warnings"]:
        say(f"! {warning}")
    for sentence in words["faster"]:
        say(sentence, "bold")
    say(words["job"])
    console.print(common.table(words["rows"][0], words["rows"][1:], bold=(SPEEDUP,)))
    for fact in words["facts"][:MOST_FACTS]:
        say(f"- {fact}")
    if more := len(words["facts"][MOST_FACTS:]):
        say(f"- {more} more in the output of --html and --json.")
    for title, flags in words["flags"]:
        say(f"{title}:\n  {flags}")
