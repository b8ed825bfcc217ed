"""`megatron-wlb compare`: compare the speed and the losses of two runs, or of a run and its predictions.

    megatron-wlb compare base.log wlb.log
    megatron-wlb compare tensorboard-base/ run.jsonl
    megatron-wlb compare run.jsonl

BASE and RUN are what Megatron printed, the file that --wlb-log named, or a folder of TensorBoard with
--log-timers-to-tensorboard. Steps that both have are compared by their number, without the first ones of every start.
The ratio is of tokens a second and GPU. Its error is one standard error over up to 20 blocks of consecutive steps: of
the ratio of means, linearised. It covers the noise of both runs, not another day or other nodes. A log of --wlb-log
alone is compared with what the run itself predicted. Skipped steps take time and train no tokens. Runs that differ in
more than --wlb are named; of other models, data or seeds no losses are compared. Logs without Megatron's arguments,
such as Megatron-Bridge's, need --num-gpus and --seq-length.
"""

import argparse
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from megatron_wlb import files
from megatron_wlb.cli import common, judge, launch
from megatron_wlb.cli.common import integer, write_json, writer
from megatron_wlb.cli.profile import relative_error
from megatron_wlb.describe.arguments import MegatronArguments, flag_of, short
from megatron_wlb.hardware.profile import alike
from megatron_wlb.simulate.step import TIME_SHARES

FORMAT = "megatron-wlb-comparison"
VERSION = 5
USAGE = "[BASE] RUN [--skip K] [--json FILE] [--num-gpus N --seq-length C]"
MOST_OF_A_STEP = 1 << 26
"""Most bytes of a step in a log."""
BLOCKS = 20
"""Most blocks of consecutive steps; neighbours are alike, so single steps would understate the error."""
SAME_LOSS = 1e-3
"""Relative difference up to which losses are of one step: bf16 rounds otherwise in other micro-batches."""
_REMEDY = "give what Megatron printed, the file that --wlb-log named, or a folder of TensorBoard"
_ITERATION = re.compile(r"(?m)(?:^|[\s:])iteration +([0-9]+)/ *[0-9]+ \|(.*)")
_SKIPPED = ("number of skipped iterations", "number of nan iterations")
OTHER = set(
    """seq_length global_batch_size seed split data_path train_data_path data_args_path per_split_data_args_path
    mock_data tokenizer_model tokenizer_type vocab_size padded_vocab_size num_layers hidden_size ffn_hidden_size
    num_attention_heads num_query_groups kv_channels num_experts moe_ffn_hidden_size moe_router_topk mtp_num_layers
    hybrid_layer_pattern multi_latent_attention kv_lora_rank q_lora_rank window_size""".split()
)
"""Arguments with which a step trains another model, or other data: its losses do not compare."""
_BESIDE = re.compile(
    "_|wlb|log|save|load|no_|tensorboard|wandb|mlflow|one_logger|exit_|timing_|app_tag|ckpt|async_|dist_ckpt|auto_detect|"
    "eval|rank|local_rank|data_cache_path|distributed_timeout|straggler|profile|record_memory|config_logger|rerun|"
    "error_injection|fault|inprocess|adlr|world_size|data_parallel_size|consumed|iteration|start_|wgrad_deferral"
)
"""Beginnings of arguments that change neither time nor losses, are in the table, or are --wlb's own."""
MOST_DIFFERENCES = 8
"""Most arguments that are named."""
_TIME, _SAMPLES, _LOSS = "elapsed time per iteration (ms)", "global batch size", "lm loss"


