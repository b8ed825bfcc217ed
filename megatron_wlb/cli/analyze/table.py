"""The report in words: rows and sentences for both the terminal and the page."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from megatron_wlb.cli import common
from megatron_wlb.cli.analyze.report import ATTENTION_TAKES, CLOSE, KERNELS_OF, Report
from megatron_wlb.cli.common import render
from megatron_wlb.describe.alternatives import WORTH
from megatron_wlb.describe.price import Price
from megatron_wlb.describe.price import in_words as in_words_of_prices
from megatron_wlb.simulate.step import TIME_SHARES

TITLES = {"plain": "Megatron", "thd": "Megatron, documents apart", "ours": "--wlb"}
"""Names of the schemes, in the order in which they are shown."""
SPEEDUP, IDLE = "speed-up per token", "idle, % of a step"
SHORT = (SPEEDUP, "tokens a second and GPU", IDLE, "delay of a token, steps", "activations, GiB")
"""Titles of the rows to read first."""
MOST_FACTS = 6
"""Sentences that are shown first."""

Row = tuple[str, ...]
"""A title, and its value for every scheme."""


def rows(report: Report) -> list[Row]:
    """Return the column titles, then a row per number."""
    parallel = report.setup.job.parallel
    schemes = [report.entries["schemes"][name] for name in TITLES]
    pp, dp, cp, gpus = parallel.pp, parallel.dp, parallel.cp, parallel.num_gpus

    def row(title: str, show: Callable[[dict[str, Any]], str]) -> Row:
        return title, *map(show, schemes)

    def imbalance(title: str, name: str) -> Row:
        return row(title, lambda n: f"{n['imbalance'][name]:.3f}")

    def part(title: str, *names: str) -> Row:
        return row(title, lambda n: f"{percent(n, *names) + 0:.1f}")  # never -0.0

    finer = {
        "exchange": [part("    for the slowest CP rank", "cp_wait")],
        "waiting": [part("    for the slowest EP rank", "ep_wait")] if parallel.expert_dp_ranks > 1 else [],
    }
    has = {"bubble": pp > 1, "exchange": cp > 1, "waiting": pp * dp > 1, "busy": False}
    words = [
        [part(f"  {word}", *parts), *finer.get(word, [])] for word, parts in TIME_SHARES.items() if has.get(word, True)
    ]
    levels = (("pp", "micro-batches", pp), ("dp", "DP ranks", dp), ("cp", "CP ranks", cp))
    return [
        ("", *TITLES.values()),
        row(SPEEDUP, lambda n: f"{n['speedup']:.3f}"),
        row("  standard error", lambda n: f"{n['speedup_error']:.3f}" if n["speedup_error"] else ""),
        row("micro-batches a step", lambda n: f"{n['num_micro_batches']:,}"),
        row("time per million tokens, s", lambda n: f"{n['us_per_token']:.3f}"),
        row("tokens a second and GPU", lambda n: f"{1e6 / n['us_per_token'] / gpus:,.0f}"),
        *(imbalance(f"{title}: slowest / mean", name) for name, title, size in levels if size > 1),
        imbalance("work: largest / mean", "work_mean"),
        imbalance("  p95 over steps", "work_p95"),
        row(IDLE, lambda n: f"{idle(n) + 0:.1f}"),
        *chain(*words),
        row("delay of a token, steps", lambda n: f"{n['late_steps']:.2f}"),
        row("  of the latest", lambda n: str(n["max_delay_steps"])),
        row("tokens per step, CV", lambda n: f"{n['token_cv']:.3f}"),
        row("S_max, tokens", lambda n: f"{n['longest_micro_batch_tokens']:,}"),
        row("activations, GiB", lambda n: f"{n['activation_gib']:.1f}"),
    ]


def idle(numbers: dict[str, Any]) -> float:
    """Return the percentage of a step in which GPUs do no work of their own."""
    return round(100 - percent(numbers, *TIME_SHARES["busy"]), 1)


def percent(numbers: dict[str, Any], *parts: str) -> float:
    """Return the percentage that parts of a `Breakdown` take, to one digit."""
    share: float = round(100 * sum(numbers["parts_ms"][part] for part in parts) / numbers["step_ms"], 1)
    return share


def gain(report: Report) -> float:
    """Return --wlb's net gain over Megatron, documents apart, as a share of the speed; 0 if not certain.

    Of Megatron with --micro-batch-size 1 where that is faster, which nothing keeps a run from.
    """
    ours = report.entries["schemes"]["ours"]
    brings = ours["speedup"] / _alone(report) - 1
    return brings if abs(brings) > max(0.005, 2 * ours["speedup_error"]) else 0.0


def _alone(report: Report) -> float:
    """Return how much faster Megatron alone may be than simulated, by single windows."""
    return max(1.0, float(report.entries["single_windows"]))


def verdict(report: Report) -> tuple[str, str]:
    """Return what to do, by the net gain, in words, and "gain", "close" or "loss"."""
    if gain(report) > CLOSE and _least_and_most(report, "thd")[0] > _alone(report):
        return "Use it", "gain"
    setup = report.setup
    several = setup.run.budget is None and setup.megatron.micro_batch_size > 1  # of which training may make one
    return ("Do not use it", "loss") if gain(report) < 0 and not several else ("Close", "close")


def priced(report: Report) -> str:
    """Return what balance brings, what it costs and what is left, in words; "" if nothing is lost."""
    entries = report.entries
    if not (found := [Price(**each) for each in entries["prices"]]):
        return ""
    return in_words_of_prices(entries["balance"], entries["schemes"]["ours"]["speedup"] / _alone(report), found)


def headline(report: Report) -> tuple[str, str]:
    left_out = ", ".join(report.entries["left_out"])
    predicted = f"An estimate without {left_out}" if left_out else "Predicted"
    schemes = report.entries["schemes"]
    across, apart, ours = (schemes[name]["us_per_token"] for name in TITLES)

    def times(scheme: str) -> str:
        least, most = (f"{each:.2f}" for each in _least_and_most(report, scheme, (KERNELS_OF, ATTENTION_TAKES)))
        given = f" ({least} to {most} by kernels and their error)" * (least != most)
        return f"{schemes[scheme]['us_per_token'] / ours:.2f} times{given}"

    first = f"{verdict(report)[0]}. {predicted}: {times('thd')} as many tokens a second as {TITLES['thd']}."
    if not (alike := report.entries["published"])["rows"]:
        first += f" The error is not known: no step of {alike['kind']} is published that was predicted."
    if (single := report.entries["single_windows"]) > 1 + CLOSE:
        first += f" --micro-batch-size 1 alone brings Megatron {single:.2f} of it."
    if prices := priced(report):
        first += f" {prices}"
    waits, instead = (idle(schemes[name]) for name in ("ours", "thd"))
    rest = f"{_tokens(report)} GPUs idle {waits:.0f} % of a step instead of {instead:.0f} %."
    if report.entries["scheme_of_run"] == "plain":
        run = "without --wlb" if report.setup.run.launched.stated.get("wlb") else "as it is"
        over = f"Over the run {run}, whose attention crosses documents: {times('plain')}"
        rest = f"{over}; masking documents alone, which Megatron can do, too, brings {across / apart:.2f}. {rest}"
    if across * (1 + CLOSE) < ours:
        rest += " A run that can train across documents is better off without --wlb."
    return first, rest


def _tokens(report: Report) -> str:
    """Return what steps train with --wlb, compared with Megatron's."""
    job, late = report.setup.job, report.entries["schemes"]["ours"]["late_steps"]
    if job.packing.delays:
        return f"Tokens run {late:.2f} steps late on average."
    return "Both train the same tokens every step."


