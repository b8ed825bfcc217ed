"""Settings of planning and of the training run."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_wlb.describe.arguments import ARGUMENTS
from megatron_wlb.job import MAX_TOKENS, Sharding
from megatron_wlb.packing import DEFAULT_POLICY, POLICIES
from megatron_wlb.plan.mock import PROFILES, mock_lengths
from megatron_wlb.settings import Settings, integer_or_auto, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(Settings):
    """Settings of planning but packing and sharding; lengths in trained tokens."""

    micro_batches: int | Literal["auto"] = setting(
        "auto",
        "M: micro-batches of a step over all data-parallel ranks, for the same tokens per step; more of them shrink "
        "the pipeline's bubble, fewer are easier to balance. auto: with adaptive packing as many as are predicted to "
        "take least time for the first documents of the run, else --global-batch-size.",
        parse=integer_or_auto,
        word="auto",
        least=1,
        most=1 << 20,
    )
    max_tokens: int | Literal["auto"] | None = setting(
        None,
        "S_max: longest micro-batch in tokens, bounded by memory; at least --seq-length. auto: the largest whose "
        "activations fit --wlb-memory-budget. Default: the least that M allows, or 1.25 times as much or the most that "
        "fits memory, whichever is predicted to be faster.",
        parse=integer_or_auto,
        word="auto",
        least=1,
        most=MAX_TOKENS,
    )
    memory_budget: float | None = setting(
        None,
        "GiB that the activations of a pipeline stage may take, as predicted from S_max. Default: on GPUs with Adam "
        "nine tenths of the device's memory less weights and optimizer, else no limit.",
        parse=float,
        least=2**-10,
        most=1 << 10,
    )
    profile: str | None = setting(
        None,
        "Kernel times of the device: a shipped profile or a JSON file. Default: on GPUs by the device's name "
        "(cuDNN's from Hopper on, as TransformerEngine prefers); flops (counts attended pairs) without.",
    )

    @property
    def budget_bytes(self) -> float | None:
        """The memory budget; None: none is given."""
        return None if self.memory_budget is None else self.memory_budget * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Settings):
    """Settings of the training run that are not part of its job."""

    strict: bool = setting(
        False,
        "Refuse flags that --wlb would set or switch off, and name them, instead of doing so.",
    )
    digest: bool = setting(
        False,
        "Print after every step a digest of the inputs of the model and the loss, whatever the order: tokens, "
        "positions, masks, targets and weights. Given without --wlb, Megatron's own run prints its.",
    )
    sft_skip: tuple[str, ...] | None = setting(
        None,
        "Rows of --sft to skip; their number is printed: long, broken, or long,broken. long: conversations longer than "
        "--seq-length, else cut off there, as upstream does. broken: rows that are no conversations, or have no "
        "token to train, at which the run stops otherwise.",
        parse=lambda text: tuple(text.split(",")),
    )
    mock_lengths: str | None = setting(
        None,
        f"Lengths of the documents of --mock-data: {', '.join(PROFILES)}, or MU,SIGMA,SHARE,MINIMUM,ALPHA of a "
        "log-normal body and, for a share of the documents, a Pareto tail. Default: upstream's mock data.",
    )
    log: str | None = setting(None, "Append one JSON object a step to this file: loss, tokens, work, delays, shards.")

    def check(self) -> None:
        if unknown := {*(self.sft_skip or ())} - {"long", "broken"}:
            raise ValueError(f"--wlb-sft-skip has {unknown.pop()!r}; give long, broken, or both with a comma")
        if self.mock_lengths is not None:
            mock_lengths(self.mock_lengths)


def add_wlb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--wlb` and every setting's flag: upstream's `extra_args_provider`."""
    _mend_help(parser)
    group = parser.add_argument_group("workload-balanced training (megatron_wlb)")
    group.add_argument(
        "--wlb",
        action="store_true",
        help="Balance the work of micro-batches and context-parallel shards (WLB-LLM, OSDI'25).",
    )
    group.add_argument(
        "--no-load-wlb",
        action="store_true",
        dest="wlb_no_load",
        help="With delay: go on where documents that waited at the loaded checkpoint are missing or do not fit.",
    )
    policies = " ".join(f"{each.name}: {each.help}" for each in POLICIES.values()).replace("%", "%%")
    group.add_argument(
        "--wlb-packing",
        default=DEFAULT_POLICY,
        metavar=f"{{{','.join(POLICIES)}}}",
        help=f"How documents become micro-batches. {policies} Default: {DEFAULT_POLICY}.",
    )
    Sharding.add_flags(group)
    PlanSettings.add_flags(group)
    RunSettings.add_flags(group)
    return parser


def given_in(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> set[str]:
    """Return the names of arguments that `words` give; the parser keeps no defaults."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    return set(vars(parser.parse_known_args(words)[0]))


def unknown_in(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """Return the arguments, and their flags, that the table of upstream's has no row for, where not at their defaults.

    Call this before `given_in`.
    """
    return {
        action.dest: action.option_strings[0]
        for action in parser._actions
        if action.dest not in ARGUMENTS
        and not action.dest.startswith("wlb")
        and getattr(args, action.dest, action.default) != action.default
    }


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape lone percent signs in upstream's help texts, on which --help fails."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")
