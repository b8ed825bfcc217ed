"""A Megatron launch line or script as it is: torchrun, script name and all; what matters here, and what does not."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

from megatron_wlb.adapter.arguments import check
from megatron_wlb.cli.common import printable, short
from megatron_wlb.cli.shell import OPERATOR, read

_END = "--;"
"""Stands for whatever ends a command in a script: no flag takes values beyond it."""
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*[^{}]*\}")
_SWITCH = re.compile("--(?:bf16|fp16|sequence-parallel|(?:disable|no|overlap|untie|use)-.*)")
"""Flags without a value, of those that only training knows."""
_SOURCED = re.compile(r"""^[ \t]*(?:source|\.)[ \t]+(?:.*/)?["']?([\w.-]+)["']?[ \t]*$""", re.MULTILINE)
_SLURM = {
    "SLURM_NNODES": r"--nodes[= ]|-N[ \t]*",
    "SLURM_JOB_NUM_NODES": r"--nodes[= ]|-N[ \t]*",
    "SLURM_GPUS_ON_NODE": r"--gpus-per-node[= ](?:[\w-]+:)?|--gres[= ](?:\S*,)?gpu:(?:[\w-]+:)?",
    "SLURM_NTASKS_PER_NODE": "--ntasks-per-node[= ]",
}
"""Variables of a job, and the flags before their numbers in lines of #SBATCH."""
NOT_SIMULATED = {
    "multi-latent-attention": "multi-latent attention",
    "window-size": "sliding windows",
    "mtp-num-layers": "multi-token prediction",
    "hybrid-layer-pattern": "layers of several kinds",
    "pipeline-model-parallel-layout": "stages of unequal layers",
    "decoder-first-pipeline-num-layers": "stages of unequal layers",
    "decoder-last-pipeline-num-layers": "stages of unequal layers",
    "yaml-cfg": "a YAML file of flags",
}
"""Flags that change what would be predicted, and that the simulation does not know: refused."""
_ACCEPTED = {
    **{"seq_length": 1024, "micro_batch_size": 1, "save": "checkpoints"},
    **{f"{name}_parallel_size": 1 for name in ("pipeline_model", "expert_model")},
    **{"calculate_per_token_loss": True, "sequence_parallel": False, "attention_dropout": 0},
    **{"num_experts": 2, "moe_token_dispatcher_type": "alltoall"},
    **{"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True},
}
"""Arguments that training with --wlb takes, to see of others which it refuses."""
LOW_PRECISION = ("fp8-format", "fp8-recipe", "fp4-format")
"""Flags of which only the alignment of micro-batches is known."""
_WITHIN_DOCUMENTS = {"--reset-attention-mask", "--dataloader-inter-document-masking", "--sft"}
"""Flags of upstream with any of which attention ends with the document."""
_HARMLESS = re.compile(
    "(?:no-|use-|disable-|no_)?(?:accumulate-allreduce|adam-|adlr-|apply-layernorm-1p$|async-save$|attention-dropout|"
    "bf16$|bias-linear$|calculate-per-token-loss|check-for|ckpt|clip-grad|container-|create-attention-mask|"
    "cross-entropy|data-cache|data-path|dataloader|decoupled|dist|empty-unused|end-weight-decay|eod-mask-loss$|error$|eval-|"
    "exit-|export|flash-attn|fp16$|gpus-per|grad-reduce|init-method|job-name|kill-on|load|log-|loss-scale|lr|manual-gc|master|"
    "max-position|max-restarts|mcore-models|merge-file|min-lr|mmap|moe-(?:aux-loss|grouped-gemm|permute-fusion|router|token-dispatcher|z-loss)|node.rank|nodes|help$|norm|ntasks|num-dataset|num-workers|"
    "one-logger|optimizer$|output$|overlap-grad-reduce|overlap-param-gather|partition|position-embedding|profile|pytorch-"
    "profiler|rdzv|reset-(?:attention-mask|position-ids)$|rope|rotary|save|seed|sequence-parallel$|sgd|split|standalone|start-weight|tee|tensorboard|test-data|"
    "tiktoken|time|timing|tokenizer|train-(?:data|iters|samples)|transformer-impl|untie|valid-data|vocab-(?:extra|file)|"
    "wandb|weight-decay)"
)
"""Beginnings of flags on which neither work nor times of a step depend."""


def accept(parser: argparse.ArgumentParser, script: argparse.ArgumentParser) -> None:
    """Let a command take launch lines and `--launch FILE`, whose flags `script` knows; its own come before those.

    Arguments then have `refused` (flags that training with --wlb refuses, in order), `ignored` (others that don't
    matter), `remarks` (sentences on those, and on what is not simulated) and `environment_world_size`. Exits with an
    error for what cannot be simulated.
    """

    def parse_known_args(
        arguments: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        rest: list[str] = []
        try:
            arguments, words = _without_launch(list(arguments))
        except (ValueError, OSError) as error:
            parser.error(str(error))
        arguments, words, known = _ended(arguments), _ended(words), script._option_string_actions
        if words:
            words = _complete(_overruled(words, arguments, known), known)
            namespace, rest = script.parse_known_args(words, namespace)
        args, more = argparse.ArgumentParser.parse_known_args(parser, arguments, namespace)
        rest += [_END, *more]
        _judge(parser, args, rest)
        _check_words(parser, args, words, more)
        launched = words or any(word.endswith(".py") for word in more)
        attention = _attention(rest) if launched and not args.wlb else []
        args.remarks = [*_unassigned(words, known), *attention, *args.remarks]
        return args, []

    script.error = parser.error  # type: ignore[method-assign]
    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _judge(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> None:
    """Sort flags that are not known into those that don't matter and those that might."""

    def given(name: str) -> bool:
        return getattr(args, name.replace("-", "_")) is not None

    for name, what in NOT_SIMULATED.items():
        if given(name):
            parser.error(
                f"--{name}: {what} cannot be simulated; leave it out for an estimate without, or give the line that is "
                "run if it is in another branch of a script"
            )
    values = _values(rest)
    ours = [flag for flag in values if flag.startswith("--wlb")]
    if ours:
        parser.error(f"{ours[0]} is no flag of ours")
    args.refused = [flag for flag in values if _is_refused(flag, values[flag])]
    unknown = [flag for flag in values if flag not in args.refused]
    args.ignored = [flag for flag in unknown if _HARMLESS.match(flag[2:])]
    low_precision = [flag for flag in unknown if flag.startswith(("--fp8", "--fp4"))]
    strange = [flag for flag in unknown if flag not in args.ignored + low_precision]
    low_precision = [f"--{name}" for name in LOW_PRECISION if given(name)] + low_precision
    args.remarks = []
    if args.refused:
        args.remarks.append(f"Left out, since training with --wlb refuses them: {' '.join(args.refused)}.")
    if low_precision:
        args.remarks.append(f"FP8 and FP4 ({' '.join(low_precision)}) are not modelled: all numbers are those of bf16.")
    if strange:
        args.remarks.append(f"Not simulated, and so without effect on these numbers: {' '.join(strange)}.")
    # `WORLD_SIZE=16 python pretrain_gpt.py`; launch scripts also compute it, from what --nproc-per-node says too.
    sizes = [match[1] for word in rest if (match := re.fullmatch("WORLD_SIZE=([1-9][0-9]{0,8})", word))]
    args.environment_world_size = int(sizes[0]) if sizes else None


def _overruled(words: Sequence[str], arguments: Sequence[str], flags: Mapping[str, argparse.Action]) -> list[str]:
    """A script's words without the flags that `arguments` give, under whichever of their names, and their values."""
    given = {n for word in arguments if (flag := flags.get(word.partition("=")[0])) for n in flag.option_strings}
    kept, values = [], 0
    for word in words:
        name, equals, _ = word.partition("=")
        if name in given:
            values = 0 if equals or flags[name].nargs == 0 else 1 if flags[name].nargs is None else len(words)
        elif values and not word.startswith("--"):
            values -= 1
        else:
            kept.append(word)
            values = 0
    return kept


def _complete(words: Sequence[str], flags: Mapping[str, argparse.Action]) -> list[str]:
    """The words without flags that a script reads itself, as in `case`: they take a value and end a command."""
    return [
        word
        for word, after in pairwise([*words, _END])
        if after != _END or word not in flags or flags[word].nargs is not None
    ]


def _check_words(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str], more: Sequence[str]
) -> None:
    """Exit with an error if a file's name stands where flags are read, or no more than words that are no flags."""
    loose = list(takewhile(lambda word: not word.startswith("-"), more))
    file = next((word for word in loose if os.path.isfile(word) or os.path.isfile(f"{word}.idx")), None)
    if file is not None and not any(word.endswith(".py") for word in loose):
        first = ", or put it first if it is LENGTHS" if hasattr(args, "lengths") else ""
        parser.error(
            f"{file} is a file, and flags are read here; give --launch {file} if it is a launch script, or --data-path "
            f"if it is a dataset{first}"
        )
    if (args.model, args.num_layers, args.seq_length) == (None, None, None) and (words or loose):
        said = short(" ".join(word for word in (*words, *more) if word != _END))
        parser.error(
            f"no flags of pretrain_gpt.py such as --num-layers in {said}, and nothing else is read; give its launch "
            "line, or a script with it by --launch"
        )


def _attention(words: Sequence[str]) -> list[str]:
    """A remark on a launch line whose attention would change."""
    if _values(words).keys() & _WITHIN_DOCUMENTS:
        return []
    return [
        "The launch line lets attention cross documents (it has neither --reset-attention-mask nor "
        "--dataloader-inter-document-masking); Megatron here is the same run with attention inside of them."
    ]


def _unassigned(words: Sequence[str], known: Mapping[str, argparse.Action]) -> list[str]:
    """A remark on variables without a value, where flags may be, in commands that start Python or torchrun."""

    def takes_value(word: str) -> bool:
        is_switch = known[word].nargs == 0 if word in known else _SWITCH.fullmatch(word)
        return word.startswith("-") and "=" not in word and not is_switch

    commands = [list(command) for end, command in groupby(words, _END.__eq__) if not end]
    names = dict.fromkeys(
        word
        for command in commands
        if any(word.endswith(".py") or word == "torchrun" for word in command)
        for before, word in pairwise(["", *command])
        if _VARIABLE.fullmatch(word) and not takes_value(before)
    )
    if not names:
        return []
    return [f"Flags that {', '.join(names)} may hold are missing here: the file does not say what is in them."]


def _values(words: Sequence[str]) -> dict[str, list[str]]:
    """Flags and the words behind them; of a flag that is given again, those of the last."""
    flags: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            values = flags[printable(flag)] = [value] if equals else []
        else:
            values.append(word)
    flags.pop(_END, None)
    return flags


def _is_refused(flag: str, values: list[str]) -> bool:
    """Whether training with --wlb refuses a flag for its presence or its value; `adapter.arguments.check` judges."""
    value: Any = values[0] if len(values) == 1 else values or True
    number = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value)
    argument = {flag[2:].replace("-", "_"): float(value) if number else value}
    try:
        check(argparse.Namespace(**_ACCEPTED | argument))
    except (ValueError, TypeError):  # a variable where a number must be
        return True
    return False


def world_size(args: argparse.Namespace) -> int | None:
    """GPUs by --num-gpus, --nproc-per-node x --nnodes or WORLD_SIZE, in this order; None if nothing is said.

    Raises ValueError if torchrun's are not numbers.
    """
    if args.num_gpus is not None:
        return int(args.num_gpus)
    if args.nproc_per_node is None:
        if args.nnodes is not None:
            raise ValueError("--nnodes without --nproc-per-node; give both, or --num-gpus")
        return args.environment_world_size  # type: ignore[no-any-return]
    parsed = []
    for flag, text in (("--nproc-per-node", args.nproc_per_node), ("--nnodes", args.nnodes or "1")):
        if not text.isascii() or not text.isdecimal() or not int(text):
            raise ValueError(f"{flag} {text} is not a number; put it in, or give --num-gpus")
        parsed.append(int(text))
    return parsed[0] * parsed[1]


def words_of(text: str) -> list[str]:
    """Words of a launch line or script, as `shell.read` has them.

    WORLD_SIZE=N comes last, in a command of its own, where Slurm is asked for nodes and GPUs (or tasks) of each.
    """
    asked = "\n".join(re.findall(r"^#SBATCH[ \t].*", text, re.MULTILINE))
    slurm = {name: n for name, flag in _SLURM.items() for n in re.findall(rf"\s(?:{flag})([0-9]{{1,9}})\b", asked)[-1:]}
    ranks_per_node = slurm.get("SLURM_GPUS_ON_NODE", slurm.get("SLURM_NTASKS_PER_NODE", "0"))
    world_size = int(slurm.get("SLURM_NNODES", "0")) * int(ranks_per_node)
    words = read(text, slurm)
    return [*words, ";", f"WORLD_SIZE={world_size}"] if world_size else words


def _ended(words: Sequence[str]) -> list[str]:
    return [_END if OPERATOR.fullmatch(word) else word for word in words]


def _without_launch(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Arguments without `--launch FILE`, and the words of the file. What it sources from its own folder is put in."""
    for i, argument in enumerate(arguments):
        flag, equals, name = argument.partition("=")
        if flag == "--launch" and (equals or i + 1 < len(arguments)):
            name = name if equals else arguments[i + 1]
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")

            def sourced(match: re.Match[str], folder: Path = Path(name).parent) -> str:
                file = folder / match[1]
                return file.read_text(encoding="utf-8") if file.is_file() else match[0]

            return arguments[:i] + arguments[i + 1 + (not equals) :], words_of(_SOURCED.sub(sourced, text))
    return arguments, []
