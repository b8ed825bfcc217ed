"""The steps of a run by its log, its --wlb-log or its TensorBoard; and how the arguments of two runs differ."""

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
from megatron_wlb.cli import launch, screen
from megatron_wlb.cli.data import DATA
from megatron_wlb.describe.arguments import MegatronArguments, flag_of
from megatron_wlb.settings import short

MOST_OF_A_STEP = 1 << 26
"""Most bytes of a step in a log."""
_REMEDY = "give Megatron's output, the file that --wlb-log named, or a folder of TensorBoard"
_ITERATION = re.compile(r"(?m)(?:^|[\s:])iteration +([0-9]+)/ *[0-9]+ \|(.*)")
_SKIPPED = ("number of skipped iterations", "number of nan iterations")
OTHER = DATA | set(
    """seq_length global_batch_size seed split tokenizer_model tokenizer_type vocab_size padded_vocab_size num_layers
    hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_experts moe_ffn_hidden_size
    moe_router_topk mtp_num_layers hybrid_layer_pattern multi_latent_attention kv_lora_rank q_lora_rank
    window_size""".split()
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
    """Sentences on its oddities, such as steps that are left out."""


def read(name: str, skip: int, num_gpus: int | None = None, seq_length: int | None = None) -> Log:
    """Read a log of any kind, without the first `skip` steps of every start. Raises ValueError for others.

    `num_gpus` and `seq_length` stand in for the arguments of a log without them.
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
    *,
    tells_nan: bool,
    **more: Any,
) -> Log:
    """Make a log of starts, each a list of rows of `Log.steps`; of steps that ran twice, the later counts.

    `tells_nan`: where no step has a finite loss, losses were no numbers; otherwise the log has none.
    """
    warm: dict[float, tuple[float, ...]] = {}
    every: dict[float, tuple[float, ...]] = {}
    for start in starts:
        first = start[0][0] - start[0][1] + skip if start else 0
        every |= {row[0]: row for row in start}
        warm |= {row[0]: row for row in start if row[0] - row[1] >= first}
    rows = np.array([every[number] for number in sorted(every)]).reshape(-1, 6)
    wrong = (rows[:, 5] > 0) & ~np.isfinite(rows[:, 4])
    diverged = ""
    if wrong.any() and (tells_nan or not wrong.all() or np.isinf(rows[:, 4]).any()):
        since = f"from step {rows[wrong.argmax(), 0]:,.0f} on" if wrong[wrong.argmax() :].all() else ""
        diverged = since or f"at {wrong.sum():,} of {len(rows):,} steps, first at step {rows[wrong.argmax(), 0]:,.0f}"
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
        name, gpus, starts, skip, remarks, padded=bool(stated.get("sft")), arguments=stated, tells_nan=bool(has_losses)
    )


def _interval(text: str) -> int:
    """Return the steps of a line, of a log that does not say them: the usual distance of two."""
    numbers = [int(number[:9]) for number, _ in _ITERATION.findall(text)]
    apart = Counter(b - a for a, b in itertools.pairwise(numbers) if b > a)
    return apart.most_common(1)[0][0] if apart else 1


def _between_starts(text: str) -> list[str]:
    """Say which arguments differ between a log's starts."""
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


class Line(msgspec.Struct):
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


def read_step_log(path: str) -> list[list[Line]]:
    """Read a `--wlb-log` file: the steps of every start. Raises ValueError, naming the line."""
    starts: list[list[Line]] = []
    remedy = "give the file that --wlb-log named"
    with files.opened(path, remedy) as file:
        for number, text in enumerate(iter(partial(file.readline, MOST_OF_A_STEP), b""), start=1):
            if len(text) == MOST_OF_A_STEP:
                raise ValueError(f"{path}, line {number} has over {MOST_OF_A_STEP >> 20} MiB, the limit; {remedy}")
            try:
                line = msgspec.json.decode(text, type=Line)
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


def _gpus(line: Line) -> int:
    each = line.job.parallel
    return each.tp * each.cp * each.pp * each.dp


def _of_step_log(name: str, skip: int) -> Log:
    starts = read_step_log(name)

    def row(line: Line) -> tuple[float, ...]:
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
    return _log(name, _gpus(starts[0][0]), rows, skip, remarks, whole=False, arguments=known, tells_nan=True)


def _of_tensorboard(name: str, skip: int) -> Log:
    """Read the output of Megatron and `--wlb` for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(name, {"scalars": 0, "tensors": 0}).Reload()
    scalars, tensors = (events.Tags()[kind] for kind in ("scalars", "tensors"))

    def values(tag: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(tag)} if tag in scalars else {}

    def arguments(what: str) -> dict[int, str]:
        """Return the values of an argument at all starts, by their first step."""
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
            """Return the windows of a step: its own number, or its start's."""
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
    more = {"padded": padded, "whole": not ours, "arguments": known}
    return _log(name, number("world_size"), [rows], skip, remarks, tells_nan=bool(losses), **more)


def differences(base: Mapping[str, Any], ran: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the arguments that differ between both logs, with both values, the model's and the data's first.

    Arguments that --wlb sets are left out where it is on in one of the runs.
    """
    one_has_wlb = bool(base.get("wlb")) != bool(ran.get("wlb"))
    names = [name for name in base if name in ran and not _BESIDE.match(name)]
    names = [name for name in names if not (one_has_wlb and name in screen.ADDED)]
    # Upstream pads the vocabulary after it has printed its arguments.
    names = [name for name in names if name != "padded_vocab_size" or None not in (base[name], ran[name])]
    texts = {
        name: (_words(base[name]), _words(ran[name])) for name in sorted(names, key=lambda name: name not in OTHER)
    }
    return {name: (a, b) for name, (a, b) in texts.items() if a != b}


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
