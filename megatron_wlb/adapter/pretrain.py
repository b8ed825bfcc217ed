"""`pretrain_gpt.py`: upstream's GPT pre-training, with `--wlb` or without."""

import os
import sys

import torch


def main(argv: list[str] | None = None) -> None:
    """Train a GPT as upstream's `pretrain_gpt.py` does. Bad input ends the process with one line and status 2."""
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    try:
        prepare()
        from megatron_wlb.adapter.gpt import parse, train

        args, job = parse()
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    train(args, job)


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
