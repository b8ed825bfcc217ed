"""The report in words: rows and sentences for both the terminal and the page."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from megatron_wlb.cli import common
from megatron_wlb.cli.analyze.report import Report
from megatron_wlb.cli.analyze.setup import WARM_UP
from megatron_wlb.simulate import SHARES
from megatron_wlb.simulate.memory import H100_BYTES

TITLES = {"plain": "Megatron", "thd": "THD", "paper": "paper", "ours": "--wlb"}
"""Names of the schemes."""
SPEEDUP = "speed-up per token"

Row = tuple[str, ...]
"""A title, its value for every scheme, and its value at the limit."""


def rows(report: Report) -> list[Row]:
    """Return the column titles, then a row per number with its values for the schemes and the limit."""
    schemes, limit = list(report.entries["schemes"].values()), report.entries["limit"]
    parallel = report.setup.job.parallel
    pp, dp, cp, gpus = parallel.pp, parallel.dp, parallel.cp, parallel.num_gpus

    def row(title: str, show: Callable[[dict[str, Any]], str], of_limit: str = "") -> Row:
        return title, *map(show, schemes), of_limit

    def imbalance(title: str, name: str, of_limit: str = "1.000") -> Row:
        return row(title, lambda n: f"{n['imbalance'][name]:.3f}", of_limit)

    def part(title: str, *names: str) -> Row:
        def percent(numbers: dict[str, Any]) -> str:
            typical = numbers["typical_step_ms"]
            share = round(100 * sum(typical[name] for name in names) / typical["step"], 1)
            return f"{share + 0:.1f}"  # never -0.0

        return row(title, percent)

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

    def speed(numbers: dict[str, float]) -> str:
        return f"{1e6 / numbers['us_per_token'] / gpus:,.0f}"

    levels = (("pp", "micro-batches", pp), ("dp", "DP ranks", dp), ("cp", "CP ranks", cp))
    return [
        ("", *(TITLES[name] for name in report.entries["schemes"]), "limit"),
        row(SPEEDUP, lambda n: f"{n['speedup']:.3f}", f"{limit['speedup']:.3f}"),
        row("  standard error", lambda n: f"{n['speedup_error']:.3f}" if n["speedup_error"] else ""),
        row("  of the limit", lambda n: f"{100 * min(1, n['of_limit']):.0f} %", "100 %"),
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


def gain(report: Report) -> float:
    """Return --wlb's gain as a share of the speed without; below 0 for a loss, 0 if not certain."""
    ours = report.entries["schemes"]["ours"]
    brings: float = ours["speedup"] - 1
    return brings if abs(brings) > max(0.005, 2 * ours["speedup_error"]) else 0.0


def headline(report: Report) -> tuple[str, str]:
    """Return the sentence to read first, and the rest of the report in a few sentences."""
    entries, schemes = report.entries, report.entries["schemes"]
    without = f" without {', '.join(entries['left_out'])}" if entries["left_out"] else ""
    predicted = f"An estimate{without}" if without else "Predicted"
    ours, plain = schemes["ours"], schemes[entries["reference"]]
    lost = "".join(f" {flag} out: {-100 * share:+.0f} %." for flag, share in entries["lost"].items())
    if gain(report) < 0:
        return f"{predicted}: --wlb would lose, {ours['speedup']:.2f} times as many tokens a second.", lost.strip()
    if gain(report) == 0:
        return f"{predicted}: nothing to gain with these flags.", lost.strip()
    shares = f"{100 * min(1, ours['of_limit']):.0f} % of the limit instead of {100 * min(1, plain['of_limit']):.0f} %"
    text = f"What --wlb refuses counts in that:{lost}" if lost else ""
    if "thd" in schemes and entries["reference"] != "thd":
        over = schemes["thd"]["us_per_token"] / ours["us_per_token"]
        text += f" Over Megatron on packed sequences (THD), which shards every document: {over:.2f} times."
    return f"{predicted}: {ours['speedup']:.2f} times as many tokens a second, {shares}.", text.strip()


