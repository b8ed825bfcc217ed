"""The commands of both sides, checked before anything is started."""

import argparse
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron_wlb import files
from megatron_wlb.cli.data import data_of
from megatron_wlb.cli.job import Run, run_of
from megatron_wlb.cli.launch import divided, read_command, read_flags
from megatron_wlb.describe.arguments import FLAGS, MegatronArguments
from megatron_wlb.describe.refusals import refusals
from megatron_wlb.settings import short

_TAKEN_OUT = re.compile(
    "--(?:save|persistent-save|non-persistent|async-save|ckpt-convert|tensorboard-dir|wandb|mlflow|exit-interval|"
    "exit-duration|log-progress|profile|use-pytorch-profiler|pytorch-profiler|record-memory|memory-snapshot|"
    "config-logger|moe-routing-trace|dump-|flight-recorder-dump-path|enable-ft|calc-ft)"
)
"""Beginnings of flags that write into the run's folders, need one that is taken out, or end a run."""
_OF_WLB = re.compile("--(?:no-load-)?wlb")
_TRACKER = "latest_checkpointed_iteration.txt"
_PRIVATE = set(
    """load data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path
    data_cache_path tokenizer_model vocab_file merge_file wlb_log wlb_profile""".split()
)
"""Arguments that name data or places."""
_TOLD = {*MegatronArguments.__dataclass_fields__, *(flag.replace("-", "_") for flag in FLAGS.values())}
"""Arguments whose values are told, unless private; of others, only numbers are."""
_PATH = re.compile(r"(?<![\w/])(?:~|\.{0,2})/[^\s:'\",;()]+|[\w.-]+(?:/[\w.-]+)+\.\w+")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?(?:,-?[0-9.]+)*")
_PROGRAM = re.compile(
    r"--[\w-]+|-[A-Za-z]\d*|-np|-npernode|-ppn|torchrun|srun|mpirun|mpiexec|python[\d.]*|bash|env|accelerate|"
    r"torch\.distributed\.\w+|megatron_wlb\.run"
)
"""Words of a launcher that are told besides numbers."""


class Plan(NamedTuple):
    """A trial that may start."""

    run: Run
    mock: bool
    """The run trains mock data."""
    words: tuple[list[str], list[str]]
    """The command of a turn without --wlb, and with it."""
    folder: Path
    first: int
    """The iteration of the checkpoint that is loaded; 0 without."""
    steps: int
    skip: int
    """Steps of a turn that are left out."""

    @property
    def log(self) -> Path:
        """Return the file of --wlb-log, of all turns with it."""
        return self.folder / "with.jsonl"


