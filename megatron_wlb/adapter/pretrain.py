"""`pretrain_gpt.py`: upstream's GPT pre-training, with `--wlb` or without."""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch


def main(argv: list[str] | None = None) -> None:
    """Train a GPT as upstream's `pretrain_gpt.py` does. Bad input ends the process with one line and status 2."""
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    with one_line():
        prepare()
        from megatron_wlb.adapter.gpt import parse, train

        args, job = parse()
    train(args, job)


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """End the process with status 2 and one line a node where bad input raises a ValueError."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # files may be missing on one node alone
            # Of a path in it, control characters could write to the terminal.
            text = "".join(c if c.isprintable() else " " for c in str(error))
            print(f"{os.path.basename(sys.argv[0])}: error: {text}", file=sys.stderr)
        raise SystemExit(2) from error


def prepare() -> None:
    """Check upstream's version; without a GPU, install `cpu` and add its flags. Before megatron is imported."""
    from megatron_wlb.adapter import compat, cpu

    without_gpu = not torch.cuda.is_available()
    if without_gpu:
        cpu.install()
    import megatron.core

    compat.check_version(megatron.core.__version__)  # of what runs: a checkout on PYTHONPATH has no metadata
    if without_gpu:
        sys.argv += cpu.FLAGS
        cpu.install_megatron()
