"""Attention of every sharding, backend and head layout against a dense oracle that knows only the document lengths."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_wlb.runtime import all_to_all, attention
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import Backend, get_backend
from megatron_wlb.runtime.backends.aten import AtenBackend
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.metadata import Part, ShardMetadata
from megatron_wlb.types import Round, ShardPlan
from tests.covering import covering
from tests.reference.chunks import per_document, per_sequence
from tests.runtime.oracle import SHARDINGS, TOLERANCE, all_ranks, assert_close, dense, in_parts, inputs, local_rows

LENGTHS = {
    "ones": [1] * 16,
    "short": [3, 7, 1, 2, 5, 6],
    "giant": [192],
    "giant among short": [1, 170, 2, 3],
    "equal": [24] * 4,
    "mixed": [5, 61, 18, 33, 1, 42, 24],
}
HEADS = {"GQA": (8, 2), "MHA": (4, 4), "MQA": (4, 1)}
HEAD_SIZE = 16
BACKENDS = {name: get_backend(name, "cpu") for name in ("cpu", "reference")}
PARTS = ShardMetadata.build(in_parts(np.array([16, 16], np.int64), 2), 0, BACKENDS["cpu"].encode)
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture
def silent_group(monkeypatch):
    """The group of the first of two ranks, whose collectives move nothing."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2, wait=lambda: None)

    def moves_nothing(out, given, *sizes, group, async_op):
        out.zero_()
        return group  # as the handle of the collective

    monkeypatch.setattr(all_to_all, "_all_to_all", moves_nothing)
    monkeypatch.setattr(attention, "of_gradients", lambda group: group)
    return group


def by_heads(plan, num_heads):
    """The plan with one key head after the other."""
    return replace(plan, rounds=tuple(Round(0, (head, head + 1)) for head in range(num_heads)))


def per_document_plan(lengths: list[int], cp: int) -> ShardPlan:
    return per_document(np.array(lengths, np.int64), cp)


def single(backend: Backend) -> tuple[ShardMetadata, torch.Tensor]:
    """The metadata of "mixed" on one rank, and its rows."""
    plan = per_sequence(np.array(LENGTHS["mixed"], np.int64), 1)
    return ShardMetadata.build(plan, 0, backend.encode), local_rows(plan, 0)


def run(q, k, v, dout, metadata, options):
    """out, dq, dk, dv of the public function on a single shard."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = context_parallel_attention(q, k, v, metadata, None, options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


@covering(
    backend=BACKENDS,
    lengths=LENGTHS,
    sharding=SHARDINGS | {"in parts": in_parts},
    cp=[1, 2, 3, 4, 8],
    heads=HEADS,
    dtype=[FP64, FP32, BF16],
)
def test_all_ranks_together_are_dense_attention(backend, lengths, sharding, cp, heads, dtype):
    missing = -sum(lengths) % (2 * cp)
    lengths = [*lengths, missing] if missing else lengths
    tensors = inputs(sum(lengths), heads, HEAD_SIZE, dtype)
    plan = sharding(np.array(lengths, np.int64), cp)
    got = all_ranks(*tensors, plan, AttentionOptions(backend=backend, scale=0.3))
    assert all(x.dtype == dtype for x in got)
    assert_close(got, dense(*tensors, lengths, 0.3), TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_head_sizes_and_strided_inputs(backend):
    """Megatron hands over views of one QKV projection, and a plain sum sends back a gradient of stride 0."""
    lengths = LENGTHS["mixed"]
    metadata, order = single(backend)
    q, k, v, _ = inputs(sum(lengths), (8, 2), 24, FP32)
    options = AttentionOptions(backend=backend)
    fused = torch.cat((q, k, v), dim=1)[order].requires_grad_()
    out = context_parallel_attention(*fused.split([8, 2, 2], dim=1), metadata, None, options)
    out.sum().backward()
    want = dense(q, k, v, torch.ones_like(q), lengths, 24**-0.5)
    got = (out.detach(), *fused.grad.split([8, 2, 2], dim=1))
    assert_close(got, tuple(x[order] for x in want), TOLERANCE[FP32])
    transposed = q[order].transpose(1, 2).contiguous().transpose(1, 2)
    again = context_parallel_attention(transposed, *fused.split([8, 2, 2], dim=1)[1:], metadata, None, options)
    assert torch.equal(again, out)


@covering(backend=BACKENDS, use_reentrant=[True, False])
def test_activation_recomputation_changes_nothing(backend, use_reentrant):
    metadata, _ = single(backend)
    q, k, v, dout = inputs(metadata.num_rows, (8, 2), HEAD_SIZE, FP32)
    options = AttentionOptions(backend=backend)
    plain = run(q, k, v, dout, metadata, options)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = checkpoint(context_parallel_attention, q, k, v, metadata, None, options, use_reentrant=use_reentrant)
    out.backward(dout)
    recomputed = (out.detach(), q.grad, k.grad, v.grad)
    assert all(torch.equal(x, y) for x, y in zip(plain, recomputed, strict=True))


@covering(backend=BACKENDS, cp=[1, 2], save_gathered=[False, True], by_head=[False, True])
def test_what_is_saved_for_backward(backend, cp, save_gathered, by_head, silent_group):
    """The local tensors, and with `save_gathered` K and V of all keys; none keeps the memory of another tensor."""
    plan = per_document_plan(LENGTHS["mixed"], cp)
    metadata = ShardMetadata.build(by_heads(plan, 2) if by_head else plan, 0, backend.encode)
    q, k, v, _ = inputs(metadata.num_rows, (8, 2), HEAD_SIZE, FP32)
    fused = torch.cat((q, k, v), dim=1).requires_grad_()
    group, options = silent_group if cp > 1 else None, AttentionOptions(backend=backend, save_gathered=save_gathered)
    out = context_parallel_attention(*fused.split([8, 2, 2], dim=1), metadata, group, options)
    saved = [x for x in out.grad_fn.saved_tensors if x is not None]
    gathered = 2 * len(metadata.parts[0].gather) * k[0].numel() if save_gathered and cp > 1 else 0
    assert sum(x.numel() for x in saved) == 2 * q.numel() + 2 * k.numel() + q.shape[0] * q.shape[1] + gathered
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in saved)


class _Allocations(TorchDispatchMode):
    """Names of the operators that allocate or move memory, in order; views do not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in function._schema.arguments)
        if not views:
            self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


