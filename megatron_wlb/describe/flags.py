"""The `--wlb-*` flags, for training and for commands."""

import argparse
from collections.abc import Sequence

from megatron_wlb import packing
from megatron_wlb.describe.settings import PlanSettings, RunSettings
from megatron_wlb.job import Sharding


def add_wlb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--wlb` and every setting's flag: upstream's `extra_args_provider`."""
    _mend_help(parser)
    group = parser.add_argument_group("workload-balanced training (megatron_wlb)")
    group.add_argument(
        "--wlb",
        action="store_true",
        help="Balance the work of micro-batches and context-parallel shards (WLB-LLM, OSDI'25).",
    )
    packing.add_flags(group)
    Sharding.add_flags(group)
    PlanSettings.add_flags(group)
    RunSettings.add_flags(group)
    return parser


def given_in(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> set[str]:
    """Return the names of the arguments that `words` (the command line) give, without those that only have defaults.

    The parser keeps no defaults afterwards.
    """
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    return set(vars(parser.parse_known_args(words)[0]))


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape lone percent signs in upstream's help texts, on which --help fails."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except ValueError:
            action.help = (action.help or "").replace("%", "%%")
