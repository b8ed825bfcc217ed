"""Deferred weight gradients in upstream's `pretrain()`: equal to the bit to those of backward, and run in waits."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_wlb.adapter import cpu, wgrad
from megatron_wlb.describe.make import job_from_json
from megatron_wlb.simulate import memory
from tests.adapter import plain_te
from tests.adapter.training import EP2, FULL, MOE, PP2, TP2, VPP2, full, train

DISTRIBUTED = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather --optimizer adam --lr 0.01"
LONG = "--microbatch-group-size-per-virtual-pipeline-stage 2 --global-batch-size 16"  # else some stages never wait
UNEVEN = f"--num-layers 6 {PP2} --pipeline-model-parallel-layout Et|tt|tt|tL {LONG}"
FUSED = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, gradient, total: total.add_(gradient.t().matmul(x)))
"""A stand-in for apex' kernel."""
EMPTY = f"--num-layers 6 {PP2} --pipeline-model-parallel-layout E|ttt|ttt|L {LONG}"


@pytest.mark.parametrize(
    "flags",
    [
        f"{PP2} {DISTRIBUTED}",
        f"{PP2} {FULL} --overlap-grad-reduce --no-align-grad-reduce",
        f"{EMPTY} --overlap-grad-reduce",  # upstream starts the reduction of a chunk itself
        f"{TP2} {VPP2} {LONG} {EP2} {MOE} --expert-tensor-parallel-size 1",
        full(f"{VPP2} {LONG} --overlap-grad-reduce"),
        full(f"{VPP2} {FULL} --overlap-grad-reduce"),
        full(f"{PP2} --decoder-last-pipeline-num-layers 3"),
        full(UNEVEN),
        full(f"{TP2} {VPP2} {LONG}"),
        full(f"{EP2} {VPP2} {LONG} {MOE}"),
        full(f"{TP2} {PP2} --no-overlap-p2p-communication --wlb-micro-batches 16 --overlap-grad-reduce"),
    ],
)
def test_equal_to_the_bit(flags, dataset, tmp_path, monkeypatch):
    equal_to_the_bit(flags, dataset, tmp_path, monkeypatch)


def equal_to_the_bit(flags, dataset, tmp_path, monkeypatch):
    """Deferral on and off, for losses, gradients and parameters of two steps."""
    runs, ran = [], tmp_path / "ran"

    def finished_before(step, finalize, original=wgrad.Step.finished_before):
        then = original(step, finalize)

        def finalized(*args, **kwargs):
            before = step._done
            step.fill()
            with ran.open("a") as file:
                file.write(f"{before} {step._done} {len(step._order)}\n")
            return then(*args, **kwargs)

        return finalized

    monkeypatch.setattr(wgrad.Step, "finished_before", finished_before)
    for choice in ("on", "off"):
        log = tmp_path / f"{choice}.jsonl"
        runs.append(train(4, dataset, *flags.split(), "--wlb-defer-weight-gradients", choice, log=log))
    on, off = runs
    assert [entry["loss"] for entry in on["log"]] == [entry["loss"] for entry in off["log"]]
    for mine, its in zip([*on["grads"], on["params"]], [*off["grads"], off["params"]], strict=True):
        assert all(torch.equal(mine[name], its[name]) for name in its)
    counts = [tuple(map(int, line.split())) for line in ran.read_text().splitlines()]
    assert len(counts) == 2 * 4  # two steps, with "on" alone
    assert all(before > 0 and after == of for before, after, of in counts)  # every pass of the plan was seen
    assert any(before < of for before, _, of in counts)


def test_fused_accumulation_and_tied_embeddings(dataset, monkeypatch):
    """With `FUSED`, which adds to the gradient that DDP reduces."""
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", FUSED, raising=False)

    def defer(linear, original=wgrad._defer):
        original(linear)
        linear.gradient_accumulation_fusion = True

    monkeypatch.setattr(wgrad, "_defer", defer)
    flags, tied = [*PP2.split(), "--overlap-grad-reduce"], "--untie-embeddings-and-output-weights"
    on = train(4, dataset, *flags, without=tied)
    off = train(4, dataset, *flags, "--wlb-defer-weight-gradients", "off", without=tied)
    assert all(torch.equal(on["params"][name], off["params"][name]) for name in off["params"])


