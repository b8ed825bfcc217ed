"""Prices of what --wlb switches off: recipes of NVIDIA's Megatron-MoE-ModelZoo that lose something, and verdicts."""

import re
from types import SimpleNamespace

import pytest

from benchmarks.lengths import f2
from megatron_wlb.cli.analyze.report import Others
from megatron_wlb.cli.analyze.table import priced, verdict
from megatron_wlb.cli.main import main
from megatron_wlb.describe.price import Price, alone, prices
from megatron_wlb.job import Recompute
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, N, report, setup

_COMMON = (
    "--use-distributed-optimizer --untie-embeddings-and-output-weights --sequence-parallel --bf16 --swiglu "
    "--normalization RMSNorm --moe-grouped-gemm --expert-tensor-parallel-size 1 --moe-token-dispatcher-type flex "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --moe-router-topk 8 --split 1 --qk-layernorm"
)
_LATENT = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 --multi-latent-attention "
    "--moe-shared-expert-intermediate-size 2048 --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128"
)
_V3 = f"{_LATENT} --num-attention-heads 128 --num-experts 256 --mtp-num-layers 1 --vocab-size 129280 --seq-length 4096"
_K2 = f"{_LATENT} --num-attention-heads 64 --num-experts 384 --vocab-size 163840 --seq-length 131072"
_QWEN = (
    "--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 128 "
    "--group-query-attention --num-query-groups 4 --num-experts 128 --moe-ffn-hidden-size 1536 --vocab-size 151936 "
    "--seq-length 4096 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
)
_MXFP8 = "--fp8-recipe mxfp8 --fp8-format e4m3"
_GRAPHS = "--cuda-graph-impl transformer_engine"
_OVERLAP = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
_ON_GRACE = f"--moe-flex-dispatcher-backend hybridep {_MXFP8} {_GRAPHS}"


def _layout(tp, pp, ep, gpus, windows, *more):
    """Windows are of a pipeline in a step; the recipes have 8 to 32 times as many."""
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --expert-model-parallel-size {ep}"
    batch = windows * gpus // (tp * pp)
    return " ".join((f"--num-gpus {gpus} {sizes} --global-batch-size {batch} --", "torchrun pretrain_gpt.py", *more))


_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_EVERY_FOUR = "--pipeline-model-parallel-layout 'Et*4|(tttt|)*14tL'"
_EVERY_TWO = f"{_SELECTIVE} mlp mla_up_proj --pipeline-model-parallel-layout 'Et|(tt|)*30L'"
_OFFLOADING = "--fine-grained-activation-offloading"
_CHUNKS = "--num-layers-per-virtual-pipeline-stage"
ZOO = {
    "run_deepseek_v3_gb200.sh": (
        "gb200", _layout(1, 4, 64, 256, 8, _V3, _ON_GRACE, _SELECTIVE, "mlp", _EVERY_FOUR), "No clear gain",
        ["CUDA graphs"],
    ),
    "run_deepseek_v3_gb300.sh": (
        "gb300", _layout(1, 4, 32, 128, 8, _V3, _ON_GRACE, _SELECTIVE, "mlp", _EVERY_FOUR),
        "Do not use it", ["CUDA graphs"],
    ),
    "run_deepseek_v3_h100.sh": (
        "h100",
        _layout(2, 8, 64, 512, 16, _V3, _OVERLAP, _EVERY_TWO, "--fp8-recipe blockwise --fp8-format e4m3"),
        "No clear gain", [],
    ),
    "run_deepseek_v3_h100.sh, TP1": (
        "h100", _layout(1, 8, 32, 256, 16, _V3, _OVERLAP, _EVERY_TWO), "No clear gain", [],
    ),
    "run_kimi_k2_gb200_128k_G128.sh": (
        "gb200",
        _layout(16, 2, 64, 128, 32, _K2, _MXFP8, _OFFLOADING, _SELECTIVE, "mla_up_proj mlp layernorm moe_act",
                "--pipeline-model-parallel-layout 'Et|t|(tt|)*29tL'"),
        "Use it", ["offloading of activations"],
    ),
    "run_235b.sh": (
        "h100", _layout(1, 4, 16, 64, 16, _QWEN, _OVERLAP, _CHUNKS, "1 --tp-comm-overlap"), "Use it", [],
    ),
    "run_gb200_235b.sh": (
        "gb200",
        _layout(1, 4, 64, 256, 12, _QWEN, _ON_GRACE, _OVERLAP, _OFFLOADING, _SELECTIVE, "moe_act layernorm", _CHUNKS,
                "4 --wlb-micro-batches 768 --micro-batch-size 3"),
        "Do not use it", ["CUDA graphs", "offloading of activations"],
    ),
    "run_h100_235b.sh": (
        "h100",
        _layout(2, 8, 32, 256, 16, _QWEN, _GRAPHS, _OVERLAP, _CHUNKS, "3 --tp-comm-overlap", _SELECTIVE,
                "moe_act layernorm"),
        "Do not use it", ["CUDA graphs"],
    ),
}  # fmt: skip
"""GPU, words, the verdict and the features that are priced; experts overlap on both sides."""
WHOLE = "run_deepseek_v3_gb300.sh", "run_gb200_235b.sh"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("zoo") / "f2"
    write_index(prefix.with_suffix(".idx"), f2(4000, 0, 131072))
    return prefix


