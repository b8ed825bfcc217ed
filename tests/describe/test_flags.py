"""The flags are frozen: a new one needs a row of a benchmark that it moves, or somebody who cannot do without."""

import argparse
import re

import pytest

from megatron_wlb.describe import flags
from megatron_wlb.describe.flags import add_wlb_arguments

REASONS = {
    "--wlb": "the plugin",
    "--no-load-wlb": "a run with delay whose state is lost",
    "--wlb-packing": "packing.json: imbalance by policy, Algorithm 1 by its thresholds; step_time.json: `ours, delay`",
    "--wlb-cp-sharding": "cp_balance.json: time of a layer by sharding",
    "--wlb-cp-gradients": "step_time.json: `dK and dV as the model`",
    "--wlb-micro-batches": "step_time.json: `ours, M = N` and `ours, auto`",
    "--wlb-max-tokens": "memory.json: activations by the longest micro-batch",
    "--wlb-memory-budget": "step_time.json, `settings.memory`: what fits a GPU",
    "--wlb-documents": "convergence.json: whole documents",
    "--wlb-profile": "published.json: times by device and kernels",
    "--wlb-strict": "who wants no flag changed",
    "--wlb-digest": "what a step trained, against Megatron's own run",
    "--wlb-sft-skip": "conversations that upstream cuts off; one bad row of millions",
    "--wlb-mock-lengths": "memory.json: documents of a rehearsal without data",
    "--wlb-log": "what `compare` reads",
}


def parser():
    return add_wlb_arguments(argparse.ArgumentParser(add_help=False))


def test_every_flag_has_a_reason():
    actions = [action for action in parser()._actions if action.help != argparse.SUPPRESS]
    assert {flag for action in actions for flag in action.option_strings} == REASONS.keys()


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("--wlb-packing original", "--wlb-packing megatron"),
        ("--wlb-packing wlb --wlb-outlier-thresholds 96,160", "--wlb-packing paper:96,160"),
        ("--wlb-outlier-thresholds 96,160 --wlb-packing wlb", "--wlb-packing paper:96,160"),
        ("--wlb-max-delay-steps 20 --wlb-packing adaptive", "--wlb-packing adaptive:20"),
        ("--wlb-max-delay-steps 0 --wlb-packing wlb", "--wlb-packing paper"),
        ("--wlb-outlier-thresholds 96 --wlb-packing paper --wlb-packing paper:7", "--wlb-packing paper:7"),
        ("--wlb-cp-sharding wlb --wlb-packing adaptive:20 --wlb-packing adaptive", "--wlb-cp-sharding paper"),
        ("--wlb-cp-sharding wlb", "--wlb-cp-sharding paper"),
        ("--wlb-crossover 900", ""),
        ("--wlb-attention-backend te", ""),
        ("--wlb-sft-too-long drop --wlb-sft-broken skip", "--wlb-sft-skip long,broken"),
        ("--wlb-sft-too-long truncate --wlb-sft-broken skip", "--wlb-sft-skip broken"),
    ],
)
def test_former_flags_do_what_their_successors_do(former, now, capsys, monkeypatch):
    flags._warn.cache_clear()
    assert parser().parse_args(former.split()) == parser().parse_args(now.split())
    assert re.search("> wlb: --wlb-.* (is now|has no effect any more: see) --", capsys.readouterr().err)
    parser().parse_args([*former.split(), *former.split()])
    assert capsys.readouterr().err == ""  # said once
    monkeypatch.setenv("RANK", "1")
    flags._warn.cache_clear()
    parser().parse_args(former.split())
    assert capsys.readouterr().err == ""
