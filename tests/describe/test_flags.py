"""The flags are frozen: a new one needs a row of a benchmark that it moves, or somebody who cannot do without."""

import argparse

import pytest

from megatron_wlb.describe.arguments import BESIDE, LIST, marked
from megatron_wlb.describe.flags import RunSettings, add_wlb_arguments, given_in, unknown_in

REASONS = {
    "--wlb": "the plugin",
    "--no-load-wlb": "a run with delay whose state is lost",
    "--wlb-packing": "packing.json: imbalance by policy, Algorithm 1 by its thresholds; step_time.json: `ours, delay`",
    "--wlb-cp-sharding": "cp_balance.json: time of a layer by sharding",
    "--wlb-cp-gradients": "step_time.json: `dK and dV as the model`",
    "--wlb-micro-batches": "step_time.json: `ours, M = N` and `ours, auto`",
    "--wlb-max-tokens": "memory.json: activations by the longest micro-batch",
    "--wlb-memory-budget": "step_time.json, `settings.memory`: what fits a GPU",
    "--wlb-profile": "published.json: times by device and kernels",
    "--wlb-strict": "who wants no flag changed",
    "--wlb-digest": "what a step trained, against Megatron's own run",
    "--wlb-sft-skip": "conversations that upstream cuts off; one bad row of millions",
    "--wlb-mock-lengths": "documents.json: speed-ups by documents; memory.json: a rehearsal without data",
    "--wlb-log": "what `compare` reads",
}


def test_every_flag_has_a_reason():
    parser = add_wlb_arguments(argparse.ArgumentParser(add_help=False))
    assert {flag for action in parser._actions for flag in action.option_strings} == REASONS.keys()


def test_arguments_that_are_given_and_that_are_not_known_are_told_apart():
    parser = argparse.ArgumentParser(prog="train")
    parser.add_argument("--lr", type=float, default=1.0, help="100 % of it")
    parser.add_argument("--brand-new", type=int, default=3, help="5%% of %(prog)s")
    parser.set_defaults(brand_new=3, older=1)
    add_wlb_arguments(parser)
    help = parser.format_help()
    assert "100 % of it" in help and "5% of train" in help
    for words, unknown in (("--brand-new 3 --lr 2 --wlb-strict", {}), ("--brand-new 4", {"brand_new": "--brand-new"})):
        assert unknown_in(parser, parser.parse_args(words.split())) == unknown
    assert given_in(parser, "--lr 1 --wlb-packing paper other".split()) == {"lr", "wlb_packing"}


def test_rows_to_skip_are_long_or_broken():
    assert RunSettings(sft_skip=("long", "broken")).sft_skip == ("long", "broken")
    with pytest.raises(ValueError, match="--wlb-sft-skip has 'both'; give long, broken, or both with a comma"):
        RunSettings(sft_skip=("long", "both"))
    with pytest.raises(ValueError, match="--wlb-mock-lengths F3 must be F2"):
        RunSettings(mock_lengths="F3")


def test_marks_of_arguments_that_are_left_to_megatron():
    """A list of the step, a list beside it, and others of both."""
    names = ["mrope_section", "profile_ranks", "moe_aux_loss_coeff", "lr", "train_iters"]
    assert [(name in marked(LIST), name in marked(BESIDE)) for name in names] == [
        (True, False), (True, True), (True, False), (False, False), (False, True)
    ]  # fmt: skip
