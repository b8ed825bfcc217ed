"""Entry point of `megatron-wlb`; wrong input is one line and exit code 2.

A command is a module with `USAGE`, `add_arguments(parser)` and `run(args)`; its docstring is its help: the first line
after the colon in the list of commands, the rest of it behind `COMMAND --help`. `args` also have all words that were
`typed`, a run's `flags` among them, and its command behind --, `launched`.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from megatron_wlb import __version__, files
from megatron_wlb.cli import analyze, compare, profile, trial
from megatron_wlb.settings import printable

COMMANDS = (analyze, trial, profile, compare)
EXTRAS = dict.fromkeys(("jinja2", "matplotlib", "rich", "scipy", "tensorboard", "tree_sitter"), "analysis")
EXTRAS |= dict.fromkeys(("torch", "megatron"), "train")
"""Packages that only some commands need, and the extra that each comes with."""
MOST_OF_A_WORD, MOST_OF_A_LINE = 200, 1000
"""Most characters of a word and of the line of an error."""


class Parser(argparse.ArgumentParser):
    """Reports wrong input in one line, and leaves a run's flags to `read_flags`."""

    def __init__(self, **options: Any) -> None:
        # No abbreviations: --save is Megatron's.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def divide(self, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Divide words into this parser's, other flags with their values, and a run's command behind --."""
        end = words.index("--") if "--" in words else len(words)
        own, others = list[str](), list[str]()
        into = own
        for word in words[:end]:
            if re.match("--?[A-Za-z]", word):
                into = own if word.partition("=")[0] in self._option_string_actions else others
            into.append(word)
        return own, others, list(words[end + 1 :])

    def error(self, message: str) -> NoReturn:
        self.exit(2, refusal(self.prog, f"{message}; see {self.prog} --help"))


class _Version(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: Any, *_: Any) -> None:
        print(version())
        parser.exit()


def version() -> str:
    """Return the version, the commit of a clone, and the versions of the packages that train."""
    root, commit = Path(__file__).parents[2], ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError):
            command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    found = [f"megatron-wlb {__version__}{f' ({commit})' * bool(commit)}"]
    for name in ("megatron-core", "torch", "transformer-engine"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


@files.ending()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: the arguments of the process). Returns the exit code."""
    parser = Parser(prog="megatron-wlb", description="WLB-LLM for Megatron-LM, without training.")
    parser.add_argument("--version", action=_Version, help="show versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        first, _, rest = (module.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            help=first.partition(": ")[2].rstrip("."),
            usage=f"%(prog)s {module.USAGE}",
            description=rest,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    words = list(sys.argv[1:] if argv is None else argv)
    command = commands.choices.get(words[0], parser) if words else parser
    own, flags, launched = command.divide(words[1:])
    args, unknown = parser.parse_known_args([*words[:1], *own])
    unknown += flags if args.run is compare.run else []
    unknown += launched if args.run not in (analyze.run, trial.run) else []
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.typed, args.flags, args.launched = words, flags, launched
    return in_one_line(f"megatron-wlb {args.command}", lambda: args.run(args))


def in_one_line(program: str, run: Callable[[], int | None]) -> int:
    """Run a program; wrong input is one line. Returns the exit code."""
    files.INPUTS.clear()
    try:
        return run() or 0
    except BrokenPipeError:
        # The reader has closed the pipe, as in `| head`. Without this, the interpreter fails again when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _refuse(program, f"{error.name} is not installed; pip install '.[{EXTRAS[error.name]}]' in a clone")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _refuse(program, f"{where}{error.strerror or error}; check the name, rights and space")
    except ValueError as error:
        return _refuse(program, str(error))


def _refuse(program: str, message: str) -> int:
    print(refusal(program, message), end="", file=sys.stderr)
    return 2


def refusal(program: str, message: str) -> str:
    """Format an error as one line."""
    words = (
        word if len(word) <= MOST_OF_A_WORD else f"{word[:MOST_OF_A_WORD]}..." for word in printable(message).split()
    )
    line = " ".join(words)
    return f"{program}: error: {line if len(line) <= MOST_OF_A_LINE else f'{line[:MOST_OF_A_LINE]}...'}\n"