@pytest.mark.skipif("transformer_engine_torch" not in sys.modules, reason="TransformerEngine is not installed")
@pytest.mark.parametrize("flags", [f"{PP2} --overlap-grad-reduce", f"{TP2} {VPP2} {LONG}"])
@pytest.mark.parametrize("fused", [True, False])
def test_layers_of_transformer_engine_are_equal_to_the_bit(fused, flags, dataset, tmp_path, monkeypatch):
    """Its own classes over plain torch, with gradients that its products add to those DDP reduces, and without."""
    plain_te.install(monkeypatch)
    words = [word for word in cpu.FLAGS if not (fused and word == "--no-gradient-accumulation-fusion")]
    words[words.index("local")] = "transformer_engine"
    monkeypatch.setattr(cpu, "FLAGS", words)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", FUSED, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    equal_to_the_bit(flags, dataset, tmp_path, monkeypatch)


@pytest.mark.parametrize(("size", "flags", "matrices"), [(2, PP2, 4), (4, f"{TP2} {PP2}", 2)])
def test_what_is_held_is_what_is_predicted(size, flags, matrices, dataset, tmp_path, monkeypatch):
    """Of a layer, with tensor parallelism of its row-parallel matrices alone, and of the output layer."""
    seen = tmp_path / "seen"

    def fill(step, original=wgrad.Step.fill):
        for part in step._parts[0]:
            if all(module.wgrad_store.context.qsize() for module in part):
                held = [module.wgrad_store.context.queue[0][0] for module in part]
                total = sum(tensor.untyped_storage().nbytes() for pair in held for tensor in pair)
                with seen.open("a") as file:
                    file.write(json.dumps([len(part), total / len(held[0][0])]) + "\n")
        original(step)

    monkeypatch.setattr(wgrad.Step, "fill", fill)
    run = train(size, dataset, *flags.split(), "--train-iters", "1", log=tmp_path / "log.jsonl")
    layer, output = memory.weight_gradient_bytes(job_from_json(run["log"][0]["job"]))
    found = {tuple(json.loads(line)) for line in seen.read_text().splitlines()}
    assert {each for each in found if each[0] > 1} == {(matrices, layer)}
    assert size > 2 or (1, output) in found


def test_layers_of_transformer_engine_that_reduce_meanwhile_defer_nothing():
    class Store:
        def __init__(self, delay=False):
            self.delay_wgrad_compute = lambda: delay
            self.queue = []

        def put(self, tensors, function):
            self.queue += tensors

    def linear(mode, tp_size):
        module = torch.nn.Linear(2, 2)
        module.parallel_mode, module.tp_size, module.wgrad_store = mode, tp_size, Store(True)
        module.weight.skip_backward_post_hook = True
        return module

    given = {(mode, size): linear(mode, size) for mode in ("column", "row", None) for size in (1, 2)}
    wgrad.defer([torch.nn.ModuleList(given.values())])
    for which, module in given.items():
        later = which != ("column", 2)
        assert module.wgrad_store.delay_wgrad_compute() == module.weight.skip_backward_post_hook == later
        if later:  # without the graph, which would keep the input of the model chunk
            module.wgrad_store.put([module(torch.ones(2))], None)
            assert [each.grad_fn for each in module.wgrad_store.queue] == [None]


def test_gradients_that_would_be_lost_are_refused():
    class Old(torch.nn.Linear):
        """Defers its gradient, and DDP does not know."""

        wgrad_store = type("Store", (), {"delay_wgrad_compute": lambda self: True})()

    chunk = torch.nn.Module()
    chunk.decoder, chunk.post_process = torch.nn.Module(), False
    chunk.decoder.layers = torch.nn.ModuleList([Old(2, 2)])
    chunk.bucket_groups = chunk.expert_parallel_bucket_groups = []
    with pytest.raises(RuntimeError, match="1] layers by model chunk can be deferred, and the plan has .2.; give"):
        wgrad.DeferredWeightGradients([chunk], [2], contextlib.nullcontext)
    chunk.extra = Old(2, 2)
    with pytest.raises(RuntimeError, match="Old defers gradients, and the plan does not know of it; give"):
        wgrad.DeferredWeightGradients([chunk], [1], contextlib.nullcontext)
    del chunk.extra
    with pytest.raises(RuntimeError, match="Old defers gradients that would be lost; .* give off"):
        wgrad.DeferredWeightGradients([chunk], [1], contextlib.nullcontext)
