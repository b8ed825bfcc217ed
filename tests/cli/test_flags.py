"""The job that flags describe, the data that they name, and flags that contradict each other."""

import argparse
import json
import struct
from dataclasses import asdict

import numpy as np
import pytest
from megatron_wlb.cli.flags import settle

from tests.adapter.datasets import write_index
from tests.cli.analyses import FFN, JOB, MODEL, C, N, described
from tests.jobs import EDGES


def test_a_job_with_all_flags():
    words = (
        "--num-layers 14 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
        "--qk-layernorm --kv-channels 16 --mtp-num-layers 1 --swiglu --vocab-size 100 --seq-length 512 "
        "--global-batch-size 24 --num-gpus 48 "
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 2 --microbatch-group-size-per-virtual-pipeline-stage 4 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --recompute-granularity "
        "selective --recompute-modules mlp --hidden-dropout 0 --wlb-packing adaptive --wlb-max-tokens 640 "
        "--wlb-crossover 99 --wlb-cp-sharding hybrid --wlb-profile flops --wlb-save-gathered-kv"
    )
    args, job, data, notes = described(words)
    assert (args.global_batch_size, data) == (24, None)
    assert notes == ["Time is that of recomputing nothing; memory counts what --recompute flags say."]
    description = job.to_json()
    assert description["model"] == {
        **{"num_layers": 14, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8},
        **{"num_query_groups": 4, "padded_vocab_size": 256, "kv_channels": 16, "gated_linear_unit": True},
        **{"qk_layernorm": True, "moe_router_topk": 0, "mtp_num_layers": 1},
        **dict.fromkeys(("v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_pos_emb_head_dim"), 0),
    }
    assert description["parallel"] == {
        **{"tp": 2, "cp": 2, "pp": 4, "vpp": 2, "dp": 3, "ep": 1, "sequence_parallel": True, "group_size": 4},
        **{"split": asdict(EDGES), "etp": None},
    }
    assert description["recompute"]["granularity"] == "selective" and not job.hidden_dropout
    assert description["packing"] == {"name": "adaptive", "max_delay_steps": 30}
    assert (job.context_length, job.max_tokens, job.num_micro_batches) == (512, 640, 24)
    assert (job.crossover_tokens, job.sharding.cp_sharding, job.profile.name, job.sharding.save_gathered_kv) == (
        99,
        "hybrid",
        "flops",
        True,
    )


def test_a_job_with_latent_attention():
    """Sizes of latents count with the flag only: a log has them always."""
    words = "--q-lora-rank 48 --kv-lora-rank 64 --v-head-dim 96"
    model = described(JOB, words, "--multi-latent-attention").job.model
    assert (model.head_sizes, model.latent_size, model.num_query_groups) == ((192, 96), 48 + 64 + 64, 4)
    heads, hidden = model.num_attention_heads, model.hidden_size
    projections = [(48 + 64 + 64, hidden), (heads * 192, 48), (heads * (128 + 96), 64)]
    assert model.projections == projections
    assert model.layer_weights == sum(m * n for m, n in projections) + hidden * (heads * 96 + FFN * 2)
    assert described(JOB, words).job.model == described(JOB).job.model


def test_a_job_with_experts():
    words = "--num-gpus 8 --tensor-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 4"
    _, job, _, notes = described(JOB, words, "--expert-tensor-parallel-size 1 --moe-router-topk 3")
    assert (job.model.ffn_hidden_size, job.model.moe_router_topk) == (3 * FFN, 3)
    assert (job.parallel.ep, job.parallel.etp, job.parallel.expert_dp_ranks) == (4, 1, 2)
    assert any("those of the 3 experts" in note for note in notes)
    job = described(JOB, words, "--moe-ffn-hidden-size 100").job
    assert (job.model.ffn_hidden_size, job.model.moe_router_topk, job.parallel.expert_dp_ranks) == (200, 2, 4)
    assert described(JOB, "--moe-router-topk 3").job.model == described(JOB).job.model


def test_offloaded_layers():
    words = "--model llama2-7b --seq-length 4096 --cpu-offloading-num-layers 8"
    assert described(words).job.offloaded_layers == 8
    with pytest.raises(ValueError, match="neither with pipeline stages"):
        described(f"{words} --pipeline-model-parallel-size 2")