class _Still(TeBackend):
    """TransformerEngine's calls, answered from memory that is there already."""

    def __init__(self, calls, num_keys, heads, head_size):
        self._engine, self._dtypes, self._states_layout = None, {}, False
        self._out = {rows: torch.empty(rows, heads[0], head_size, dtype=BF16) for rows in calls}
        self._lse = {rows: torch.empty(rows, heads[0], 1) for rows in calls}
        self._dkv = torch.empty(num_keys, 2, heads[1], head_size, dtype=BF16).unbind(1)

    def _forward(self, q, k, v, **rest):
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        return self._out[len(q)], [self._lse[len(q)]]

    def _backward(self, q, k, v, **rest):
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        return self._out[len(q)], *self._dkv


def test_a_layer_does_only_what_differs_between_layers(silent_group):
    """Entries, offsets and indices follow from the micro-batch, and are in its metadata; K and V are copied once."""
    heads, head_size = (8, 2), 64
    metadata = ShardMetadata.build(per_document_plan(LENGTHS["mixed"], 2), 0, TeBackend.encode)
    (documents,) = metadata.parts
    calls = [call.rows.stop - call.rows.start for call in documents.calls]
    options = AttentionOptions(backend=_Still(calls, len(documents.gather), heads, head_size))
    q, k, v, dout = inputs(metadata.num_rows, heads, head_size, BF16)
    for _ in range(2):  # views of the buffer are made once, in the first layer
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with _Allocations() as forward:
            out = context_parallel_attention(*leaves, metadata, silent_group, options)
        with _Allocations() as backward:
            torch.autograd.grad(out, leaves, dout)
    # What is sent, a pool of what arrives and of the own rows, the keys.
    gather = ["new_empty", "copy_", "index_select", "zero_", "index_select"]
    assert forward.names == ["stack", "new_empty", *gather, "copy_", "copy_"]  # out of two calls
    kernels = ["empty_like", "copy_", "copy_", "copy_", "add_", "add_", "copy_"]  # dK, dV and dQ of two calls
    leave = ["index_select", "index_select", "new_empty", "zero_"]
    home = ["index_add_", "copy_", "copy_"]
    local = ["empty_like"] * 3
    sent, arrived = gather[:4], gather[4:]  # as the layer's backward begins, and once attention does
    names = [x for x in backward.names if x != "promote_types"]
    assert names == [*sent, *local, *arrived, *kernels, *leave, *home]


def train(plan, num_key_heads, group):
    """Forward and backward of the first of two ranks."""
    metadata = ShardMetadata.build(plan, 0, BACKENDS["cpu"].encode)
    q, k, v, dout = inputs(metadata.num_rows, (8, num_key_heads), HEAD_SIZE, FP32)
    options = AttentionOptions(backend=BACKENDS["cpu"])
    context_parallel_attention(q.requires_grad_(), k, v, metadata, group, options).backward(dout)


