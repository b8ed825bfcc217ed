"""The run that flags describe: its job, what is assumed of it, its data, and flags that contradict each other."""

import json
import re

import numpy as np
import pytest

from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, MODEL, C, N, described, refused, run


def test_what_is_assumed():
    _, job, _ = found = described(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --pipeline-model-parallel-size 2 "
        "--num-query-groups 2 --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B "
        "--num-experts 8"
    )
    assert (job.parallel.num_gpus, job.num_micro_batches, job.profile.name) == (2, 2, "h100-cudnn")
    assert (job.model.padded_vocab_size, job.model.num_query_groups) == (128256, 4)
    assert job.parallel.sequence_parallel
    words = f"{JOB.replace(f'--global-batch-size {N}', '')} --num-gpus 2 --micro-batch-size 3"
    assert run(words).job().global_batch_size == 6
    assert "Assumed: 6 context windows per step, PP x DP x --micro-batch-size" in " ".join(run(words).notes)
    schedule = f"-- torchrun --nproc-per-node 1 pretrain_gpt.py {JOB} --step-batch-size-schedule 0:4"
    assert run("--global-batch-size 8", schedule).job().global_batch_size == 8
    for note, begin in zip(
        found.run.notes,
        ("Assumed: 2 GPUs", "Assumed: 2 context windows per step, PP x DP", "Assumed: the vocabulary of llama3-8b",
         "--num-query-groups counts with", "Experts get equally many tokens, .*1.22 times as long a step"),
        strict=True,
    ):  # fmt: skip
        assert note.startswith(begin.split(".*")[0]) and begin.split(".*")[-1] in note


def test_the_vocabulary_of_a_tokenizer(tmp_path):
    words = f"{MODEL.split('--vocab')[0]} --seq-length 64"

    def size(*more):
        return described(words, *more).job.model.padded_vocab_size

    assert size("--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 2") == 50432
    assert size("--padded-vocab-size 500") == 500
    file = tmp_path / "tokenizer.json"
    named = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --make-vocab-size-divisible-by 10"
    for vocabulary in ({"a": 0, "b": 299}, [["a", -1.0]] * 300):
        file.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 300}]}))
        assert size(named) == 310
    file.write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"is no tokenizer of Hugging Face .*give --vocab-size"):
        size(named)
    with pytest.raises(ValueError, match=r"not known; x has no tokenizer.json here; give --vocab-size"):
        size("--tokenizer-model x")


def test_memory_bounds_micro_batches():
    sizes = JOB, "--context-parallel-size 4 --wlb-max-tokens auto --wlb-memory-budget"
    assert C <= described(*sizes, "1").job.max_tokens < described(*sizes, "2").job.max_tokens
    of_gpu = run(JOB, "--wlb-max-tokens auto").on_device()  # one of 80 GiB
    budget_gib = of_gpu.budget / 2**30
    assert 71 < budget_gib < 72 and not any("is not known" in note for note in of_gpu.notes)
    same = described(JOB, f"--wlb-max-tokens auto --wlb-memory-budget {budget_gib!r}").job
    assert of_gpu.job().max_tokens == same.max_tokens > 1.25 * C
    for flags, why in (
        ("--optimizer sgd", "the memory that weights and optimizer leave is not known. Give --wlb-memory-budget"),
        ("--hybrid-layer-pattern M*M*", "the memory that weights and optimizer leave is not known"),
        ("--num-layers 999 --hidden-size 8192", "Training refuses this on GPUs of 80 GiB, .* at most 0 tokens fit"),
    ):
        unknown = run("--wlb-max-tokens auto -- torchrun --nproc-per-node 1 pretrain_gpt.py", JOB, flags).on_device()
        assert unknown.budget is None and unknown.job().max_tokens == 1.25 * C
        assert any(re.search(why, said) for said in (*unknown.notes, *unknown.screened.remarks))