def to_paste(report: Report) -> list[tuple[str, str]]:
    """Return titles and the flags below them; [] if there is nothing to gain."""
    pairs = [("Add to the command", report.entries["flags"]), ("Take out", " ".join(report.entries["refused"]))]
    return [(title, flags) for title, flags in pairs if flags and gain(report) > 0]


def facts(report: Report) -> list[str]:
    """Return the assumptions behind the numbers, a sentence each."""
    entries, job = report.entries, report.setup.job
    profile, steps, ignored = entries["profile"], entries["steps"], " ".join(entries["ignored"])
    stated = "; ".join(errors_of(profile)) or "the profile states none"
    device = f" ({profile['device']})" if "device" in profile else ""
    measured = "measured" if profile["linear_measured"] else "assumed"
    backward = "" if profile["backward_measured"] else "; backward of attention is assumed to take 2.5 times forward"
    exchange = (
        "Megatron exchanges K and V in a ring, and shards sequences, or, packed (THD), every document; the paper's "
        "scheme gathers all of them before it computes, --wlb moves those that a rank needs, in stages of which one "
        "computes while the next travels. "
    )
    waits = [numbers["typical_step_ms"] for numbers in map(entries["schemes"].get, (entries["reference"], "ours"))]
    plain, ours = (f"{100 * typical['ep_wait'] / typical['step']:.1f} %" for typical in waits)
    experts = (
        f"{job.parallel.expert_dp_ranks} data-parallel ranks divide experts and wait for each other in every layer: "
        f"{plain} of a typical step of Megatron, {ours} of --wlb."
    )
    network = profile["network"]
    over_device = any(numbers["activation_gib"] > H100_BYTES / 2**30 for numbers in entries["schemes"].values())
    return [
        f"This is a prediction by simulation. Attention: profile {profile['name']}{device}. Its errors on what it was "
        f"not fitted to: {stated}{backward}.",
        f"Other layers go by {measured} rates, the network by profile {network['name']} (within a node: "
        f"{network.get('error', 'errors not stated')}; between nodes assumed). The time of a whole step has not been "
        "compared with a GPU's; megatron-wlb compare does that with the log of a run.",
        f"{steps['simulated']} steps of each scheme were simulated and {steps['packed']} packed, after {WARM_UP} that "
        "fill queues. Time per token is that of the simulated steps' work, at the work per token of all packed ones.",
        *([experts] if job.parallel.expert_dp_ranks > 1 else []),
        _thresholds(entries["schemes"]["paper"]),
        exchange * (job.parallel.cp > 1) + "In all columns attention stays inside of documents, and sequence "
        "parallelism is on. All numbers are those of bf16: FP8 is not modelled.",
        "Activations are the peak if every micro-batch in flight had S_max tokens, as far as a rank can hold so many; "
        "weights and optimizer come on top, and what is held for weight gradients that were put off, as far as an "
        f"H100 has room ({H100_BYTES >> 30} GiB)." + " Activations alone are more than that." * over_device,
        "The limit has the same work spread evenly over all GPUs, and nobody ever waits: no bubble, no exchange. The "
        f"work of a document of d tokens is d x {job.crossover_tokens:,} + d x d.",
        *([_BELOW] if entries["limit"]["speedup"] < 1 else []),
        *([_NEGATIVE] if any(_waiting(each) < 0 for each in entries["schemes"].values()) else []),
        *([_OVERLAP] if "--tp-comm-overlap" in entries["lost"] else []),
        *([_of_counts(entries["micro_batches"])] if entries["micro_batches"] else []),
        *map(_of_other_flag, entries["other_flags"]),
        *_of_layouts(report),
        *entries["notes"],
        *([] if gain(report) > 0 else [f"Nothing is to be added to the command. Simulated was {entries['flags']}."]),
        *([f"Ignored, since nothing here depends on them: {ignored}."] if ignored else []),
    ]


_BELOW = "The limit is below 1: whole documents have more work a token than those that Megatron cuts where windows end."
_NEGATIVE = "Waiting is below 0 where uneven micro-batches, in a good order, are done sooner than even ones would be."
_OVERLAP = (
    "--tp-comm-overlap is taken to hide all tensor-parallel communication of Megatron, which is more than it does; "
    "--wlb runs without."
)


