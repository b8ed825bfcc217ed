"""The flags are frozen: a new one needs a row of a benchmark that it moves, or somebody who cannot do without."""

import argparse

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