def test_what_is_assumed():
    _, job, _, notes = described(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --pipeline-model-parallel-size 2 "
        "--num-query-groups 2 --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B"
    )
    assert (job.parallel.num_gpus, job.num_micro_batches, job.profile.name) == (2, 2, "h100-fa2")
    assert (job.model.padded_vocab_size, job.model.num_query_groups) == (128256, 4)
    assert [note.partition(":")[0].partition(" counts")[0] for note in notes] == [
        *("--num-query-groups", "Assumed", "Assumed", "Assumed")
    ]


def test_the_vocabulary_of_a_tokenizer(tmp_path):
    words = f"{MODEL.split('--vocab')[0]} --seq-length 64"
    assert (
        described(words, "--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 2").job.model.padded_vocab_size
        == 50432
    )
    tokens = {"model": {"vocab": {"a": 0, "b": 299}}, "added_tokens": [{"id": 300}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    named = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    assert described(words, named, "--make-vocab-size-divisible-by 10").job.model.padded_vocab_size == 310
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"is no tokenizer of Hugging Face .*give --vocab-size"):
        described(words, named)
    with pytest.raises(
        ValueError, match="the vocabulary is not known; x has no tokenizer.json here; give --vocab-size"
    ):
        described(words, "--tokenizer-model x")


def test_sizes_beside_a_known_model():
    words = "--seq-length 4096 --tensor-model-parallel-size 8"
    known = described("--model llama2-70b", words).job
    assert (known.model.num_layers, known.model.num_query_groups) == (80, 8)
    changed = described("--model llama2-70b --num-layers 40", words).job
    assert changed.to_json()["model"] == known.to_json()["model"] | {"num_layers": 40}


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ("", 1),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4", 8),
        ("--fp8-format hybrid", 16),
        ("--fp8-recipe mxfp8", 1),
        ("--fp8-format hybrid --fp8-recipe mxfp8 --context-parallel-size 2", 64),
        ("--fp8-format hybrid --context-parallel-size 2 --tensor-model-parallel-size 4", 128),
        ("--fp4-format e2m1 --fp4-recipe nvfp4 --context-parallel-size 2", 256),
    ],
)
def test_micro_batches_are_aligned_for_ranks_and_kernels(flags, unit):
    assert described(JOB, flags).job.unit_tokens == unit


def test_memory_bounds_micro_batches():
    budget = JOB, "--context-parallel-size 4 --wlb-memory-budget 1 --wlb-max-tokens auto"
    plain, saved = (described(*budget, flag).job.max_tokens for flag in ("", "--wlb-save-gathered-kv"))
    assert C <= saved < plain
    _, job, _, notes = described(JOB, "--wlb-max-tokens auto")  # memory that only a GPU knows
    assert job.max_tokens == 1.25 * C
    assert any("an S_max of 1.25 windows" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-gpus 6 --tensor-model-parallel-size 4", r"6 GPUs are no multiple of .* 4 x 1 x 1 = 4"),
        ("--nproc-per-node 3 --context-parallel-size 2", r"3 GPUs are no multiple"),
        ("--nproc-per-node gpu", r"--nproc-per-node gpu is not a number; .* --num-gpus"),
        ("--nproc-per-node 8 --nnodes 1:4", r"--nnodes 1:4 is not a number"),
        ("--nnodes 2", r"--nnodes without --nproc-per-node"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", r"do not divide 2 layers"),
        ("--hidden-size 510", r"--num-attention-heads 4 does not divide --hidden-size 510"),
        ("--group-query-attention --num-query-groups 3", r"--num-query-groups 3 does not divide 4 attention heads"),
        ("--seq-length 4098 --context-parallel-size 4", r"4098, which 4 context-parallel .* give a multiple of 8"),
        ("--num-gpus 3", r"4 micro-batches a step cannot be shared by 3 data-parallel ranks"),
        ("--expert-model-parallel-size 2 --num-gpus 2", r"without --num-experts; give both or none"),
        ("--num-experts 4 --expert-model-parallel-size 4 --num-gpus 2", r"4 expert-parallel x 1 .* do not divide"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|mL", r"Et\|mL is not E, then t and"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|tL|",
            r"E\|t\|tL\| is not E, then t and",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|tL",
            r"E\|t\|tL has 3 virtual stages, no multiple of 2 pipeline stages",
        ),
        (
            "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 0 "
            "--num-layers-per-virtual-pipeline-stage 1",
            r"give --num-virtual-stages-per-pipeline-rank",
        ),
        ("--wlb-packing best", r"--wlb-packing is 'best'; choose one of"),
        ("--wlb-max-tokens 100", r"--wlb-max-tokens 100 is under --seq-length 4096"),
        ("--wlb-memory-budget 0.001", r"micro-batches of at most \d+ tokens fit into memory"),
        ("--wlb-profile none.json", r"no profile 'none.json'"),
        ("--data-path DATA --split 0,1", r"--split 0,1: give shares"),
        ("--data-path -1 DATA", r"weights must be over 0"),
        ("--per-split-data-args-path DATA.idx", r"holds no training blend \(.*; give JSON such as"),
    ],
)
def test_contradictions_are_refused(data, words, message):
    with pytest.raises(ValueError, match=message):
        described(JOB, words.replace("DATA", data))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (MODEL, r"no --seq-length; give"),
        ("--seq-length 64 --num-layers 2", r"no --hidden-size, --num-attention-heads: give the sizes of the model"),
    ],
)
def test_what_is_missing_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        described(words)


