"""Settings of planning and of the training run."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_wlb import packing
from megatron_wlb.job import MAX_TOKENS, Sharding
from megatron_wlb.plan.mock import mock_lengths
from megatron_wlb.settings import Settings, integer_or_auto, setting

ATTENTION_BACKENDS = ("auto", "aten", "flash_attn_3", "te", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(Settings):
    """Settings of planning but packing and sharding; lengths in trained tokens."""

    micro_batches: int | Literal["auto"] = setting(
        "auto",
        "M: micro-batches of a step over all data-parallel ranks, for the same tokens a step; more of them empty the "
        "pipeline's bubble, fewer make delay needless. auto: with adaptive packing as many as are predicted to take "
        "least time for the first documents of the run, else --global-batch-size.",
        parse=integer_or_auto,
        word="auto",
        least=1,
        most=1 << 20,
    )
    max_tokens: int | Literal["auto"] | None = setting(
        None,
        "S_max: longest micro-batch in tokens, bounded by memory; at least --seq-length. auto: the largest whose "
        "activations fit --wlb-memory-budget. Default: 1.25 times --seq-length, or 1.25 times the mean micro-batch if "
        "that is longer.",
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
    crossover: int | None = setting(
        None,
        "Document length at which attention costs as much as everything else in a layer. Default: by the predicted "
        "times of the model with --wlb-profile; by its FLOPs where that is flops.",
        parse=int,
        least=1,
        most=1 << 35,
    )
    defer_weight_gradients: str = setting(
        "auto",
        "Products for weight gradients of linear layers leave the backward passes of a pipeline and run where the plan "
        "of the step has their stage wait. auto: where there is a pipeline and its layers can.",
        choices=("auto", "on", "off"),
    )
    profile: str | None = setting(
        None,
        "Kernel times of the device: a shipped profile or a JSON file. Default: on GPUs h100-cudnn, or a100-fa2 before "
        "compute capability 9.0, as TransformerEngine prefers; flops (counts attended pairs) without.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Settings):
    """Settings of the training run that are not part of its job."""

    attention_backend: str = setting(
        "auto",
        "Kernels under context-parallel attention. aten: FlashAttention-2, which torch ships. flash_attn_3, te: the "
        "packages FlashAttention-3 and TransformerEngine. auto: on GPUs the first that passes a small test, from "
        "Hopper on in the order flash_attn_3, te, aten, on older GPUs aten, te; without a GPU cpu.",
        choices=ATTENTION_BACKENDS,
    )
    strict: bool = setting(
        False,
        "Refuse flags that --wlb would set or switch off, and name them, instead of doing so.",
    )
    restart_packing: bool = setting(
        False,
        "Where the packer state of the loaded checkpoint is missing or does not fit (another dataset, window or "
        "policy), begin with the data anew instead of stopping.",
    )
    document_log: str | None = setting(
        None,
        "Append which documents every step trained to this file, a few bytes each; `megatron-wlb audit` checks that "
        "none was lost or doubled over restarts.",
    )
    sft_too_long: str = setting(
        "drop",
        "What happens to conversations of --sft that are longer than --seq-length. drop: left out. truncate: cut off "
        "there, as upstream does.",
        choices=("drop", "truncate"),
    )
    sft_broken: str = setting(
        "error",
        "What happens to rows of --sft that are no conversations, or have no token to train. error: the run stops. "
        "skip: they are left out, and counted.",
        choices=("error", "skip"),
    )
    mock_lengths: str = setting(
        "F2",
        "Lengths of the documents of --mock-data: F2, or MU,SIGMA,SHARE,MINIMUM,ALPHA of a log-normal body and, for a "
        "share of the documents, a Pareto tail.",
    )
    log: str | None = setting(None, "Append one JSON object a step to this file: loss, tokens, work, delays, shards.")

    def check(self) -> None:
        mock_lengths(self.mock_lengths)
        if self.log and self.document_log and os.path.realpath(self.log) == os.path.realpath(self.document_log):
            raise ValueError(f"--wlb-log and --wlb-document-log are both {self.log}; name two files")


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
    """Return the names of arguments that `words` give; the parser keeps no defaults."""
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
