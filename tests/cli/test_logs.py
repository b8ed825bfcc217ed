"""Logs: blocks that upstream's own parser prints of a run's flags say what the flags say."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_wlb.cli.command import BLOCK, of_file
from tests.cli.analyses import JOB, described

FLAGS = {
    "dense": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 16",
    "llama": "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--swiglu --ffn-hidden-size 96 --seq-length 256 --global-batch-size 24 --tensor-model-parallel-size 2 "
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--sequence-parallel --hidden-dropout 0.0 --attention-dropout 0 --untie-embeddings-and-output-weights --seed 5 "
    "--recompute-activations --data-path 0.3 DATA 0.7 DATA --split 90,5,5 --use-distributed-optimizer",
    "experts": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-router-topk 3 "
    "--moe-ffn-hidden-size 32 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --seq-length 128 "
    "--moe-shared-expert-intermediate-size 16 --global-batch-size 32 --micro-batch-size 2 --qk-layernorm",
    "refused": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 64 "
    "--micro-batch-size 4 --mock-data --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --dataloader-type cyclic",
    "layout": "--num-layers 9 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 16 "
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E(t|)*6tt|tL",
    "ends": "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --global-batch-size 16 "
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 0",
    "one expert": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --num-experts 1 "
    "--window-size 64,0 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1 "
    "--global-batch-size 8",
}
COMMON = (
    "--max-position-embeddings 256 --train-iters 3 --lr 1e-3 --bf16 --vocab-size 1000 --tokenizer-type NullTokenizer"
)


@pytest.fixture(scope="module")
def blocks(data):
    """What upstream prints of `FLAGS`, on 16 ranks."""
    import torch
    from megatron.training import arguments, utils

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
    command = ("torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py", *words)
    log, typed = (described("--approximate", *each) for each in (("--launch", str(tmp_path / "log")), command))
    of_log = replace(log.job.parallel, etp=typed.job.parallel.etp)
    assert replace(log.job, parallel=of_log) == typed.job
    assert log.job.parallel.expert_tp == typed.job.parallel.expert_tp
    for each in ("seed", "data_path", "micro_batch_size", "left_out", "needs_dispatcher"):
        assert getattr(log.args, each) == getattr(typed.args, each), each
    assert set(log.args.refused) == set(typed.args.refused)
    assert (log.args.split or "969,30,1").replace(" ", "") == (typed.args.split or "969,30,1")
    assert bool(log.args.stated["tp_comm_overlap"]) == bool(typed.args.stated.get("tp_comm_overlap"))
    assert [note for note in log.notes if "Not simulated" in note] == []


def test_the_last_block_counts_whatever_stands_around_it(blocks, tmp_path):
    """A run that was requeued, with another rank's lines in between, and prefixes of srun and torchrun."""
    _, first = blocks["llama"]
    _, second = blocks["dense"]
    other = [f"[default0]:3: {line}\n[rank7]: a warning\n" for line in second.splitlines()]
    padded = "> padded vocab (size: 1000) with 536 dummy tokens (new size: 1536)\n"
    begun = first[: first.index("num_layers")]
    (tmp_path / "log").write_text(first + "iteration 1\n" + "".join(other) + padded + begun, encoding="latin-1")
    job = described("--launch", str(tmp_path / "log")).job
    assert (job.model.num_layers, job.model.padded_vocab_size, job.context_length) == (4, 1536, 128)
    extracted = os.popen(f"{BLOCK} {tmp_path / 'log'}").read()
    (tmp_path / "block").write_text(extracted)
    assert of_file(str(tmp_path / "block")).arguments["num_layers"] == "4"
    for text, message in ((begun, "holds a part"), (second.replace("  world_size", "  x"), "lack num_layers or world")):
        (tmp_path / "log").write_text(text)
        with pytest.raises(ValueError, match=message):
            of_file(str(tmp_path / "log"))


def test_flags_beside_a_log_overrule_it(blocks, data, tmp_path):
    (tmp_path / "log").write_text(blocks["llama"][1])
    args, job, _, _ = described(
        "--launch", str(tmp_path / "log"), "--num-gpus 32 --seq-length 512", "--data-path", data
    )
    assert (job.parallel.dp, job.context_length, args.data_path) == (4, 512, [data])


def test_logs_of_other_trainers_are_named(blocks, tmp_path, capsys):
    text = blocks["dense"][1].replace("  world_size", "  deepspeed ....... True\n  world_size")
    (tmp_path / "log").write_text(text)
    with pytest.raises(SystemExit):
        described(JOB, "--launch", str(tmp_path / "log"))
    assert "DeepSpeed does not train a GPT of Megatron-core" in capsys.readouterr().err