class Log(NamedTuple):
    """The steps of a run."""

    name: str
    gpus: int
    steps: np.ndarray
    """Float64 [n, 6]: number of the last step, how many steps, their seconds, tokens, sum of losses (nan), and how many
    trained, which skipped ones do not."""
    padded: bool = False
    """Its tokens are of whole windows, whatever they hold."""
    whole: bool = True
    """Its times are of iterations, not from the forward pass on."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """By Megatron's names, as far as the log has them."""
    diverged: str = ""
    """Where its losses are not finite."""
    remarks: tuple[str, ...] = ()
    """What of it is left out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="[BASE] RUN", help="logs of one or two runs")
    parser.add_argument(
        "--skip",
        type=integer(2, 1 << 20),
        default=10,
        metavar="K",
        help="leave out the first K steps of every start, which warm up; at least 2, default: 10",
    )
    sizes = {"--num-gpus": "GPUs", "--seq-length": "tokens of a window"}
    for flag, what in sizes.items():
        parser.add_argument(flag, type=integer(1, 1 << 26), help=f"{what} of a log without Megatron's arguments")
    parser.add_argument("--json", metavar="FILE", help="the numbers, and both runs' steps; - for standard output")


def run(args: argparse.Namespace) -> None:
    if len(args.logs) > 2:
        raise ValueError(f"{len(args.logs)} logs; give BASE and RUN, or RUN alone")
    console = common.console(args.json, width=120, markup=False)
    if len(args.logs) == 1:
        rows, said, numbers = predicted(args.logs[0], args.skip)
    else:
        rows, said, numbers = compared(*(read(name, args.skip, args.num_gpus, args.seq_length) for name in args.logs))
    said.append(f"Left out: the first {args.skip} steps of every start (--skip), or of a folder of TensorBoard.")
    said = [*map(files.printable, said)]
    with writer(args.json, "--json") as out:
        write_json(out, {"format": FORMAT, "version": VERSION, "words": said} | numbers)
    console.print(said[0], style="bold", soft_wrap=True)
    console.print(common.table(rows[0], rows[1:]))
    for sentence in said[1:]:
        console.print(f"- {sentence}", soft_wrap=True)


def compared(base: Log, ran: Log) -> tuple[list[tuple[str, ...]], list[str], dict[str, Any]]:
    """Return a table, sentences of which the first is the verdict, and the numbers. Raises ValueError."""
    if base.padded != ran.padded:
        padded, other = (base, ran) if base.padded else (ran, base)
        raise ValueError(
            f"{padded.name} does not say how many tokens its steps trained, as {other.name} does; give what Megatron "
            "printed of both, or --wlb-log of both"
        )
    both, of_step = (base, ran), []
    differ = differences(base.arguments, ran.arguments)
    others = [name for name in differ if name in OTHER]
    edges = np.intersect1d(_edges(base.steps), _edges(ran.steps))
    steps = [_between(log.steps, edges) for log in both]
    common_steps = (steps[0][:, 1] == np.diff(edges)) & (steps[1][:, 1] == np.diff(edges))
    steps = [each[common_steps] for each in steps]
    have_common = len(steps[0]) > 0
    paired = have_common and not others
    if not paired:
        steps = [log.steps for log in both]
    for log, each in zip(both, steps, strict=True):
        if len(each) < 2:
            raise ValueError(f"{log.name} has {len(each)} steps to compare; give longer logs, or a smaller --skip")
        of_step.append(each[:, 1:4].sum(axis=0))
        if not of_step[-1][2]:
            raise ValueError(
                f"{log.name} trained no token in {len(each)} steps: all were skipped; give a later part of it"
            )
    rates = [float(t / s / log.gpus) for log, (_, s, t) in zip(both, of_step, strict=True)]
    value = rates[1] / rates[0]
    error = value * _error(steps, paired)
    rows: list[tuple[str, ...]] = [
        ("", "BASE", "RUN"),
        ("tokens a second and GPU", *(f"{rate:,.1f}" for rate in rates)),
        ("time of a step, ms", *(f"{1e3 * s / n:,.1f}" for n, s, _ in of_step)),
        ("tokens of a step", *(f"{t / n:,.0f}" for n, _, t in of_step)),
        ("steps", *(f"{n:,.0f}" for n, _, _ in of_step)),
        ("GPUs", *(f"{log.gpus:,}" for log in both)),
    ]
    ratio = f"{value:.3f} \N{PLUS-MINUS SIGN} {error:.3f} times BASE's tokens a second and GPU"
    verdict = f"RUN is {'faster' if value > 1 else 'slower'}: {ratio}."
    if abs(value - 1) <= max(2 * error, 1e-9):
        verdict = f"No difference is certain: RUN has {ratio}."
    said = [
        f"{title}'s loss is not finite {log.diverged}." for title, log in (("BASE", base), ("RUN", ran)) if log.diverged
    ]
    said.append(verdict)
    numbers = dict[str, Any](ratio=value, error=error, paired=paired, differ=differ)
    if differ:
        shown = [f"{name} {short(a)} and {short(b)}" for name, (a, b) in list(differ.items())[:MOST_DIFFERENCES]]
        more = len(differ) - len(shown)
        said.append(f"The runs differ also in: {', '.join(shown)}{f', and {more} more (--json)' * (more > 0)}.")
    if paired:
        said.append(f"Both have {of_step[0][0]:,.0f} of these steps, up to {steps[0][-1, 0]:,.0f}: compared in pairs.")
        said.append(_losses(steps, numbers))
    elif have_common:
        said.append(
            f"Not compared in pairs, and no losses: steps train another model or data ({', '.join(others[:4])})."
        )
    else:
        said.append("They have no step in common: documents differ, and losses do not compare.")
    for title, log, each in zip(("BASE", "RUN"), both, steps, strict=True):
        alone = int(log.steps[:, 1].sum() - each[:, 1].sum())
        skipped = int((each[:, 1] - each[:, 5]).sum())
        remarks = [*log.remarks]
        remarks += [f"{skipped:,} of its steps were skipped: they took time and trained no token."] * (skipped > 0)
        remarks += [f"{alone:,} of its steps are left out: the other log does not have them."] * (alone > 0)
        said += [f"{title}: {each}" for each in remarks]
    if base.padded:
        said.append("Tokens are of whole windows: padding counts.")
    if base.whole != ran.whole:
        said.append("Only Megatron's times have what comes before the forward pass; give its log of both to be exact.")
    numbers["steps"] = [[[x if math.isfinite(x) else None for x in row] for row in each.tolist()] for each in steps]
    return rows, said, numbers


def _losses(steps: Sequence[np.ndarray], numbers: dict[str, Any]) -> str:
    """Return whether losses are those of the same training, and set what differs most."""
    with np.errstate(invalid="ignore", divide="ignore"):  # losses may be infinite, or 0, and of no step that trained
        a, b = (each[:, 4] / each[:, 5] for each in steps)
        off = np.where(a == b, 0, np.abs(b - a) / np.where(a == 0, np.abs(b), np.abs(a)))
    known = np.flatnonzero(np.isfinite(off))
    if not len(known):
        return "No step has a finite loss in both logs: losses are not compared."
    rest = len(off) - len(known)
    left = f" Not compared: {rest:,} that were skipped, or have no finite loss in both." if rest else ""
    most = known[off[known].argmax()]
    numbers["loss_difference"] = float(off[most])
    if off[most] <= SAME_LOSS:
        where = f"{len(known):,} of them" if rest else "each of them"
        return f"Losses are equal to {off[most]:.1e} at {where}.{left}"
    first = known[(off[known] > SAME_LOSS).argmax()]
    number = int(steps[0][first, 0])
    numbers["losses_part_at"] = number
    return (
        f"Losses part at step {number:,}: {a[first]:.6g} and {b[first]:.6g}, by {off[first]:.2%}; at most by "
        f"{off[most]:.2%}, at step {int(steps[0][most, 0]):,}.{left}"
    )


def differences(base: Mapping[str, Any], ran: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the arguments that both logs have with other values, those of another model or other data first.

    Those that --wlb sets are left out where it is on in one of the runs.
    """
    one_has_wlb = bool(base.get("wlb")) != bool(ran.get("wlb"))
    names = [name for name in base if name in ran and not _BESIDE.match(name)]
    names = [name for name in names if not (one_has_wlb and name in judge.ADDED)]
    # Upstream pads the vocabulary after it has printed its arguments.
    names = [name for name in names if name != "padded_vocab_size" or None not in (base[name], ran[name])]
    texts = {
        name: (_words(base[name]), _words(ran[name])) for name in sorted(names, key=lambda name: name not in OTHER)
    }
    return {name: (a, b) for name, (a, b) in texts.items() if a != b}


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _error(steps: Sequence[np.ndarray], paired: bool) -> float:
    """Return the standard error of the ratio of tokens a second, over that ratio.

    With seconds a and b and tokens A and B of a block, over their means, it is the standard error of the mean of
    (a - A) - (b - B); of runs without a common step those of a - A and b - B, added in squares.
    """
    off = []
    for each in steps:
        blocks = [block[:, 2:4].sum(axis=0) for block in np.array_split(each, min(len(each), BLOCKS))]
        seconds, tokens = (np.array(blocks) / np.mean(blocks, axis=0)).T
        off.append(seconds - tokens)
    every = [off[0] - off[1]] if paired else off
    return math.hypot(*(float(np.std(each, ddof=1)) / math.sqrt(len(each)) for each in every))


