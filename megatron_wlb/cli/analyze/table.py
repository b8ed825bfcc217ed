"""The report in words: rows and sentences that the terminal and the page share."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_wlb.cli.analyze.report import WARM_UP, Report, Result, errors_of

DEVICE_GIB = 80

Row = tuple[str, list[str]]


def rows(report: Report) -> tuple[list[str], list[Row]]:
    """Titles of the columns (schemes, and the limit), and what is shown of each."""
    numbers = [result.numbers for result in report.results]

    def row(title: str, show: Callable[[dict[str, Any]], str], of_limit: str = "") -> Row:
        return title, [*map(show, numbers), of_limit]

    titles = [*(result.scheme.title for result in report.results), "limit"]
    return titles, [
        *_speed(report, row),
        *_balance(report, row),
        row("delay of a token, steps", lambda n: f"{n['late_steps']:.2f}"),
        row("  of the latest", lambda n: str(n["max_delay_steps"])),
        row("tokens per step, CV", lambda n: f"{n['token_cv']:.3f}"),
        row("S_max, tokens", lambda n: f"{n['longest_micro_batch_tokens']:,}"),
        row("  activations, GiB a GPU", lambda n: f"{n['activation_gib']:.1f}"),
    ]


def _speed(report: Report, row: Callable[..., Row]) -> list[Row]:
    limit, gpus = report.entries["limit"], report.setup.job.num_gpus
    attainable = report.results[-1].numbers["of_attainable"]
    return [
        row("speed-up per token", lambda n: f"{n['speedup']:.3f}", f"{limit['speedup']:.3f}"),
        row("  standard error", lambda n: f"{n['speedup_error']:.3f}" if n["speedup_error"] else ""),
        row("  of the attainable gain", _share, "100 %" if attainable is not None else "none"),
        row("step, ms", lambda n: f"{n['step_ms']:.1f}"),
        row(
            "tokens a second and GPU",
            lambda n: f"{1e6 / n['us_per_token'] / gpus:,.0f}",
            f"{1e6 / limit['us_per_token'] / gpus:,.0f}",
        ),
    ]


def _balance(report: Report, row: Callable[..., Row]) -> list[Row]:
    job = report.setup.job
    levels = (("pp", "micro-batches", job.pp), ("dp", "DP ranks", job.dp), ("cp", "CP ranks", job.cp))
    losses = (
        ("exchange of K and V", ("exchange",), job.cp),
        ("waiting for CP ranks", ("cp_wait",), job.cp),
        ("uneven pipelines", ("imbalance", "dp_wait"), job.pp * job.dp),
    )
    return [
        *(row(f"{title}: slowest / mean", _imbalance(name), "1.000") for name, title, size in levels if size > 1),
        row("work by length: largest / mean", _imbalance("work_mean"), "1.000"),
        row("  p95 over steps", _imbalance("work_p95")),
        *(row(f"typical step: {title}, %", _part(parts)) for title, parts, size in losses if size > 1),
    ]


def _imbalance(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda numbers: f"{numbers['imbalance'][name]:.3f}"


def _part(names: tuple[str, ...]) -> Callable[[dict[str, Any]], str]:
    def show(numbers: dict[str, Any]) -> str:
        typical = numbers["typical_step_ms"]
        return f"{100 * sum(typical[name] for name in names) / typical['step']:.1f}"

    return show


def _share(numbers: dict[str, Any]) -> str:
    if numbers["of_attainable"] is None:
        return "none"
    return f"{numbers['of_attainable']:.0%}".replace("%", " %") if numbers["packing"] != "original" else ""


def gains(report: Report) -> bool:
    ours = report.entries["schemes"]["ours"]
    return ours["of_attainable"] is not None and ours["speedup"] > 1


def headline(report: Report) -> str:
    ours, limit = report.entries["schemes"]["ours"], report.entries["limit"]["speedup"]
    said = "nothing to gain with these flags"
    if gains(report):
        said = f"{ours['of_attainable']:.0%} of what is attainable ({limit:.2f})".replace("%", " %")
    groups, gain = max(ours["over_head_groups"].items(), key=lambda item: item[1], default=("", 0.0))
    hint = (
        f" With --wlb-cp-head-groups {groups} instead of {report.setup.job.cp_head_groups} it would be "
        f"{gain * ours['speedup']:.2f} times: analyse again with this flag to see all of it."
    )
    text = f"Predicted: {ours['speedup']:.2f} times as many tokens a second, {said}."
    return text + hint * (gain > 1.02)


def to_paste(report: Report) -> list[tuple[str, str]]:
    """Titles, and the flags below them; nothing where there is nothing to gain."""
    pairs = [("Add to the launch line", report.entries["flags"]), ("Take out", " ".join(report.entries["refused"]))]
    return [(title, flags) for title, flags in pairs if flags and gains(report)]


def facts(report: Report) -> list[str]:
    """What the numbers go by, a sentence each."""
    entries, setup, job = report.entries, report.setup, report.setup.job
    profile, steps, ignored = entries["profile"], entries["steps"], " ".join(entries["ignored"])
    errors = errors_of(profile)
    stated = "; ".join(errors) if errors else "the profile states none"
    measured = "measured" if profile["linear_measured"] else "assumed"
    backward = "" if profile["backward_measured"] else "; backward of attention is assumed to take 2.5 times forward"
    groups = f"in {job.cp_head_groups} head groups of which one computes while the next travels"
    exchange = (
        "Megatron exchanges K and V in a ring; the paper's scheme gathers all of them before it computes, --wlb those "
        f"of documents that CP ranks share, {groups if job.cp_head_groups > 1 else 'at once'}. "
    )
    return [
        f"This is a prediction by simulation. Attention: profile {profile['name']}"
        + (f" ({profile['device']})" if "device" in profile else "")
        + f". Its errors on what it was not fitted to: {stated}{backward}.",
        f"Other layers go by {measured} rates, the network by profile {profile['network']['name']} (within a node: "
        f"{profile['network']['error']}; between nodes assumed). The time of a whole step has not been compared "
        "with a GPU's; megatron-wlb compare does that with the log of a run.",
        f"{steps['simulated']} steps of each scheme were simulated and {steps['packed']} packed, after {WARM_UP} that "
        "fill queues. Time per token is that of the simulated steps' work, at the work per token of all packed ones.",
        exchange
        * (job.cp > 1)
        + "In all columns attention stays inside of documents, and sequence parallelism is on. All "
        "numbers are those of bf16: FP8 is not modelled.",
        "Activations are the peak if every micro-batch in flight had S_max tokens; weights and optimizer come on top."
        + f" They alone are more than the {DEVICE_GIB} GiB of an H100." * any(map(_over_device, report.results)),
        f"The limit has the micro-batches and CP shards of --wlb all alike. Pipelines can come below it where light "
        f"micro-batches run at the ends. The work of a document of d tokens is d x {setup.crossover_tokens:,} + d x d.",
        *entries["notes"],
        *([] if gains(report) else [f"Nothing is to be added to the launch line. Simulated was {entries['flags']}."]),
        *([f"Ignored, since nothing here depends on them: {ignored}."] if ignored else []),
    ]


def _over_device(result: Result) -> bool:
    return bool(result.numbers["activation_gib"] > DEVICE_GIB)


def described(report: Report) -> str:
    """The job in a line."""
    entries = report.entries
    job, data = entries["job"], entries["data"]
    quantiles = data["length_quantiles"]
    model = job["model"]["name"] or f"{job['model']['num_layers']} layers of {job['model']['hidden_size']}"
    vpp = f" x VPP {job['vpp']}" if job["vpp"] > 1 else ""
    return (
        f"{model}, window {job['seq_length']:,}, {job['num_gpus']:,} GPUs: TP {job['tp']} x CP {job['cp']} x PP "
        f"{job['pp']}{vpp} x DP {job['dp']}, {job['global_batch_size']:,} micro-batches a step. "
        f"{data['documents']:,} documents, {data['tokens']:,} tokens: median {quantiles['p50']:,}, p99 "
        f"{quantiles['p99']:,}, longest {quantiles['max']:,}."
    )


def show(report: Report, console: Any) -> None:
    """Print everything."""
    from rich.markup import escape
    from rich.table import Table

    say = partial(console.print, soft_wrap=True)
    titles, body = rows(report)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for title, cells in body:
        table.add_row(title, *cells, style="bold" if title == "speed-up per token" else "")
    say(escape(described(report)))
    console.print(table)
    say(f"[bold]{escape(headline(report))}[/bold]")
    for fact in facts(report):
        say(escape(f"- {fact}"))
    for title, flags in to_paste(report):
        say(f"{title}:")
        say(f"  {escape(flags)}")