def test_a_flag_that_a_file_contradicts_is_refused():
    args = argparse.Namespace(seq_length=None, wlb_packing="original")
    settle(args, {"seq_length": 64, "wlb_packing": "original"}, "plan.jsonl")
    assert args.seq_length == 64
    with pytest.raises(ValueError, match=r"--wlb-packing is original, and plan.jsonl was made with wlb; leave it out"):
        settle(args, {"wlb_packing": "wlb"}, "plan.jsonl")


def test_blend_and_split(tmp_path, data, lengths):
    other = str(tmp_path / "other")
    write_index(tmp_path / "other.idx", np.full(100, 65))
    words = [MODEL, f"--seq-length {C} --global-batch-size {N} --split 80,10,10 --data-path"]
    blend = described(*words, f"0.25 {data} 0.75 {other}.idx").data
    assert blend.prefixes == [data, f"{other}.idx"] and blend.has_validation
    assert [(source.weight, source.first) for source in blend.sources] == [(0.25, 0), (0.75, 6400)]
    assert [source.lengths.tolist() for source in blend.sources] == [lengths[:6400].tolist(), [64] * 80]
    by_size = described(*words, data, other).data  # as upstream without weights
    assert [source.weight for source in by_size.sources] == [lengths[:6400].sum(), 80 * 64]
    _, _, whole, notes = described(MODEL, f"--seq-length {C} --data-path", data)
    assert len(whole.sources[0].lengths) == 7752
    assert "Assumed: --split 969,30,1, Megatron's default." in notes
    assert not described(JOB, "--data-path", data).data.has_validation


def test_blends_as_training_reads_them(tmp_path, data, lengths):
    """From a file, which --split divides, and by split, which it does not; --data-path counts before them."""
    (tmp_path / "blend.txt").write_text(f"1.0\n{data}\n")
    for name, blend in (("words", [1, data]), ("text", f"1 {data}")):
        (tmp_path / name).write_text(json.dumps({"train": blend, "valid": None, "test": None}))
    for flag, documents in (
        (f"--data-args-path {tmp_path / 'blend.txt'}", 4000),
        (f"--per-split-data-args-path {tmp_path / 'words'}", 8000),
        (f"--per-split-data-args-path {tmp_path / 'text'}", 8000),
        (f"--train-data-path {data} --valid-data-path {data}", 8000),
        (f"--train-data-path 1 {data} --data-path {data}", 4000),
    ):
        found = described(MODEL, f"--seq-length {C} --split 50,50,0", flag).data
        assert found.prefixes == [data], flag
        assert [source.lengths.tolist() for source in found.sources] == [lengths[:documents].tolist()], flag


def header(sequences, boundaries):
    return b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, sequences, boundaries)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"corpus.idx does not exist"),
        (b"", r"the file is truncated"),
        (b"parquet!!" + bytes(40), r"is not a Megatron .idx file"),
        (header(0, 1) + bytes(8), r"corpus.idx holds no document"),
        (header(1, 2) + struct.pack("<iqqq", 1, 0, 0, 1), r"no document of at least 2 tokens"),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "corpus.idx").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        described(f"{JOB} --data-path {tmp_path / 'corpus'}")
