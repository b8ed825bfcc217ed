"""A Megatron launch line or script as it is: torchrun, script name and all; what matters here, and what does not."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.cli.common import printable

_SHELL = re.compile(r"[();|&]+|\d*[<>].*|&>.*|--")
_END = "--;"
"""Stands for whatever ends a command in a script: no flag takes values beyond it."""
_MOST_CHARACTERS = 1 << 20
"""Of a launch line whose variables are put in."""
_VARIABLE = re.compile(r"\$(?:(?P<named>\w+)|\{(?P<braced>\w+)(?::?[-=](?P<default>[^{}]*))?\})")
_ASSIGNMENT = re.compile(
    r"""(?:^|(?<=[;\s]))([A-Za-z_]\w*)=("[^"]*"|'[^']*'|(?:\$\w+|\$\{[^}]*\}|[^\s;()`$&|"'])++)(?=[\s;&|)]|$)""",
    re.MULTILINE,
)
_ARITHMETIC = re.compile(r"\$\(\(([\w\s*/]+)\)\)")
_SOURCED = re.compile(r"""^[ \t]*(?:source|\.)[ \t]+(?:.*/)?["']?([\w.-]+)["']?[ \t]*$""", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|(?<=[ \t]))#")
_NODES = re.compile(r"^#SBATCH[ \t]+(?:--nodes[= ]|-N[ \t]*)(\d+)", re.MULTILINE)
NOT_SIMULATED = {
    "num-experts": "mixture of experts",
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
LEFT_OUT = {
    "mock-data": "mock data; documents are those that are named",
    "rampup-batch-size": "a batch size that changes, which --wlb does not train with",
    "step-batch-size-schedule": "a batch size that changes, which --wlb does not train with",
}
"""Flags that a run with --wlb does not have, and without which all others stand."""
LOW_PRECISION = ("fp8-format", "fp8-recipe", "fp4-format")
"""Flags of which only the alignment of micro-batches is known."""
_HARMLESS = re.compile(
    "(?:no-|use-|disable-|no_)?(?:accumulate-allreduce|adam-|adlr-|apply-layernorm-1p$|async-save$|attention-dropout|"
    "bf16$|bias-linear$|calculate-per-token-loss|check-for|ckpt|clip-grad|container-|create-attention-mask|"
    "cross-entropy|data-cache|data-path|dataloader|decoupled|dist|empty-unused|end-weight-decay|eval-|exit-|export|"
    "flash-attn|fp16$|gpus-per|grad-reduce|init-method|job-name|kill-on|load|log-|loss-scale|lr|manual-gc|master|"
    "max-position|max-restarts|mcore-models|merge-file|min-lr|mmap|node.rank|nodes|help$|norm|ntasks|num-dataset|num-workers|"
    "one-logger|optimizer$|overlap-grad-reduce|overlap-param-gather|partition|position-embedding|profile|pytorch-"
    "profiler|rdzv|rope|rotary|save|seed|sequence-parallel$|sgd|split|standalone|start-weight|tee|tensorboard|test-data|"
    "tiktoken|time|timing|tokenizer|train-(?:data|iters|samples)|transformer-impl|untie|valid-data|vocab-(?:extra|file)|"
    "wandb|weight-decay)"
)
"""Beginnings of flags on which neither work nor times of a step depend."""


def accept(parser: argparse.ArgumentParser, script: argparse.ArgumentParser) -> None:
    """Let a command take launch lines and `--launch FILE`, whose flags `script` knows; its own come before those.

    Arguments then have `ignored` (flags that don't matter, in order), `remarks` (sentences on those that are not
    simulated) and `environment_world_size`. Exits with an error for what is refused.
    """

    def parse_known_args(
        arguments: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        rest: list[str] = []
        try:
            arguments, words = _without_launch(list(arguments))
        except (ValueError, OSError) as error:
            parser.error(str(error))
        if words:
            namespace, rest = script.parse_known_args(_ended(words), namespace)
        args, more = argparse.ArgumentParser.parse_known_args(parser, _ended(arguments), namespace)
        _judge(parser, args, rest + more)
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
    unknown = list(dict.fromkeys(printable(w.split("=")[0]) for w in rest if w.startswith("--") and w != _END))
    ours = [flag for flag in unknown if flag.startswith("--wlb")]
    if ours:
        parser.error(f"{ours[0]} is no flag of ours")
    args.ignored = [flag for flag in unknown if _HARMLESS.match(flag[2:])]
    low_precision = [flag for flag in unknown if flag.startswith(("--fp8", "--fp4"))]
    strange = [flag for flag in unknown if flag not in args.ignored + low_precision]
    low_precision = [f"--{name}" for name in LOW_PRECISION if given(name)] + low_precision
    args.remarks = [f"Left out: {what} (--{name})." for name, what in LEFT_OUT.items() if given(name)]
    if low_precision:
        args.remarks.append(f"FP8 and FP4 ({' '.join(low_precision)}) are not modelled: all numbers are those of bf16.")
    if strange:
        args.remarks.append(f"Not simulated, and so without effect on these numbers: {' '.join(strange)}.")
    # `WORLD_SIZE=16 python pretrain_gpt.py`; launch scripts also compute it, from what --nproc-per-node says too.
    sizes = [word.removeprefix("WORLD_SIZE=") for word in rest if word.startswith("WORLD_SIZE=")]
    args.environment_world_size = next((int(s) for s in sizes if s.isascii() and s.isdecimal()), None)


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
    """Words of a launch line or script as a shell splits them, variables that it assigns put in, others left.

    No branch is followed: of several assignments the last counts, and flags of all branches do. An entry of an array
    such as "--split 99,1,0" is split, as it is where the array is used without quotes. Raises ValueError for
    unbalanced quotes, and for variables that hold themselves again and again.
    """
    values = {name: nodes for nodes in _NODES.findall(text) for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")}
    text = re.sub(r"\\\r?\n", " ", "\n".join(map(_without_comment, text.split("\n"))))
    values |= {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}
    for _ in range(4):  # variables of variables
        text = _put_in(text, values)
    text = _ARITHMETIC.sub(lambda match: _product(match, values), text)
    try:
        words = _split(text, punctuation="();|&")
        return [part for w in words for part in (_split(w) if w.startswith("--") and " " in w else [w])]
    except ValueError as error:
        raise ValueError(f"the launch line is not one of a shell: {str(error).lower()}; check its quotes") from error


def _without_comment(line: str) -> str:
    """A line up to its comment; where that has quotes, only if it is all of the line."""
    if line.lstrip().startswith("#"):
        return ""
    found = _COMMENT.search(line, max(line.rfind('"'), line.rfind("'")) + 1)
    return line[: found.start()] if found else line


def _split(text: str, punctuation: str = "") -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=punctuation)
    lexer.whitespace_split, lexer.commenters = True, "#"
    return list(lexer)


def _put_in(text: str, values: dict[str, str]) -> str:
    """Put values in the place of $NAME, ${NAME} and ${NAME:-DEFAULT}."""

    def value(match: re.Match[str]) -> str:
        default = match["default"]
        known = values.get(match["named"] or match["braced"], default and default.strip("\"'"))
        return match[0] if known is None else known

    size = len(text) + sum(len(value(match)) for match in _VARIABLE.finditer(text))
    if size > _MOST_CHARACTERS:
        raise ValueError(
            f"the launch line has up to {size} characters with its variables put in, and may have {_MOST_CHARACTERS}; "
            "give the part that starts the training"
        )
    return _VARIABLE.sub(value, text)


def _product(match: re.Match[str], values: dict[str, str]) -> str:
    """$((A * B / C)) of integers; anything else is left as it is."""
    numbers = [values.get(name, name) for name in re.split(r"[*/]", re.sub(r"\s", "", match[1]))]
    if not all(n.isascii() and n.isdecimal() and 0 < len(n) < 10 for n in numbers) or len(numbers) > 9:
        return match[0]
    result = int(numbers[0])
    for operator, number in zip(re.findall(r"[*/]", match[1]), map(int, numbers[1:]), strict=True):
        if operator == "/" and not number:
            return match[0]
        result = result * number if operator == "*" else result // number
    return str(result)


def _ended(words: Sequence[str]) -> list[str]:
    return [_END if _SHELL.fullmatch(word) else word for word in words]


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