def test_known_models_keep_their_sizes_in_other_layouts():
    for given in ("--num-experts 256", ""):
        job = run(f"--model deepseek-v3 --seq-length 4096 {given} --expert-model-parallel-size 8 --num-gpus 8").job()
        assert (job.parallel.ep, job.model.moe_router_topk, job.model.ffn_hidden_size) == (8, 8, 9 * 2048)
    stages = (
        "--model llama2-7b --seq-length 4096 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    )
    assert run(stages).job().parallel.vpp == 4


def test_tied_embeddings_count_once_on_one_stage():
    """In bf16 with an optimizer in fp32: 18 bytes a weight."""
    words = "-- torchrun --nproc-per-node 1 pretrain_gpt.py", JOB, "--vocab-size 1280 --make-vocab-size-divisible-by 1"
    tied, untied = (run(*words, flag) for flag in ("", "--untie-embeddings-and-output-weights"))
    assert (
        tied.budget_bytes(tied.job()) - untied.budget_bytes(untied.job()) == 18 * 1280 * untied.job().model.hidden_size
    )


def test_a_gpu_chooses_profile_and_memory_and_what_proves_another_is_said_first():
    def found(*words):
        of_run = run(JOB, *words)
        return of_run.job(), of_run.screened.remarks

    assert found()[0].profile.name == found("--gpu h100")[0].profile.name == "h100-cudnn"
    job, remarks = found("--gpu B200 --fp8-format e4m3 --fp8-recipe mxfp8")
    assert (job.profile.name, job.precision, remarks) == ("b200-cudnn-2025", "mxfp8", [])
    assert found("--gpu gb300 --fp4-format e2m1")[0].precision == "nvfp4"
    assert found("--fp8-format hybrid")[0].precision == "delayed"
    job, remarks = found("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-dot-product-attention")
    assert remarks[0].startswith("Profile h100-cudnn (NVIDIA H100) has no rate of mxfp8") and len(remarks) == 2
    job, remarks = found("--gpu gb200 --wlb-profile h100-fa3")
    assert job.profile.name == "h100-fa3" and remarks[0].endswith("device is gb200: take gb200-cudnn-9.22.")
    assert job.moe_dispatcher == "alltoall"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{JOB.split(' --vocab')[0]} --seq-length 64", "^the vocabulary is not known; give --vocab-size"),
        (f"{JOB} --experimental-attention-variant dsa", "another attention cannot be simulated; give --approximate"),
        (f"{JOB} DATA --wlb-memory-budget 0.001", r"micro-batches of at most \d+ tokens fit into memory"),
        (f"{JOB} --wlb-profile none.json", "no profile 'none.json'"),
        (f"{JOB} DATA --split 0,1", "--split 0,1: give shares"),
        (f"{JOB} --data-path -1 PREFIX", "weights must be positive and finite"),
        (f"{JOB} --per-split-data-args-path PREFIX.idx", r"holds no training blend \(.*; give JSON such as"),
        (JOB, "no --data-path; give"),
        (
            f"-- torchrun --nproc-per-node 1 pretrain_gpt.py {JOB} --step-batch-size-schedule 0:4",
            "several sizes; give the --global",
        ),
        (f"{JOB} DATA --num-layers 5 --pipeline-model-parallel-size 2", "5 layers do not divide over 2 stages"),
        (f"{JOB} DATA --wlb-profile flops", "profile flops counts attended pairs"),
        (f"{JOB} DATA --gpu mi300x", "no profile of mi300x; give one of .* measure it by"),
        (f"{JOB} DATA --micro-batch-size 3", "--micro-batch-size 3 does not divide the 4 windows"),
        (f"{JOB} DATA --global-batch-size 1048576", "--global-batch-size 1048576 is over 16384, too many to sim"),
        (f"{JOB} DATA --wlb-micro-batches 65536", "--wlb-micro-batches 65536 is over 16384, too many to simulate; div"),
        (f"{JOB} DATA --html - --json -", "would be mixed on standard output"),
        (f"{JOB} DATA --html no/such/report.html", "--html no/such/report.html: the folder .* does not exist"),
        (f"{JOB} DATA --steps 0", "--steps: '0' must be an integer from 1 to 16384"),
    ],
)
def test_contradictions_are_refused(data, words, message, capsys):
    refused(capsys, words.replace("DATA", "--data-path PREFIX").replace("PREFIX", data), message)


def test_blend_and_split(tmp_path, data, lengths):
    other = str(tmp_path / "other")
    write_index(tmp_path / "other.idx", np.full(100, 64))
    words = [MODEL, f"--seq-length {C} --global-batch-size {N} --split 80,10,10 --data-path"]
    blend = described(*words, f"0.25 {data} 0.75 {other}.idx").data
    assert blend.prefixes == [data, f"{other}.idx"] and blend.weights == [0.25, 0.75] and blend.has_validation
    assert [each.tolist() for each in blend.lengths] == [lengths[:6400].tolist(), [64] * 80]
    assert described(*words, data, other).data.weights is None
    _, _, whole = found = described(MODEL, f"--seq-length {C} --data-path", data)
    assert len(whole.lengths[0]) == 7752
    assert "Assumed: --split 969,30,1, Megatron's default." in found.run.notes
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
        (f"--train-data-path {data}", 8000),
        (f"--train-data-path 1 {data} --data-path {data}", 4000),
    ):
        found = described(MODEL, f"--seq-length {C} --split 50,50,0", flag).data
        assert found.prefixes == [data], flag
        assert [each.tolist() for each in found.lengths] == [lengths[:documents].tolist()], flag
