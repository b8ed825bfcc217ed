"""Commands and logs are read as upstream's parser reads and prints them."""

import argparse
import re
import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.training import arguments, utils
from megatron.training.arguments import add_megatron_arguments

from megatron_wlb.cli.launch import LISTS, SWITCHES, read_command
from megatron_wlb.describe.arguments import ARGUMENTS, flag_of
from tests.cli.analyses import described
from tests.cli.conftest import data, lengths

__all__ = ["data", "lengths"]
FLAGS = {
    "dense": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 16",
    "llama": "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--swiglu --ffn-hidden-size 96 --seq-length 256 --global-batch-size 24 --tensor-model-parallel-size 2 "
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--sequence-parallel --hidden-dropout 0.0 --attention-dropout 0 --untie-embeddings-and-output-weights --seed 5 "
    "--recompute-activations --data-path 0.3 DATA 0.7 DATA --split 90,5,5 --use-distributed-optimizer "
    "--disable-bias-linear --overlap-grad-reduce --no-align-grad-reduce",
    "experts": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-router-topk 3 "
    "--moe-ffn-hidden-size 32 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --seq-length 128 "
    "--moe-shared-expert-intermediate-size 16 --global-batch-size 32 --micro-batch-size 2 --qk-layernorm --split 1",
    "refused": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 64 "
    "--micro-batch-size 4 --mock-data --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --dataloader-type cyclic",
    "layout": "--num-layers 9 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 16 "
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E(t|)*6tt|tL --no-overlap-p2p-communication",
    "ends": "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 16 "
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 0",
    "one expert": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --num-experts 1 "
    "--window-size 64,0 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1 "
    "--global-batch-size 8",
}
COMMON = (
    "--max-position-embeddings 256 --train-iters 3 --lr 1e-3 --bf16 --vocab-size 1000 --tokenizer-type NullTokenizer"
)
COMMAND = "--approximate -- torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py"


@pytest.fixture(scope="module")
def blocks(data):
    """What upstream prints of `FLAGS`, on 16 ranks."""
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(utils, "is_rank0", lambda: True)
        patch.setattr(arguments, "is_te_min_version", lambda *_, **__: True, raising=False)
        for name, value in (("WORLD_SIZE", "16"), ("RANK", "0"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")):
            patch.setenv(name, value)
        for name, flags in FLAGS.items():
            words = [*flags.replace("DATA", data).split(), *COMMON.split()] + ["--micro-batch-size", "1"] * (
                "--micro-batch" not in flags
            )
            patch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
            lines: list[str] = []
            patch.setattr("builtins.print", lambda *words, lines=lines, **_: lines.append(" ".join(map(str, words))))
            arguments.validate_args(arguments.parse_args())
            printed[name] = words, "\n".join(lines) + "\n"
    return printed


@pytest.mark.parametrize("name", FLAGS)
def test_a_log_says_what_the_flags_say(name, blocks, tmp_path):
    words, block = blocks[name]
    (tmp_path / "log").write_text(block)
    log, command = described(f"{tmp_path / 'log'} --approximate"), described(COMMAND, *map(shlex.quote, words))
    of_log = replace(log.job.parallel, etp=command.job.parallel.etp)
    assert replace(log.job, parallel=of_log) == command.job
    assert log.job.parallel.expert_tp == command.job.parallel.expert_tp
    for each in ("seed", "data_path", "micro_batch_size"):
        assert getattr(log.run.arguments, each) == getattr(command.run.arguments, each), each
    assert log.run.screened.left_out == command.run.screened.left_out
    assert set(log.run.screened.refused) == set(command.run.screened.refused)
    assert (log.run.arguments.split or "969,30,1").replace(" ", "") == (command.run.arguments.split or "969,30,1")
    overlaps = [bool(each.run.launched.stated.get("tp_comm_overlap")) for each in (log, command)]
    assert overlaps == [name == "refused"] * 2
    assert not [note for note in log.run.screened.remarks if re.search("Not simulated|refuses this run", note)]


def test_flags_take_as_many_words_as_upstreams():
    """Lists are those of its parser, and what takes a value there takes one here.

    A new argument fails `test_every_argument_of_upstreams_parser_has_a_row` alone, and this one once it has its row.
    """
    actions = add_megatron_arguments(argparse.ArgumentParser(add_help=False))._actions
    actions = [action for action in actions if action.dest in ARGUMENTS]
    assert {a.option_strings[0] for a in actions if a.nargs not in (None, 0)} <= {*map(flag_of, LISTS)}
    switches = {flag.removeprefix("--") for a in actions if a.nargs == 0 for flag in a.option_strings}
    assert switches <= SWITCHES and not SWITCHES & {f[2:] for a in actions if a.nargs != 0 for f in a.option_strings}
    valued = {a.option_strings[0] for a in actions if a.nargs != 0}
    for flag in valued - {"--hybrid-override-pattern"}:
        read_command(["python", "pretrain_gpt.py", flag, "4"], any_model=True)