def checked(args: argparse.Namespace) -> Plan:
    """Return the plan of a trial. Raises ValueError for all that training with --wlb would refuse."""
    if not args.launched:
        raise ValueError("no command; give the run's command behind --, from torchrun or srun on")
    start, flags = divided(args.launched)
    if shutil.which(start[0]) is None:
        raise ValueError(
            f"{short(start[0])} is no program here; give the command from its program on, and set variables before"
        )
    run = run_of(args)
    given = {"attention_dropout": 0} | run.launched.stated | asdict(run.arguments)
    for why in refusals(Namespace(**given)):
        raise ValueError(f"training with --wlb refuses this run: {why}")
    job = run.job()
    data_of(run.arguments, run.notes, run.run_settings)
    stated = read_command(args.launched, run.arguments.world_size).stated
    first = _first(stated)
    iterations, samples = (
        value if isinstance(value := stated.get(name), int) else 0 for name in ("train_iters", "train_samples")
    )
    if (end := iterations or samples // job.global_batch_size) and first + args.steps > end:
        raise ValueError(
            f"--steps {args.steps} from iteration {first} on is over the {end} iterations of the run "
            f"(--train-iters, --train-samples); give at most {end - first}, or a longer run"
        )
    folder = Path(args.out).absolute()
    skip = max(2, min(10, args.steps // 3))
    mock = bool(stated.get("mock_data") and not stated.get("data_path"))
    plan = Plan(run, mock, ([], []), folder, first, args.steps, skip)
    plan = plan._replace(words=_both(start, flags, read_flags(args.flags).wlb, plan))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {args.out} is there, and not empty; name another folder")
    return plan


def _both(start: list[str], flags: Sequence[str], given: Sequence[str], plan: Plan) -> tuple[list[str], list[str]]:
    """Return the words of both sides. Raises ValueError if the added arguments cannot be read from them."""
    last = plan.first + plan.steps
    intervals = {"log_interval": 1, "log_memory_interval": last, "eval_iters": 0, "exit_interval": last}
    added: dict[str, Any] = intervals | {"wlb_digest": True}
    kept = [group for group in _grouped(flags) if not _TAKEN_OUT.match(group[0])]
    own = [word for group in kept if _OF_WLB.match(group[0]) for word in group]
    kept = [group for group in kept if not _OF_WLB.match(group[0])]
    common = [*start, *(word for group in kept for word in group)]
    ours = {"wlb": True, "wlb_log": str(plan.log)}
    both = [*common, *_words(added)], [*common, *own, *given, *_words(added | ours)]
    for words, want in zip(both, (added, added | ours), strict=True):
        said = read_command(words, plan.run.arguments.world_size).stated
        if lost := [name for name, value in want.items() if said.get(name) != value] or [*{"--"} & {*words}]:
            raise ValueError(f"{short(lost[0])} cannot be added behind {short(flags[-1])}; give all flags as words")
    return both


def _words(arguments: dict[str, Any]) -> list[str]:
    """Return flags as words; the last of a flag counts, so they win over the run's."""
    return [
        word
        for name, value in arguments.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]


def _grouped(flags: Sequence[str]) -> list[list[str]]:
    """Divide words into flags with their values."""
    groups: list[list[str]] = []
    for word in flags:
        groups += [[]] if word.startswith("--") else []
        groups[-1].append(word)
    return groups


def _first(stated: dict[str, Any]) -> int:
    """Return the iteration at which Megatron begins. Raises ValueError for a checkpoint whose iteration is not known.

    Checkpoints that are not persistent are not loaded: their flags are taken out.
    """
    tracker = Path(str(stated.get("load")), _TRACKER)
    if stated.get("finetune") or not tracker.is_file():
        return 0
    step = stated.get("override_ckpt_iteration", stated.get("ckpt_step"))
    text = str(step or files.read(tracker, 1 << 10, "give another --load").decode(errors="replace").strip())
    if text != "release" and not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"--load has a {_TRACKER} with {short(text)}, which is no iteration; give --finetune")
    return 0 if text == "release" else int(text)


def shown(words: Sequence[str]) -> str:
    """Return a command to show, of values only those that are neither paths nor data."""
    start, flags = divided(words)
    told = [_of_launcher(word) for word in start[:-1]] + [os.path.basename(start[-1])]
    for group in _grouped(flags):
        flag, equals, value = group[0].partition("=")
        told.append(f"{flag}={_value(flag, value)}" if equals else flag)
        told += [_value(flag, word) for word in group[1:]]
    return re.sub(r"\.\.\.(?: \.\.\.)+", "...", " ".join(told))


def hidden(text: str, words: Sequence[str]) -> str:
    """Return a text without paths, and without the places and data that a command names."""
    for group in _grouped(divided(words)[1]):
        flag, _, value = group[0].partition("=")
        for word in (value, *group[1:]) if _name(flag) in _PRIVATE else ():
            text = text if _NUMBER.fullmatch(word) or len(word) < 3 else text.replace(word, "...")
    return _PATH.sub("...", text)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _of_launcher(word: str) -> str:
    """Return a word before the script as it is shown."""
    name, equals, value = word.partition("=")
    if equals and word.startswith("-"):
        return f"{name}={value if _NUMBER.fullmatch(value) else '...'}"
    last = os.path.basename(word)
    return last if _PROGRAM.fullmatch(last) or _NUMBER.fullmatch(word) else "..."


def _value(flag: str, value: str) -> str:
    """Return a value of a flag as it is shown."""
    name = _name(flag)
    known = (name in _TOLD or name.startswith("wlb_")) and "/" not in value
    return value if name not in _PRIVATE and (known or _NUMBER.fullmatch(value)) else "..."
