"""Each example of a loop balances it from its import on, until it is taken back."""

import importlib
import sys

import pytest

from tests.loops.test_loops import module

PARTITIONS = "seqlen_list, k_partitions, equal_size"
MICRO_BATCHES = "batch, max_token_len, dp_group, num_batches_divided_by, same_micro_num_in_dp, min_num_micro_batch"
SCHEDULE = "args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices"
PACKER = "algorithm, bin_capacity, collect_metrics, min_bin_count, bin_count_multiple"
LOOPS = {
    "verl": (
        "verl.utils.seqlen_balancing",
        {
            "get_seqlen_balanced_partitions": PARTITIONS,
            "rearrange_micro_batches": f"{MICRO_BATCHES}, use_dynamic_bsz_balance, force_group_size",
        },
    ),
    "slime": ("slime.utils.dp_schedule", {"build_dp_schedule": SCHEDULE}),
    "nemo_rl": ("nemo_rl.data.packing.algorithms", {"get_packer": PACKER}),
    "ms_swift": (
        "swift.dataset.packing",
        {"calculate_matched_group": "sequences, packing_length, is_finished, strategy"},
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_is_balanced_until_it_is_taken_back(name, monkeypatch):
    where, functions = LOOPS[name]
    theirs = {function: eval(f"lambda {parameters}: None") for function, parameters in functions.items()}
    others = {"calculate_workload": lambda d: 24_576 * d + d * d, "SequencePacker": object}
    loop = module(monkeypatch, where, **theirs, **others)
    monkeypatch.delitem(sys.modules, f"examples.balance_{name}", raising=False)
    example = importlib.import_module(f"examples.balance_{name}")
    assert all(getattr(loop, function) is not original for function, original in theirs.items())
    example.UNDO.close()
    assert all(getattr(loop, function) is original for function, original in theirs.items())
