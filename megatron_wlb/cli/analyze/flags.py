"""A Megatron launch line as it is: torchrun, script name and all; what matters to a prediction, and what does not."""

import argparse
import re
import shlex
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.adapter.arguments import add_wlb_arguments
from megatron_wlb.cli.plan import integer
from megatron_wlb.simulate import MODELS

_SHELL = re.compile(r"[();|&]+|\d*[<>].*|&>.*")
_ASSIGNMENT = re.compile(r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;()`$&|]+)""", re.MULTILINE)
_MOST_CHARACTERS = 1 << 20
"""Of a launch line whose variables are put in."""
_END = "--;"
"""Stands for whatever ends a command in a script: no flag takes values beyond it."""
NOT_SIMULATED = {
    "num-experts": "mixture of experts",
    "multi-latent-attention": "multi-latent attention",
    "window-size": "sliding windows",
    "mtp-num-layers": "multi-token prediction",
    "rampup-batch-size": "a batch size that changes",
    "pipeline-model-parallel-layout": "stages of unequal layers",
    "decoder-first-pipeline-num-layers": "stages of unequal layers",
    "decoder-last-pipeline-num-layers": "stages of unequal layers",
    "mock-data": "mock data",
    "yaml-cfg": "a YAML file of flags",
}
"""Flags that change what would be predicted, and that the simulation does not know: refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of training that matter, by Megatron's names, and those that this command adds."""
    count, size = integer(1, 1 << 20), integer(1, 1 << 24)
    parser.add_argument("--launch", metavar="FILE", help="a launch line or script with the flags; - for standard input")
    data = parser.add_argument_group("data")
    data.add_argument("--data-path", "--train-data-path", nargs="*", metavar="PREFIX", help=".idx, or a blend of them")
    data.add_argument("--split", metavar="a,b,c", help="as Megatron; default: 969,30,1")
    data.add_argument("--seed", type=integer(0, 1 << 62), default=1234, metavar="N", help="default: %(default)s")
    model = parser.add_argument_group("model", "a known one, or its sizes; sizes beside --model change it")
    model.add_argument("--model", choices=MODELS)
    for name in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups"):
        model.add_argument(f"--{name}", type=count, metavar="N")
    model.add_argument("--kv-channels", type=count, metavar="N")
    model.add_argument("--vocab-size", "--padded-vocab-size", type=size, metavar="N")
    for name in ("group-query-attention", "swiglu"):
        model.add_argument(f"--{name}", action="store_true")
    model.add_argument("--hidden-dropout", type=float, default=0.1, metavar="P", help="default: %(default)s")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--seq-length", type=integer(2, 1 << 26), metavar="C", help="context window in tokens")
    layout.add_argument("--global-batch-size", type=count, metavar="N", help="default: PP x DP micro-batches")
    layout.add_argument("--micro-batch-size", type=count, default=1, metavar="1")
    for name in ("tensor-model", "context", "pipeline-model"):
        layout.add_argument(f"--{name}-parallel-size", type=count, default=1, metavar="N")
    chunks = layout.add_mutually_exclusive_group()
    for name in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        chunks.add_argument(f"--{name}", type=count, metavar="N")
    layout.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=count, metavar="N")
    for name in ("embedding", "loss"):
        layout.add_argument(f"--account-for-{name}-in-pipeline-split", action="store_true")
    layout.add_argument("--recompute-granularity", choices=("full", "selective"))
    layout.add_argument("--num-gpus", "--world-size", type=count, metavar="N", help="default: one data-parallel rank")
    layout.add_argument("--nproc-per-node", "--nproc_per_node", metavar="N")
    layout.add_argument("--nnodes", metavar="N")
    for name in NOT_SIMULATED:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    add_wlb_arguments(parser)
    parser.set_defaults(wlb_packing="adaptive")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], namespace: argparse.Namespace | None
) -> argparse.Namespace:
    """Arguments of the command, of which those that don't matter are named in `ignored` (flags, in order).

    Exits with an error for what is refused.
    """
    try:
        words = [_END if _SHELL.fullmatch(word) else word for word in _files_expanded(list(arguments))]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    args, rest = argparse.ArgumentParser.parse_known_args(parser, words, namespace)
    for name, what in NOT_SIMULATED.items():
        if getattr(args, name.replace("-", "_")) is not None:
            parser.error(f"--{name}: {what} cannot be simulated; leave it out for an estimate without")
    unknown = [word.split("=")[0] for word in rest if word.startswith("--") and word not in (_END, "--")]
    ours = [flag for flag in unknown if flag.startswith("--wlb")]
    if ours:
        parser.error(f"{ours[0]} is no flag of ours")
    args.ignored = list(dict.fromkeys(unknown))
    # `WORLD_SIZE=16 python pretrain_gpt.py`; launch scripts also compute it, from what --nproc-per-node says too.
    sizes = [word.removeprefix("WORLD_SIZE=") for word in rest if word.startswith("WORLD_SIZE=")]
    args.environment_world_size = next((int(s) for s in sizes if s.isascii() and s.isdecimal()), None)
    return args


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

    Raises ValueError for unbalanced quotes, and for variables that hold themselves again and again.
    """
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    values = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}
    for _ in range(4):  # variables of variables
        text = _put_in(text, values)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError as error:
        raise ValueError(f"the launch line is not one of a shell: {str(error).lower()}; check its quotes") from error


def _put_in(text: str, values: dict[str, str]) -> str:
    names = (match["named"] or match["braced"] for match in string.Template.pattern.finditer(text))
    size = len(text) + sum(len(values.get(name, "")) for name in names)
    if size > _MOST_CHARACTERS:
        raise ValueError(
            f"the launch line has up to {size} characters with its variables put in, and may have {_MOST_CHARACTERS}; "
            "give the part that starts the training"
        )
    return string.Template(text).safe_substitute(values)


def _files_expanded(arguments: list[str]) -> list[str]:
    """Put the words of the file in the place of `--launch FILE`."""
    for i, argument in enumerate(arguments):
        flag, equals, name = argument.partition("=")
        if flag == "--launch" and (equals or i + 1 < len(arguments)):
            stop = i + 1 if equals else i + 2
            name = name if equals else arguments[i + 1]
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
            return [*arguments[:i], _END, *words_of(text), _END, *arguments[stop:]]
    return arguments
