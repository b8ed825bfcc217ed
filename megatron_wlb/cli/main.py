"""Entry point: one subcommand a module; wrong input is one line on standard error and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_wlb import __version__
from megatron_wlb.cli import analyze, audit, compare, plan, profile, simulate, tune

EXTRAS = ("matplotlib", "pyarrow", "rich", "scipy")
"""Packages of the extra `analysis` that only some commands, inputs and policies need."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: the arguments of the process). Returns the exit code."""
    parser = _Parser(prog="megatron-wlb", description="WLB-LLM for Megatron-LM: planning without training.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    analyze.register(commands)
    plan.register(commands)
    audit.register(commands)
    tune.register(commands)
    profile.register(commands)
    simulate.register(commands)
    compare.register(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except BrokenPipeError:
        # The reader has gone, as in `| head`; without this the interpreter fails again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _refuse(args.command, f"{error.name} is not installed; pip install 'megatron-wlb[analysis]'")
    except (ValueError, OSError) as error:
        return _refuse(args.command, str(error))
    return 0


def _refuse(command: str, message: str) -> int:
    # Of a path or a name in it, control characters could write to the terminal.
    text = "".join(c if c.isprintable() else " " for c in message)
    print(f"megatron-wlb {command}: error: {' '.join(text.split())}", file=sys.stderr)
    return 2