@pytest.mark.parametrize("name", ZOO)
def test_recipes_that_lose_something(name, documents, capsys, monkeypatch):
    """Other layouts and flags, which take most of the time, are tried with two of them."""
    if name not in WHOLE:
        monkeypatch.setattr(Others, "faster", lambda self: [])
    gpu, words, expected, features = ZOO[name]
    before, _, command = words.partition("-- ")
    assert main(["analyze", "-q", "--steps", "1", "--gpu", gpu, "--data-path", str(documents), *before.split(), "--",
                 *command.replace("'", "").split(), *_COMMON.split()]) in (0, 1)  # fmt: skip
    first = capsys.readouterr().out
    assert first.startswith(f"{expected}. Predicted: ")
    named = re.findall(r"without (.*?)(?:, in whose place.*?)?(?: a step takes|:)", first)
    assert named == features
    assert ("Net: " in first) == bool(features)


def test_prices_are_ratios_of_megatrons_own_times(data):
    """Each by Megatron's step without the one feature, over that with all; what is published, and what has no time."""
    words = f"{JOB} --data-path {data} --gpu gb200 --wlb-micro-batches {N} --fp8-format hybrid"
    found = setup(words, "--fp8-dot-product-attention --num-experts 4 --moe-token-dispatcher-type allgather")
    job, a = found.job, found.run.arguments
    megatron = alone(job, a)
    assert (megatron.fp8_attention, megatron.moe_dispatcher) == (True, "allgather")
    assert (job.fp8_attention, job.moe_dispatcher) == (False, "alltoall")
    times = {(True, "allgather"): 8.0, (False, "allgather"): 10.0, (True, "alltoall"): 6.0}
    said = prices(job, a, lambda of: times[of.fp8_attention, of.moe_dispatcher])
    assert {each.feature: (each.times, each.source) for each in said} == {
        "the dispatcher of tokens": (0.75, "simulated"), "attention in FP8": (1.25, "simulated")
    }  # fmt: skip


def test_experts_overlap_in_megatron_where_its_schedule_can(data):
    """On one stage, and with virtual stages; --wlb overlaps those of no hybrid model."""
    words = f"{JOB} --data-path {data} --wlb-micro-batches {N} --num-experts 4 --hybrid-layer-pattern *E*E"
    words += " --num-layers 4 --overlap-moe-expert-parallel-comm --num-gpus 2 --pipeline-model-parallel-size"
    for stages, overlaps in ((1, True), (2, False)):
        found = setup(words, stages)
        assert not found.job.overlaps_experts
        assert alone(found.job, found.run.arguments).overlaps_experts is overlaps


def test_graphs_are_priced_by_their_modules_and_what_has_no_time_is_said(data):
    words = f"{JOB} --data-path {data} --wlb-micro-batches {N} --num-layers 4 --num-gpus 4"
    words += " --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --hidden-size 4096"
    found = setup(words, "--cuda-graph-impl local --use-torch-fsdp2 --fine-grained-activation-offloading")
    job, times = found.job, {("full",): 4.0, ("attn",): 5.0, (): 6.0}
    graphs, fsdp, offloading = prices(job, found.run.arguments, lambda of: times[of.cuda_graphs])
    assert (graphs.feature, graphs.times, fsdp.times, offloading.times) == ("CUDA graphs", 1.5, 1, 1)
    some = setup(words, "--cuda-graph-impl transformer_engine --cuda-graph-modules attn").run.arguments
    assert [each.times for each in prices(job, some, lambda of: times[of.cuda_graphs])] == [1.2]
    # Weights, gradients and optimizer of the last stage are on both ranks but for the optimizer, divided anyway.
    weights = 3 * job.model.layer_weights + job.model.vocabulary_weights
    assert fsdp.source.startswith("no time is lost, since weights travel once a step")
    assert f"take {weights * (6 + 12 / 2 - 18 / 2) / 2**30:.1f} GiB more" in fsdp.source
    assert not prices(job, setup(words, "--cuda-graph-impl none").run.arguments, lambda of: 1.0)
    again = setup(words, "--fine-grained-activation-offloading")
    recomputed = again.run.job(recompute=Recompute(granularity="full", method="block", num_layers=1))
    (price,) = prices(recomputed, again.run.arguments, lambda of: 3.0 if of.recompute.granularity else 2.0)
    assert price.times == 1.5 and "in whose place they are recomputed" in price.feature


@pytest.mark.parametrize(("speedup", "said"), [(1.2, "Use it"), (1.04, "No clear gain"), (0.9, "Do not use it")])
def test_the_verdict_is_of_the_net(speedup, said):
    setup = SimpleNamespace(run=SimpleNamespace(budget=1))
    found = report(setup, speedup, balance=speedup * 1.1, prices=[Price("CUDA graphs", 1.1, "simulated")])
    assert verdict(found)[0].startswith(said)
    assert f"takes 1.10 times as long (simulated). Net: {speedup:.2f}." in priced(found)
