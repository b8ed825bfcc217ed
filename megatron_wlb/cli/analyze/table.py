"""The report in words: rows and sentences for both the terminal and the page."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from megatron_wlb.cli import common
from megatron_wlb.cli.analyze.report import Report
from megatron_wlb.cli.common import render
from megatron_wlb.simulate.memory import H100_BYTES
from megatron_wlb.simulate.step import SHARES

TITLES = {"plain": "Megatron", "thd": "apart", "paper": "paper", "ours": "--wlb"}
"""Names of the schemes."""
OVER = {
    "plain": "Megatron's attention across documents, which is another attention",
    "thd": "Megatron with documents apart, each of them divided over context-parallel ranks",
}
"""What a speed-up is over."""
WIDE = 0.05
"""Range of a speed-up, over itself, from which on it is shown."""
SPEEDUP = "speed-up per token"

Row = tuple[str, ...]
"""A title, its value for every scheme, and its value at the limit."""


def rows(report: Report) -> list[Row]:
    """Return the column titles, then a row per number."""
    schemes, limit = list(report.entries["schemes"].values()), report.entries["limit"]
    ours = report.entries["schemes"]["ours"]
    parallel = report.setup.job.parallel
    pp, dp, cp, gpus = parallel.pp, parallel.dp, parallel.cp, parallel.num_gpus

    def row(title: str, show: Callable[[dict[str, Any]], str], of_limit: str = "") -> Row:
        return title, *map(show, schemes), of_limit

    def imbalance(title: str, name: str, of_limit: str = "1.000") -> Row:
        return row(title, lambda n: f"{n['imbalance'][name]:.3f}", of_limit)

    def part(title: str, *names: str) -> Row:
        return row(title, lambda n: f"{percent(n, *names) + 0:.1f}")  # never -0.0

    finer = {
        "exchange": [part("  for the slowest CP rank", "cp_wait")],
        "waiting": [part("  for the slowest EP rank", "ep_wait")] if parallel.expert_dp_ranks > 1 else [],
    }
    has = {"bubble": pp > 1, "exchange": cp > 1, "waiting": pp * dp > 1}
    words = [
        [part(f"{word}, % of a step", *parts), *finer.get(word, [])]
        for word, parts in SHARES.items()
        if has.get(word, True)
    ]

    def of_limit(numbers: dict[str, Any]) -> str:
        return f"{100 * min(1, numbers['of_limit']):.0f} %" if numbers is not ours or _is_fastest(report) else ""

    def speed(numbers: dict[str, float]) -> str:
        return f"{1e6 / numbers['us_per_token'] / gpus:,.0f}"

    levels = (("pp", "micro-batches", pp), ("dp", "DP ranks", dp), ("cp", "CP ranks", cp))
    return [
        ("", *(TITLES[name] for name in report.entries["schemes"]), "limit"),
        row(SPEEDUP, lambda n: f"{n['speedup']:.3f}", f"{limit['speedup']:.3f}"),
        row("  standard error", lambda n: f"{n['speedup_error']:.3f}" if n["speedup_error"] else ""),
        row("  of the limit", of_limit, "100 %"),
        row("micro-batches a step", lambda n: f"{n['num_micro_batches']:,}"),
        row("time per million tokens, s", lambda n: f"{n['us_per_token']:.3f}", f"{limit['us_per_token']:.3f}"),
        row("tokens a second and GPU", speed, speed(limit)),
        *(imbalance(f"{title}: slowest / mean", name) for name, title, size in levels if size > 1),
        imbalance("work: largest / mean", "work_mean"),
        imbalance("  p95 over steps", "work_p95", ""),
        *chain(*words),
        row("delay of a token, steps", lambda n: f"{n['late_steps']:.2f}"),
        row("  of the latest", lambda n: str(n["max_delay_steps"])),
        row("tokens per step, CV", lambda n: f"{n['token_cv']:.3f}"),
        row("S_max, tokens", lambda n: f"{n['longest_micro_batch_tokens']:,}"),
        row("  activations, GiB a GPU", lambda n: f"{n['activation_gib']:.1f}"),
    ]


def percent(numbers: dict[str, Any], *parts: str) -> float:
    """Return the percentage that parts of a `Breakdown` take, to one digit."""
    typical = numbers["typical_step_ms"]
    share: float = round(100 * sum(typical[part] for part in parts) / typical["step"], 1)
    return share


def gain(report: Report) -> float:
    """Return --wlb's gain as a share of the speed; 0 if not certain."""
    ours = report.entries["schemes"]["ours"]
    brings: float = ours["speedup"] - 1
    return brings if abs(brings) > max(0.005, 2 * ours["speedup_error"]) else 0.0


def _is_fastest(report: Report) -> bool:
    """Whether no run of Megatron is faster by the clock, whose limit is another. Else a share of the limit misleads."""
    schemes = report.entries["schemes"]
    return all(schemes[name]["us_per_token"] >= schemes["ours"]["us_per_token"] for name in OVER)