def _least_and_most(report: Report, scheme: str, what: str | tuple[str, ...] = "") -> tuple[float, float]:
    """Return the range of --wlb's speed-up over a scheme under all assumptions, or those that begin with `what`."""
    over, ours = (report.entries["schemes"][name]["us_per_token"] for name in (scheme, "ours"))
    others = [reading[scheme] for reading in report.entries["readings"] if reading["what"].startswith(what)]
    found = [over / ours, *others]
    return min(found), max(found)


def facts(report: Report) -> list[str]:
    """Return sentences on what the numbers go by."""
    entries, job, schemes = report.entries, report.setup.job, report.entries["schemes"]
    text = render(
        "facts.txt",
        **entries,
        errors=_errors_of(entries["profile"].get("error")),
        parallel=job.parallel,
        fp8_attention=report.setup.run.arguments.fp8_dot_product_attention,
        precision="bf16" if job.profile.gain(job.precision, "mlp") == (1, 0) else job.precision,
        delays=job.packing.delays,
        experts=bool(job.model.moe_router_topk),
        crossover=job.crossover_tokens,
        ep_wait=[f"{percent(schemes[name], 'ep_wait'):.1f} %" for name in ("thd", "ours")],
        device_gib=round(job.profile.memory_gib),
        over_device=any(numbers["activation_gib"] > job.profile.memory_gib for numbers in schemes.values()),
        negative=any(percent(numbers, *TIME_SHARES["waiting"]) < 0 for numbers in schemes.values()),
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


def parts(report: Report, scheme: str) -> dict[str, float]:
    """Return seconds per million tokens by `PARTS`."""
    numbers = report.entries["schemes"][scheme]
    each = numbers["us_per_token"] / numbers["step_ms"]
    return {title: each * sum(numbers["parts_ms"][name] for name in names) for title, names in PARTS.items()}


def in_words(report: Report) -> dict[str, Any]:
    """Return the report as terminal and page show it; the first `MOST_FACTS` facts matter most."""
    entries, every, (first, rest) = report.entries, rows(report), headline(report)
    flags = {"Add to the command": entries["flags"], "To pin what auto chose": entries["pins"]}
    flags["Take out"] = " ".join(entries["refused"])
    run = entries["launch"] if report.setup.run.launched.is_log else "flags and command as given"
    data = ", ".join(entries["data"]["prefixes"])
    return {
        "tone": verdict(report)[1],
        "first": first,
        "headline": f"{first} {rest}",
        "rest": rest,
        "warnings": entries["warnings"],
        "faster": list(_faster(entries)),
        "job": _job(report),
        "source": f"{run}; data: {data}; {entries['date']}, megatron_wlb {entries['release']}",
        "rows": every,
        "short": [row for row in every if row[0] in ("", *SHORT)],
        "flags": [(title, text) for title, text in flags.items() if text and gain(report) > 0],
        "facts": facts(report),
    }


def _faster(entries: dict[str, Any]) -> Iterator[str]:
    """Yield the recomputation and the layout with which the same GPUs are faster, if by `WORTH`."""
    found = [(each, each["flags"] or "nothing recomputed") for each in (entries["recompute"],) if each]
    found += [(each, each["flags"]) for each in entries["layouts"][:1]]
    for each, flags in found:
        if each["gain"] >= WORTH:
            there = f"; Megatron there is {each['megatron']:.2f} times as fast" if each.get("megatron") else ""
            yield (
                f"With {flags} on the same GPUs, --wlb is predicted to be {each['gain']:.2f} times as fast as here, "
                f"with {each['gib']:.0f} GiB a GPU. Over {TITLES['thd']} here it is {each['speedup']:.2f} times{there}."
            )


def _job(report: Report) -> str:
    job, data = report.setup.job, report.entries["data"]
    parallel, quantiles = job.parallel, data["length_quantiles"]
    model = report.entries["model"] or f"{job.model.num_layers} layers of {job.model.hidden_size}"
    vpp = f" x VPP {parallel.vpp}" if parallel.vpp > 1 else ""
    return (
        f"{model}, window {job.context_length:,}, {parallel.num_gpus:,} GPUs: TP {parallel.tp} x CP {parallel.cp} x PP "
        f"{parallel.pp}{vpp} x DP {parallel.dp}, {job.num_micro_batches:,} micro-batches a step. "
        f"{data['documents']:,} documents, {data['tokens']:,} tokens: median {quantiles['p50']:,}, p99 "
        f"{quantiles['p99']:,}, longest {quantiles['max']:,}."
    )


def show(words: dict[str, Any], console: Any, *, verdict_only: bool) -> None:
    """Print a report `in_words`, or its first sentence."""
    from rich.text import Text

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    say(words["first" if verdict_only else "headline"], "bold")
    if verdict_only:
        return
    for warning in words["warnings"]:
        say(f"! {warning}")
    for sentence in words["faster"]:
        say(sentence, "bold")
    say(words["job"])
    console.print(common.table(words["rows"][0], words["rows"][1:], bold=(SPEEDUP,)))
    for fact in words["facts"][:MOST_FACTS]:
        say(f"- {fact}")
    if more := len(words["facts"][MOST_FACTS:]):
        say(f"- {more} more in what --html and --json write.")
    for title, flags in words["flags"]:
        say(f"{title}:\n  {flags}")