def test_backward_ends_with_what_is_not_exchanged(monkeypatch, silent_group):
    """So that it overlaps the last gradients that leave; forward begins with it."""
    exchanged = []
    for name in ("attend", "attend_backward"):
        run = getattr(attention, name)

        def watched(*given, run=run):
            exchanged.append(bool(next(x for x in given if isinstance(x, Part)).sent))
            return run(*given)

        monkeypatch.setattr(attention, name, watched)
    train(SHARDINGS["in rounds"](np.array(LENGTHS["mixed"], np.int64), 2), 2, silent_group)
    assert exchanged == [False, True, True, True, True, False]


def test_a_pool_is_let_go_before_its_keys_are_used(monkeypatch, silent_group):
    begin, attend, pools, alive = all_to_all.begin, attention.attend, [], []

    def begun(*arguments):
        pool, work = begin(*arguments)
        pools.append(weakref.ref(pool))
        return pool, work

    def attended(*arguments):
        alive.append([pool() is not None for pool in pools])
        return attend(*arguments)

    monkeypatch.setattr(attention, "begin", begun)
    monkeypatch.setattr(attention, "attend", attended)
    train(by_heads(per_document_plan(LENGTHS["mixed"], 2), 4), 4, silent_group)
    assert alive == [[False, True], [False, False, True], [False, False, False, True], [False] * 4]


def test_the_tensors_of_a_round_are_let_go_before_the_next(monkeypatch, silent_group):
    """Keys before the next ones are put together, and their gradients before the next backward."""
    made, alive = [], []

    def watched(function):
        def call(*arguments):
            alive.append(sum(tensor() is not None for tensor in made))
            tensor = function(*arguments)
            made.append(weakref.ref(tensor))
            return tensor

        return call

    monkeypatch.setattr(attention, "attend_backward", watched(attention.attend_backward))
    monkeypatch.setattr(attention, "finish", watched(all_to_all.finish))
    train(by_heads(per_document_plan(LENGTHS["mixed"], 2), 4), 4, silent_group)
    assert alive == [0] * 4 + [0, 1] * 4  # of backward, keys during it


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("3 query heads are not a multiple of 2 key heads", lambda q, k, v, m: (q[:, :3], k, v, m)),
        ("q has 8 and k has 8 rows, but the shard .* has 16", lambda q, k, v, m: (q[:8], k[:8], v[:8], m)),
        ("must be .s, Hq, D.", lambda q, k, v, m: (q[:, None], k, v, m)),
        ("same head size", lambda q, k, v, m: (q, k[..., :8], v, m)),
        ("torch.int32.*choose another backend", lambda q, k, v, m: (q.int(), k.int(), v.int(), m)),
        ("for all three", lambda q, k, v, m: (q, k, v.bfloat16(), m)),
        ("k has 1 key heads, and rounds are planned for 2", lambda q, k, v, m: (q, k[:, :1], v[:, :1], m)),
        ("metadata.to", lambda q, k, v, m: (q, k, v, m.to("meta"))),
        ("another attention backend than", lambda q, k, v, m: (q, k, v, replace(m, encode=TeBackend.encode))),
        ("rank 0 of 1 .* rank 1 of 2", lambda q, k, v, m: (q, k, v, replace(m, cp_rank=1, cp=2))),
        ("a window of 5 keys, and a document in parts", lambda q, k, v, m: (q, k, v, PARTS)),
    ],
)
def test_wrong_inputs_are_refused(message, change):
    backend = BACKENDS["cpu"]
    metadata = ShardMetadata.build(by_heads(per_document_plan([16], 1), 2), 0, backend.encode)
    given = change(*inputs(16, (4, 2), HEAD_SIZE, FP32)[:3], metadata)
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(*given, None, AttentionOptions(backend=backend, window=5))


class _IndexedAsOnGpu(TorchDispatchMode):
    """A tensor takes indices from its own device or the CPU, nothing else."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            assert {x.device for x in args[1] if x is not None} <= {args[0].device, torch.device("cpu")}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_the_oracle_of_gpu_tests_runs_on_a_device(sharding):
    lengths = LENGTHS["mixed"]
    tensors = [x.to("meta") for x in inputs(sum(lengths), (8, 2), 64, BF16)]
    with _IndexedAsOnGpu():
        got = all_ranks(*tensors, sharding(np.array(lengths, np.int64), 2), AttentionOptions(backend=AtenBackend()))
    assert [x.shape for x in got] == [x.shape for x in (tensors[0], tensors[0], *tensors[1:3])]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (FP32, "'aten' runs one of torch.float16, torch.bfloat16"),
        (BF16, "head size 12: it must be a multiple of 8 and at most 256"),
    ],
)
def test_aten_refuses_what_it_cannot_run(dtype, message):
    metadata, _ = single(AtenBackend())
    q, k, v, _ = inputs(metadata.num_rows, (4, 2), 12, dtype)
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(q, k, v, metadata, None, AttentionOptions(backend=AtenBackend()))