def _edges(steps: np.ndarray) -> np.ndarray:
    return np.union1d(steps[:, 0], steps[:, 0] - steps[:, 1])


def _between(steps: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sum the steps between edges that follow one another; float64 [edges - 1, 6]."""
    parts = np.split(steps, np.searchsorted(steps[:, 0], edges, side="right"))[1:-1]
    ends = edges[1:, None]
    return np.hstack((ends, np.array([part[:, 1:].sum(axis=0) for part in parts]).reshape(-1, 5)))


def read(name: str, skip: int, num_gpus: int | None = None, seq_length: int | None = None) -> Log:
    """Read a log of any kind, without the first `skip` steps of every start. Raises ValueError for others.

    `num_gpus` and `seq_length` are those of a log that has no arguments.
    """
    if os.path.isdir(name) or "tfevents" in os.path.basename(name):
        return _of_tensorboard(name, skip)
    with files.opened(name, _REMEDY) as file:
        first = file.read(1 << 16).lstrip(b"\0 \t\r\n")
    if first[:1] == b"{" and not re.match(rb'[^\n]*"(?:log|message)":', first):
        return _of_step_log(name, skip)
    return _of_text(name, skip, num_gpus, seq_length)


def _log(
    name: str,
    gpus: int,
    starts: Sequence[Sequence[tuple[float, ...]]],
    skip: int,
    remarks: Sequence[str] = (),
    **more: Any,
) -> Log:
    """Make a log of starts, each a list of rows of `Log.steps`; of steps that ran twice, the later counts."""
    warm: dict[float, tuple[float, ...]] = {}
    every: dict[float, tuple[float, ...]] = {}
    for start in starts:
        first = start[0][0] - start[0][1] + skip if start else 0
        every |= {row[0]: row for row in start}
        warm |= {row[0]: row for row in start if row[0] - row[1] >= first}
    rows = np.array([every[number] for number in sorted(every)]).reshape(-1, 6)
    wrong = (rows[:, 5] > 0) & ~np.isfinite(rows[:, 4])
    diverged = ""
    if wrong.any() and (not wrong.all() or np.isinf(rows[:, 4]).any() or more.pop("is_nan", False)):
        since = f"from step {rows[wrong.argmax(), 0]:,.0f} on" if wrong[wrong.argmax() :].all() else ""
        diverged = since or f"at {wrong.sum():,} of {len(rows):,} steps, first at step {rows[wrong.argmax(), 0]:,.0f}"
    more.pop("is_nan", None)
    remarks = [*remarks]
    if wrong.all() and not diverged:
        remarks.append("it has no loss at any step; Megatron prints none that is not a number.")
    if twice := sum(map(len, starts)) - len(every):
        remarks.append(f"{twice:,} of its steps ran twice; the later time counts.")
    steps = np.array([warm[number] for number in sorted(warm)]).reshape(-1, 6)
    return Log(name, gpus, steps, diverged=diverged, remarks=tuple(remarks), **more)


def _of_text(name: str, skip: int, num_gpus: int | None, seq_length: int | None) -> Log:
    """Read the lines of `training_log`, each the mean of up to `log_interval` steps since the one before.

    The second of a start holds its first step, too, and is left out as one of its first steps.
    """
    text = launch.text_of(name, "give its arguments and the lines of its iterations alone")
    stated: dict[str, Any] = {}
    if launch.END_OF_ARGUMENTS in text:
        for what in ("world_size", "seq_length", "log_interval", "sft"):
            if len(found := set(re.findall(rf"\s{what} \.+ (\S+)", text))) > 1:
                raise ValueError(
                    f"{name} is of runs with {what} {' and '.join(sorted(found))}; give each as a file of its own"
                )
        stated = launch.arguments_of(text, name).stated
        for what, given in (("world_size", num_gpus), ("seq_length", seq_length)):
            if given is not None and given != stated.get(what):
                raise ValueError(f"{name} has {what} {stated.get(what)}, not {given}; leave {flag_of(what)} out")
    elif num_gpus is None or seq_length is None:
        raise ValueError(
            f"{name} has no arguments as Megatron prints them, nor steps of --wlb-log; {_REMEDY}; or give --num-gpus "
            "and --seq-length beside it"
        )
    sizes = MegatronArguments.of({"world_size": num_gpus, "seq_length": seq_length} | stated)
    gpus, window = sizes.world_size, sizes.seq_length
    interval = stated.get("log_interval") if stated else _interval(text)
    if not window or not gpus or not isinstance(interval, int):
        raise ValueError(f"{name}: its arguments lack seq_length, world_size or log_interval; {_REMEDY}")
    starts: list[list[tuple[float, ...]]] = []
    broken: list[str] = []
    has_losses = re.search(rf"\| {_LOSS}: ", text)
    for begun in text.split(launch.END_OF_ARGUMENTS):
        starts.append([])
        before = 1 << 32
        for number, fields in _ITERATION.findall(begun):
            last = int(number[:9])
            count, before = min(last - before, interval) if before < last else 1, last  # a line may be lost
            # From behind: what stands first is the iteration's, and what follows may be of another, or of a rank.
            each = (field.partition(":") for field in reversed(fields.split("|")))
            values = {key.strip(): value.partition("/")[0] for key, _, value in each}  # Primus: the step's/the mean
            try:
                ms, samples, loss = float(values[_TIME]), int(values[_SAMPLES]), float(values.get(_LOSS, "nan"))
                skipped = max(int(values.get(name, 0)) for name in _SKIPPED)
            except (KeyError, ValueError):
                ms = samples = loss = skipped = 0  # a line that another process broke
            if 0 < ms < 1e12 and 0 < samples < 1 << 32 and last:
                trained = max(0, count - skipped)
                losses = trained * loss if trained else 0.0
                starts[-1].append((last, count, count * ms / 1e3, trained * samples * window, losses, trained))
            else:
                broken.append(f"iteration {number} |{fields}")
    if not any(starts):
        line = f"; this line cannot be read: {short(broken[0], 160)}" if broken else ""
        raise ValueError(f"{name} has no line of an iteration{line}; {_REMEDY}")
    remarks = [f"{len(broken):,} lines of iterations are broken, and left out: {short(broken[0])}"] if broken else []
    remarks += _between_starts(text)
    return _log(
        name, gpus, starts, skip, remarks, padded=bool(stated.get("sft")), arguments=stated, is_nan=bool(has_losses)
    )


def _interval(text: str) -> int:
    """Return the steps of a line, of a log that does not say them: the usual distance of two."""
    numbers = [int(number[:9]) for number, _ in _ITERATION.findall(text)]
    apart = Counter(b - a for a, b in itertools.pairwise(numbers) if b > a)
    return apart.most_common(1)[0][0] if apart else 1


def _between_starts(text: str) -> list[str]:
    """Say in what the arguments of a log's starts differ."""
    blocks = [dict(re.findall(r"(?m)^ *(\w+) \.+ (.*)$", begun)) for begun in text.split(launch.END_OF_ARGUMENTS)[:-1]]
    changed = dict.fromkeys(name for a, b in itertools.pairwise(blocks) for name in differences(a, b))
    return [f"its starts differ in {', '.join(list(changed)[:MOST_DIFFERENCES])}."] if changed else []


class _Model(msgspec.Struct):
    num_layers: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    num_attention_heads: int | None = None
    padded_vocab_size: int | None = None


class _Parallel(msgspec.Struct):
    tp: Annotated[int, msgspec.Meta(ge=1)]
    cp: Annotated[int, msgspec.Meta(ge=1)]
    pp: Annotated[int, msgspec.Meta(ge=1)]
    dp: Annotated[int, msgspec.Meta(ge=1)]


class _Profile(msgspec.Struct):
    name: str
    device: str | None = None


class _Job(msgspec.Struct):
    parallel: _Parallel
    profile: _Profile
    model: _Model | None = None
    context_length: int | None = None


class _Line(msgspec.Struct):
    """A step as a run logged it, as far as it is read."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    step_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    job: _Job
    skipped: bool | None = None
    """None: of a release that did not say it."""
    loss: float | None = None
    device: str = ""
    versions: dict[str, str] = {}
    num_micro_batches: int | None = None
    predicted_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)] | None = None
    predicted: dict[str, float] | None = None
    measured: dict[str, float | None] | None = None


def read_step_log(path: str) -> list[list[_Line]]:
    """Read a `--wlb-log` file: the steps of every start. Raises ValueError, naming the line."""
    starts: list[list[_Line]] = []
    remedy = "give the file that --wlb-log named"
    with files.opened(path, remedy) as file:
        for number, text in enumerate(iter(partial(file.readline, MOST_OF_A_STEP), b""), start=1):
            if len(text) == MOST_OF_A_STEP:
                raise ValueError(f"{path}, line {number} has over {MOST_OF_A_STEP >> 20} MiB, the limit; {remedy}")
            try:
                line = msgspec.json.decode(text, type=_Line)
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error or 'nested too deeply'}; {remedy}") from error
            if not starts or line.step != starts[-1][-1].step + 1:
                starts.append([])
            starts[-1].append(line)
    if starts and any(_gpus(line) != _gpus(starts[0][0]) for start in starts for line in start):
        raise ValueError(f"{path} is of runs on other numbers of GPUs; give the lines of one as a file of their own")
    if not starts:
        raise ValueError(f"{path} has no step; {remedy}")
    return starts


def _gpus(line: _Line) -> int:
    each = line.job.parallel
    return each.tp * each.cp * each.pp * each.dp


def _of_step_log(name: str, skip: int) -> Log:
    starts = read_step_log(name)

    def row(line: _Line) -> tuple[float, ...]:
        if line.skipped:
            return line.step, 1, line.step_ms / 1e3, 0, 0.0, 0
        return line.step, 1, line.step_ms / 1e3, line.tokens, math.nan if line.loss is None else line.loss, 1

    job = starts[-1][-1].job
    arguments = {
        "wlb": True,
        "seq_length": job.context_length,
        **(msgspec.structs.asdict(job.model) if job.model else {}),
    }
    known = {name: value for name, value in arguments.items() if value is not None}
    rows = [[*map(row, start)] for start in starts]
    untold = sum(line.skipped is None for start in starts for line in start)
    remarks = [f"{untold:,} of its steps, of an earlier release, do not say if they were skipped: they count."]
    remarks *= untold > 0
    return _log(name, _gpus(starts[0][0]), rows, skip, remarks, whole=False, arguments=known, is_nan=True)


def _of_tensorboard(name: str, skip: int) -> Log:
    """Read what Megatron and `--wlb` write for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(name, {"scalars": 0, "tensors": 0}).Reload()
    scalars, tensors = (events.Tags()[kind] for kind in ("scalars", "tensors"))

    def values(tag: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(tag)} if tag in scalars else {}

    def arguments(what: str) -> dict[int, str]:
        """Return what starts say of an argument, by their first step."""
        tag = f"{what}/text_summary"
        found = events.Tensors(tag) if tag in tensors else []
        return {event.step: event.tensor_proto.string_val[0].decode() for event in found}

    def argument(what: str) -> str:
        found = {*arguments(what).values()}
        if len(found) > 1:
            raise ValueError(f"{name} is of runs with {what} {' and '.join(sorted(found))}; give a folder of one")
        return next(iter(found), "")

    def number(what: str, text: str | None = None) -> int:
        text = argument(what) if text is None else text
        if not re.fullmatch("[0-9]{1,18}", text):
            raise ValueError(f"{name} has no {what} of Megatron's arguments; {_REMEDY}")
        return int(text)

    losses, ours = values("lm loss"), values("wlb/step_ms")
    trained, spent, norms, sizes = (values(tag) for tag in ("wlb/tokens", "iteration-time", "grad-norm", "batch-size"))
    skipped = {n for n in losses if norms and n not in norms and n >= min(norms)}  # whose gradient has no norm
    skipped |= {n for n, value in values("wlb/skipped").items() if value}
    stated = {tag.removesuffix("/text_summary") for tag in tensors if tag.endswith("/text_summary")}
    rows: list[tuple[float, ...]] = []
    remarks: list[str] = []
    if ours:
        for n in ours.keys() & trained.keys():
            kept = (0, 0.0, 0) if n in skipped else (trained[n], losses.get(n, math.nan), 1)
            rows.append((n, 1, ours[n] / 1e3, *kept))
        if lost := len(ours) - len(rows):
            remarks.append(f"{lost:,} of its steps have no tokens, and are left out.")
    elif spent:
        window, numbers, of_starts = number("seq_length"), [*spent], arguments("global_batch_size")
        before = 2 * numbers[0] - numbers[1] if numbers[1:] else 0  # it may begin with a checkpoint

        def windows(n: int) -> float:
            """Return the windows of a step: its own, or those of the start that it is of."""
            started = [text for first, text in of_starts.items() if first < n] or [*of_starts.values()][:1]
            return sizes[n] if n in sizes else number("global_batch_size", started[-1] if started else "")

        for n, seconds in spent.items():
            steps = range(before + 1, n + 1)
            run = [i for i in steps if i not in skipped]
            loss = sum(losses.get(i, math.nan) for i in run)
            rows.append((n, len(steps), len(steps) * seconds, sum(map(windows, run)) * window, loss, len(run)))
            before = n
    if not rows:
        raise ValueError(f"{name} has no times of steps; add --log-timers-to-tensorboard to the run, or {_REMEDY}")
    padded = not ours and argument("sft") == "True"
    known = {what: [*arguments(what).values()][-1] for what in stated}
    more = {"padded": padded, "whole": not ours, "arguments": known, "is_nan": bool(losses)}
    return _log(name, number("world_size"), [rows], skip, remarks, **more)


def predicted(name: str, skip: int) -> tuple[list[tuple[str, ...]], list[str], dict[str, Any]]:
    """Compare a `--wlb-log` file with what the run predicted.

    Raises ValueError where it predicted nothing, or by the profile of another device.
    """
    steps = [line for start in read_step_log(name) for line in start[skip:]]
    told = [line for line in steps if line.predicted_ms is not None]
    remedy = "give the run --wlb-profile with what `megatron-wlb profile` measured, or give BASE and RUN"
    if len(told) < 2:
        raise ValueError(f"{name} has {len(told)} predicted steps after --skip {skip}; {remedy}")
    profile, device = told[0].job.profile, told[0].device
    if not alike(profile.device, device):
        raise ValueError(
            f"{name} ran on {device or 'another device'}, and profile {profile.name} is of {profile.device}; {remedy}"
        )
    measured, expected = (np.array([getattr(line, each) for line in told]) for each in ("step_ms", "predicted_ms"))
    median, p90 = relative_error(expected, measured)
    varies = min(np.ptp(expected), np.ptp(measured)) > 0
    correlation = float(np.corrcoef(expected, measured)[0, 1]) if varies else math.nan
    rows: list[tuple[str, ...]] = [
        ("", "measured", "predicted"),
        ("time of a step, ms", *(f"{each.mean():,.2f}" for each in (measured, expected))),
    ]
    for share in TIME_SHARES:
        rows.append((f"{share}, % of a step", *(_mean(told, how, share) for how in ("measured", "predicted"))))
    verdict = f"Predicted times of a step are off by {median:.1%}, a tenth of them by over {p90:.1%}"
    verdict += f"; their correlation is {correlation:.3f}." if varies else "."
    of = f"{len(told):,} steps on {device or 'an unknown device'}; profile {profile.name}."
    numbers = {"error_median": median, "error_p90": p90, "correlation": correlation if varies else None}
    return rows, [verdict, of], numbers | {"steps": [[line.step, line.step_ms, line.predicted_ms] for line in told]}


def _mean(steps: Sequence[_Line], how: str, share: str) -> str:
    found = [value for line in steps if (value := (getattr(line, how) or {}).get(share)) is not None]
    return f"{100 * np.mean(found) + 0:.1f}" if found else "-"