def _waiting(numbers: dict[str, Any]) -> float:
    """Return the waiting share of a typical step in per mille, rounded as it is shown."""
    typical = numbers["typical_step_ms"]
    return round(1000 * sum(typical[name] for name in SHARES["waiting"]) / typical["step"])


def _of_other_flag(other: dict[str, Any]) -> str:
    speedup = f"{other['speedup']:.2f} ± {other['speedup_error']:.2f} times"
    said = f"{other['flag']} would be faster: {speedup} as many tokens a second."
    if not other["flag"].startswith("--wlb"):
        said += " It takes the place of all flags of virtual stages and their layers, and Megatron would gain, too."
    return said


def _thresholds(paper: dict[str, Any]) -> str:
    """Return how Algorithm 1 was tuned."""
    thresholds = ",".join(map(str, paper["outlier_thresholds"]))
    return (
        f"The paper's Algorithm 1 runs with the best thresholds of a small grid: --wlb-outlier-thresholds {thresholds}."
    )


def _of_layouts(report: Report) -> list[str]:
    """Return the layouts that are faster, with their sizes and memory."""
    found = report.entries["layouts"]
    if not found:
        return []
    each = (
        f"CP {n['cp']} x PP {n['pp']}{_chunks(n['vpp'])} x DP {n['dp']} with {n['num_micro_batches']:,} micro-batches "
        f"of up to {n['max_tokens']:,} tokens: {n['speedup']:.2f} ± {n['speedup_error']:.2f} times, "
        f"{n['late_steps']:.2f} steps late, {n['gib']:.0f} GiB a GPU"
        for n in found
    )
    return [
        f"Faster on the same GPUs, with TP {found[0]['tp']} and adaptive packing: {'; '.join(each)}. Memory is "
        "activations, weights and a distributed optimizer."
    ]


def _chunks(vpp: int) -> str:
    return f" of {vpp} virtual stages" if vpp > 1 else ""


def _of_counts(counts: list[dict[str, Any]]) -> str:
    tried = (
        f"{each['micro_batches']:,} {100 * each['time']:.0f} % ({each['late_steps']:.2f} steps late)" for each in counts
    )
    return (
        f"Time of a step by its number of micro-batches, with adaptive packing, of few steps: {', '.join(tried)}; "
        "100 % is with one for every window."
    )


def errors_of(profile: dict[str, Any]) -> list[str]:
    """Return the errors that a profile states for held-out data, one sentence each."""

    def walk(what: str, entry: Any) -> Iterator[str]:
        if not isinstance(entry, dict):
            return
        for kind in ("held_out", "error"):
            if f"{kind}_median" in entry:
                yield f"{what}: median {entry[f'{kind}_median']:.1%}, p90 {entry[f'{kind}_p90']:.1%}"
        for key, value in entry.items():
            yield from walk(f"{what}, {key}" if what else key, value)

    return list(walk("", profile.get("error", {})))


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
    """Return seconds per million tokens by `PARTS`, in the proportions of a typical step."""
    numbers = report.entries["schemes"][scheme]
    typical = numbers["typical_step_ms"]
    shares = {title: max(0.0, sum(typical[name] for name in names)) for title, names in PARTS.items()}
    return {title: numbers["us_per_token"] * share / sum(shares.values()) for title, share in shares.items()}


def source(report: Report) -> str:
    """Return the source of the report, its date, and its release."""
    entries = report.entries
    run = entries["launch"] if report.setup.run.launched.is_log else "flags and command as given"
    data = ", ".join(entries["data"]["prefixes"])
    return f"{run}; data: {data}; {entries['date']}, megatron_wlb {entries['release']}"


def job_line(report: Report) -> str:
    """Return the job in one line."""
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

    say = partial(console.print, soft_wrap=True)
    say(Text(" ".join(headline(report)).strip(), style="bold"))
    say(Text(job_line(report)))
    titles, *cells = rows(report)
    console.print(common.table(titles, cells, bold=(SPEEDUP,)))
    for fact in facts(report):
        say(Text(f"- {fact}"))
    for title, flags in to_paste(report):
        say(Text(f"{title}:\n  {flags}"))
