"""Errors of context-parallel attention and its backends; packages that are not here and GPUs have stand-ins."""

from types import SimpleNamespace

import numpy as np
import torch

from megatron_wlb.plan.sharding import per_document
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import checks, flash_attn, get_backend
from megatron_wlb.runtime.backends.aten import _check_schema
from megatron_wlb.runtime.backends.te import TeBackend, _check_workspace
from megatron_wlb.runtime.backends.trial import try_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.errors.case import At, Case
from tests.runtime.oracle import inputs
from tests.runtime.test_backends import _Wrong


def shard(length, cp_size, rank):
    return ShardMetadata.build(per_document(np.array([length]), cp_size), rank)


def attention(change):
    """On 16 rows, 4 query heads and 2 key heads of size 16, with what `change(q, k, v)` gives in their place."""

    def call(at: At):
        q, k, v, _ = inputs(16, (4, 2), 16, torch.float32)
        given = {"q": q, "k": k, "v": v, "metadata": shard(16, 1, 0)} | change(q, k, v)
        context_parallel_attention(**given, group=None, options=AttentionOptions(backend=get_backend("cpu", "cpu")))

    return call


def deterministic(at: At):
    at.patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    backend = object.__new__(flash_attn.FlashAttn3Backend)
    backend.backward(*[torch.empty(1, 1, 200)] * 7, None)


def workspace(at: At):
    """Deterministic gradients of TransformerEngine on an H100."""
    gpu = SimpleNamespace(major=9, minor=0, total_memory=80 << 30)
    at.patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    _check_workspace(torch.empty(1 << 14, 2, 8, device="meta"), torch.empty(1 << 17, 1, 8, device="meta"), 32)


def padded(at: At):
    """TransformerEngine on a cuDNN that pads what it returns."""
    backend = object.__new__(TeBackend)
    at.patch.setattr(TeBackend, "_arguments", lambda *arguments: {})
    backend._forward = lambda **arguments: (None, [torch.zeros(2, 4, 40, 1)])
    backend.forward(*[torch.empty(1, 1, 16)] * 3, None)


def old_flash_attn(at: At):
    at.patch.setattr(flash_attn, "import_for", lambda *arguments: SimpleNamespace(__version__="2.7.4.post1"))
    flash_attn.FlashAttnBackend()


def wrong(at: At):
    torch.set_num_threads(1)
    try_backend(_Wrong(), torch.device("cpu"))


CASES: list[Case] = [
    # metadata.py, attention.py
    (
        "context-parallel rank <2> is not in a plan of <2> shards; plan with the size of the context-parallel group",
        lambda at: shard(16, 2, 2),
    ),
    (
        "q, k, v have shapes <(16, 1, 4, 16)>, (16, 2, 16), (16, 2, 16); they must be <[s, Hq, D], [s, Hkv, D], "
        "[s, Hkv, D]>: drop the batch dimension, and give K and V the same head size",
        attention(lambda q, k, v: {"q": q[:, None]}),
    ),
    (
        "<3> query heads are not a multiple of <2> key heads; choose num_query_groups that divides "
        "num_attention_heads on every tensor-parallel rank",
        attention(lambda q, k, v: {"q": q[:, :3]}),
    ),
    (
        "q has <8> and k has 8 rows, but the shard of context-parallel rank 0 has <16>; pass the metadata of the same "
        "micro-batch and rank",
        attention(lambda q, k, v: {"q": q[:8], "k": k[:8], "v": v[:8]}),
    ),
    (
        "q, k, v are <torch.int32, torch.int32, torch.int32>, but attention backend 'cpu' runs one of <…> for all "
        "three; cast them, or choose another backend",
        attention(lambda q, k, v: {"q": q.int(), "k": k.int(), "v": v.int()}),
    ),
    (
        "q, k, v are on <cpu, cpu, cpu>, and the metadata on <meta>; move the metadata once per micro-batch with "
        "metadata.to(device, non_blocking=True)",
        attention(lambda q, k, v: {"metadata": shard(16, 1, 0).to("meta")}),
    ),
    (
        "this is rank <0 of 1> context-parallel ranks, but the metadata is for rank <1 of 2>; build it with the rank "
        "and size of the group",
        attention(lambda q, k, v: {"metadata": shard(32, 2, 1)}),
    ),
    # backends/
    (
        "attention backend 'aten' was written for torch 2.11 to 2.15, and torch <…> has another …(…) with 5 "
        "results, where (q, …) with <5> were expected; use a supported torch",
        lambda at: _check_schema(torch.ops.aten._flash_attention_forward.default._schema, ("q",), 5),
    ),
    (
        "no attention backend works on device <'meta'> (none is made for it); install what one of them needs, or use "
        "another device",
        lambda at: get_backend("auto", "meta"),
    ),
    (
        "unknown attention backend <'fa9'>; choose one of <auto, …>",
        lambda at: get_backend("fa9", "cpu"),
    ),
    (
        "attention backend <'aten'> is not available on device 'cpu': it runs on <cuda>; choose one of <auto, …>",
        lambda at: get_backend("aten", "cpu"),
    ),
    (
        "out with window 50 differs from the reference by <…>, where <1.6e-02> is allowed; choose another backend",
        wrong,
    ),
    (
        "attention backend <'te'> needs <transformer-engine>, which cannot be imported (No module named …); install "
        "it, or choose another backend",
        lambda at: checks.import_for("te", "no_such_module", "transformer-engine"),
    ),
    (
        "attention backend 'te' was written for <2.18>; the installed f(q) does not take <['k']> or also needs "
        "<['q']>; install such a version",
        lambda at: checks.check_arguments("te", "f", {"q": False}, ["k"], "2.18"),
    ),
    (
        "attention backend 'te' cannot run head size <12>: it must be a multiple of <8> and at most <256>; choose "
        "another kv_channels",
        lambda at: checks.check_head_size("te", torch.empty(1, 1, 12)),
    ),
    (
        "attention backend 'flash_attn_3' was written for <FlashAttention-3>; the installed one has no operator "
        "<aten::no_such>; install such a version",
        lambda at: flash_attn._operator("flash_attn_3", "aten", "no_such", (), "FlashAttention-3"),
    ),
    (
        "attention backend 'flash_attn' found flash-attn <2.7.4.post1>, whose gradients are wrong where a micro-batch "
        "has many documents; install <2.8> or newer, or choose another backend",
        old_flash_attn,
    ),
    (
        "attention backend 'flash_attn_3' has no deterministic gradients for head size <200>, only up to <192>; switch"
        " torch.use_deterministic_algorithms off, or choose another backend",
        deterministic,
    ),
    (
        "attention backend 'te' got log-sum-exps of shape <(2, 4, 40, 1)>, where packed ones <[rows, heads, 1]> were "
        "expected: cuDNN is older than 9.6, or pads them for this GPU (capability 12.0); use a newer cuDNN, or choose "
        "another backend",
        padded,
    ),
    (
        "attention backend 'te' would take <256> GiB for deterministic gradients of 16384 queries and 131072 keys with "
        "2 heads, and the GPU has <80>; switch torch.use_deterministic_algorithms (--deterministic-mode) off, or "
        "choose another backend",
        workspace,
    ),
]