def headline(report: Report) -> tuple[str, str]:
    """Return the sentence to read first, and the rest in a few sentences."""
    entries, schemes, gained = report.entries, report.entries["schemes"], gain(report)
    left_out = ", ".join(entries["left_out"])
    predicted = f"An estimate without {left_out}" if left_out else "Predicted"
    ours, plain = schemes["ours"], schemes[entries["reference"]]
    lost = " ".join(f"{flag} out: {-100 * share:+.0f} %." for flag, share in entries["lost"].items())
    if gained < 0:
        return f"{predicted}: --wlb would lose, {ours['speedup']:.2f} times as many tokens a second.", lost
    if gained == 0:
        return f"{predicted}: nothing to gain with these flags.", lost
    of_limit, before = (f"{100 * min(1, each['of_limit']):.0f} %" for each in (ours, plain))
    shares = f"; {of_limit} of the limit instead of {before}" if _is_fastest(report) else ""
    rest = f"What --wlb refuses counts in that: {lost} " if lost else ""
    other = next(name for name in OVER if name != entries["reference"])
    over = schemes[other]["us_per_token"] / ours["us_per_token"]
    rest += f"Over {OVER[other]}: {over:.2f} times{_range(entries['readings'], other, over)}."
    first = f"{ours['speedup']:.2f} times{_range(entries['readings'], entries['reference'], ours['speedup'])}"
    return f"{predicted}: {first} as many tokens a second as {OVER[entries['reference']]}{shares}.", rest.strip()


def _range(readings: list[dict[str, Any]], scheme: str, speedup: float) -> str:
    """Return " (LEAST to MOST)" of a speed-up under all assumptions; "" if they are close."""
    found = [speedup, *(reading[scheme] for reading in readings)]
    least, most = min(found), max(found)
    return f" ({least:.2f} to {most:.2f})" if most - least > WIDE * speedup else ""


def _to_paste(report: Report) -> list[tuple[str, str]]:
    pairs = [("Add to the command", report.entries["flags"]), ("Take out", " ".join(report.entries["refused"]))]
    return [(title, flags) for title, flags in pairs if flags and gain(report) > 0]


def _facts(report: Report) -> list[str]:
    entries, job, schemes = report.entries, report.setup.job, report.entries["schemes"]
    text = render(
        "facts.txt",
        **entries,
        errors=_errors_of(entries["profile"].get("error")),
        parallel=job.parallel,
        crossover=job.crossover_tokens,
        ep_wait=[f"{percent(schemes[name], 'ep_wait'):.1f} %" for name in (entries["reference"], "ours")],
        device_gib=H100_BYTES >> 30,
        over_device=any(numbers["activation_gib"] > H100_BYTES / 2**30 for numbers in schemes.values()),
        negative=any(percent(numbers, *SHARES["waiting"]) < 0 for numbers in schemes.values()),
        nothing_to_add=gain(report) <= 0,
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
    "linear layers": ("linear", "vocabulary"),
    "tensor parallelism": ("tensor",),
    "exchange of K and V": ("exchange", "cp_wait"),
    "waiting in the pipeline": ("bubble", "imbalance"),
    "waiting for other ranks": ("dp_wait", "ep_wait"),
    "gradients and optimizer": ("gradients", "optimizer", "parameters"),
}
"""Short names for where the time goes, and the fields of `Breakdown` that each sums."""


def parts(report: Report, scheme: str) -> dict[str, float]:
    """Return seconds per million tokens by `PARTS`, as in a typical step."""
    numbers = report.entries["schemes"][scheme]
    typical = numbers["typical_step_ms"]
    shares = {title: max(0.0, sum(typical[name] for name in names)) for title, names in PARTS.items()}
    return {title: numbers["us_per_token"] * share / sum(shares.values()) for title, share in shares.items()}


class InWords(NamedTuple):
    """A report as terminal and page show it."""

    first: str
    rest: str
    job: str
    source: str
    rows: list[Row]
    flags: list[tuple[str, str]]
    """Titles, and the flags below them."""
    facts: list[str]


def in_words(report: Report) -> InWords:
    """Return the report in words."""
    return InWords(*headline(report), _job(report), _source(report), rows(report), _to_paste(report), _facts(report))


def _source(report: Report) -> str:
    entries = report.entries
    run = entries["launch"] if report.setup.run.launched.is_log else "flags and command as given"
    data = ", ".join(entries["data"]["prefixes"])
    return f"{run}; data: {data}; {entries['date']}, megatron_wlb {entries['release']}"


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


def show(report: Report, console: Any) -> None:
    """Print the report."""
    from rich.text import Text

    words, say = in_words(report), partial(console.print, soft_wrap=True)
    say(Text(f"{words.first} {words.rest}".strip(), style="bold"))
    say(Text(words.job))
    console.print(common.table(words.rows[0], words.rows[1:], bold=(SPEEDUP,)))
    for fact in words.facts:
        say(Text(f"- {fact}"))
    for title, flags in words.flags:
        say(Text(f"{title}:\n  {flags}"))
