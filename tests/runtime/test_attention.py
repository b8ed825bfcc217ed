"""Attention of every sharding, backend and head layout against a dense oracle that knows only the document lengths."""

import contextlib
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_wlb.model import shape
from megatron_wlb.runtime import all_to_all, attention, measure, spans
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.covering import covering
from tests.reference.chunks import per_document, per_sequence
from tests.runtime.calls import Float64
from tests.runtime.oracle import SHARDINGS, TOLERANCE, all_ranks, assert_close, dense, in_shares, inputs, local_rows

LENGTHS = {
    "ones": [1] * 16,
    "short": [3, 7, 1, 2, 5, 6],
    "giant": [192],
    "giant among short": [1, 170, 2, 3],
    "equal": [24] * 4,
    "mixed": [5, 61, 18, 33, 1, 42, 24],
}
MIXED = np.array(LENGTHS["mixed"], np.int64)
HEADS = {"GQA": (8, 2), "MHA": (4, 4), "MQA": (4, 1)}
HEAD_SIZE = 16
BACKENDS = {"cpu": get_backend("cpu", "cpu"), "float64": Float64()}
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.fixture
def silent_group(monkeypatch):
    """The group of the first of two ranks, whose collectives move nothing."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2, wait=lambda: None)

    def moves_nothing(out, given, *sizes, group, async_op):
        out.zero_()
        return group  # as the handle of the collective

    monkeypatch.setattr(all_to_all, "_all_to_all", moves_nothing)
    monkeypatch.setattr(attention, "gradient_group", lambda group: group)
    return group


@covering(
    backend=BACKENDS,
    lengths=LENGTHS,
    sharding=SHARDINGS | {"in shares": in_shares},
    cp=[1, 2, 3, 4, 8],
    heads=HEADS,
    dtype=[FP64, FP32, BF16],
    latents=[False, True],
)
def test_all_ranks_together_are_dense_attention(backend, lengths, sharding, cp, heads, dtype, latents):
    missing = -sum(lengths) % (2 * cp)
    lengths = [*lengths, missing] if missing else lengths
    tensors = inputs(sum(lengths), heads, HEAD_SIZE, dtype)
    plan = sharding(np.array(lengths, np.int64), cp)
    latents = latents and sharding is not in_shares
    got = all_ranks(*tensors, plan, AttentionOptions(backend=backend, scale=0.3, exchanged_before=latents))
    assert all(x.dtype == dtype for x in got)
    # Ranks round their shares of dK and dV before they add them up.
    assert_close(got, dense(*tensors, lengths, 0.3), TOLERANCE[dtype] * (2 if latents and dtype == BF16 else 1))


@pytest.mark.parametrize(
    ("sharding", "lengths", "latents", "dtypes"),
    [
        # Heads and tails see the same keys, which latents were expanded to.
        ("per-document", [192], True, {(FP32, False): 2, (FP32, True): 2}),
        ("hybrid", [8, 4, 4], True, {(BF16, False): 2}),
        ("hybrid", [8, 4, 4], False, {(FP32, False): 2}),
        ("hybrid", [4, 4], False, {(BF16, False): 2}),
        ("in shares", [8, 4, 4], False, {(BF16, False): 2, (FP32, False): 4}),
    ],
)
def test_gradients_are_summed_in_fp32_over_calls_and_ranks(sharding, lengths, latents, dtypes, monkeypatch):
    """By the dtype, and whether a call adds to those before; what is written once is not."""
    backend, seen = Float64(), []
    backward = backend.backward
    monkeypatch.setattr(backend, "backward", lambda *x: seen.append((x[-2].dtype, x[-1].adds_up)) or backward(*x))
    options = AttentionOptions(backend=backend, exchanged_before=latents)
    plan = (SHARDINGS | {"in shares": in_shares})[sharding](np.array(lengths), 2)
    all_ranks(*inputs(sum(lengths), (8, 2), HEAD_SIZE, BF16), plan, options)
    assert Counter(seen) == dtypes  # ranks are threads


def test_what_is_measured_is_what_runs(monkeypatch):
    """Every call of forward and backward of a rank, in all rounds, with as many keys."""
    lengths = np.array([96, 5, 61, 18, 34], np.int64)
    model = shape(1, 64, 1, 8, 2, 0, kv_channels=24, v_head_dim=16)
    plan, backend, seen = in_shares(lengths, 2), Float64(), []
    assert len(plan.rounds) > 3

    def watched(way, compute):
        return lambda *given: seen.append((way, [x.shape for x in given[:-1]], given[-1].causal)) or compute(*given)

    for way in ("forward", "backward"):
        monkeypatch.setattr(backend, way, watched(way, getattr(backend, way)))
    all_ranks(*inputs(int(lengths.sum()), (8, 2), (24, 16), FP32), plan, AttentionOptions(backend=backend))
    ran, seen[:] = sorted(map(str, seen)), []
    target = measure.Target(model, "cpu", backend, "fp32", {"device": "cpu", "dtype": FP32})
    for rank in range(2):
        assert measure.attention_times(plan, rank, target, lambda call: call() or 1.0)[1] == 1.0
    measured = sorted(map(str, seen))
    assert [each for each in measured if "backward" in each] == [each for each in ran if "backward" in each]
    assert set(measured) == set(ran)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_head_sizes_and_strided_inputs(backend):
    """Megatron hands over views of one QKV projection, and a plain sum sends back a gradient of stride 0."""
    plan = per_sequence(MIXED, 1)
    metadata, order = ShardMetadata.build(plan, 0, backend.encode), local_rows(plan, 0)
    q, k, v, _ = inputs(len(order), (8, 2), 24, FP32)
    options = AttentionOptions(backend=backend)
    fused = torch.cat((q, k, v), dim=1)[order].requires_grad_()
    out = context_parallel_attention(*fused.split([8, 2, 2], dim=1), metadata, None, options)
    out.sum().backward()
    want = dense(q, k, v, torch.ones_like(q), LENGTHS["mixed"], 24**-0.5)
    got = (out.detach(), *fused.grad.split([8, 2, 2], dim=1))
    assert_close(got, tuple(x[order] for x in want), TOLERANCE[FP32])
    transposed = q[order].transpose(1, 2).contiguous().transpose(1, 2)
    again = context_parallel_attention(transposed, *fused.split([8, 2, 2], dim=1)[1:], metadata, None, options)
    assert torch.equal(again, out)


@covering(backend=BACKENDS, cp=[1, 2])
def test_what_is_saved_for_backward(backend, cp, silent_group):
    """The local tensors; none keeps the memory of another tensor."""
    metadata = ShardMetadata.build(per_document(MIXED, cp), 0, backend.encode)
    q, k, v, _ = inputs(metadata.num_rows, (8, 2), HEAD_SIZE, FP32)
    fused = torch.cat((q, k, v), dim=1).requires_grad_()
    group, options = silent_group if cp > 1 else None, AttentionOptions(backend=backend)
    out = context_parallel_attention(*fused.split([8, 2, 2], dim=1), metadata, group, options)
    saved = [x for x in out.grad_fn.saved_tensors if x is not None]
    assert sum(x.numel() for x in saved) == 2 * q.numel() + 2 * k.numel() + q.shape[0] * q.shape[1]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in saved)


@pytest.mark.parametrize("leaf", range(4))
def test_each_input_may_be_the_only_one_that_learns(leaf):
    metadata = ShardMetadata.build(per_sequence(MIXED, 1), 0, BACKENDS["cpu"].encode)
    given = [*inputs(184, (8, 2), HEAD_SIZE, FP32)[:3], torch.linspace(-2, 3, 8)]

    def gradients(*places):
        leaves = [x.detach().requires_grad_(i in places) for i, x in enumerate(given)]
        options = AttentionOptions(backend=BACKENDS["cpu"])
        out = context_parallel_attention(*leaves[:3], metadata, None, options, leaves[3])
        return torch.autograd.grad(out.square().sum(), [leaves[i] for i in places])

    assert torch.equal(gradients(leaf)[0], gradients(0, 1, 2, 3)[leaf])


@pytest.mark.parametrize(
    ("sharding", "forward", "backward"),
    [("in rounds", "ka wa", "kwbg bw"), ("in shares", "a  ka kwa kwa wa", "kkwbg kwbgw wbgw bw b")],
)
def test_rounds_are_sent_one_ahead_and_backward_ends_with_those_that_are_not_exchanged(
    sharding, forward, backward, silent_group, monkeypatch
):
    """By round: it computes (a, b) and waits (w) while K and V (k) of the next one and gradients (g) travel."""
    seen, waited = [], []
    collective = all_to_all._all_to_all

    def watched(out, given, *sizes, group, async_op):
        seen.append("g" if given.dtype == FP32 else "k")
        return collective(out, given, *sizes, group=group, async_op=async_op)

    @contextlib.contextmanager
    def by(name):
        seen.append({"attention": "a", "attention backward": "b", "exchange": "w"}[name])
        before = len(waited)
        yield
        assert len(waited) - before == (name == "exchange")

    silent_group.wait = lambda: waited.append(1)
    monkeypatch.setattr(all_to_all, "_all_to_all", watched)
    options = AttentionOptions(backend=BACKENDS["cpu"])
    plan = (SHARDINGS | {"in shares": in_shares})[sharding](MIXED, 2)
    metadata = ShardMetadata.build(plan, 0, options.backend.encode)
    q, k, v, dout = inputs(metadata.num_rows, (8, 2), HEAD_SIZE, BF16)
    with contextlib.suppress(KeyError), spans.watched(by):
        out = context_parallel_attention(q.requires_grad_(), k, v, metadata, silent_group, options)
        found, seen[:] = "".join(seen), []
        out.backward(dout)
        raise KeyError
    assert (found, "".join(seen)) == (forward.replace(" ", ""), backward.replace(" ", ""))
    assert len(waited) == sum(each.count("w") for each in (forward, backward))
    with spans.span("exchange"):
        assert len(seen) == len(backward.replace(" ", ""))  # nobody watches any more


def test_gradients_have_one_group_of_their_own_like_that_of_keys(monkeypatch):
    """With its ranks, timeout and options, which NCCL writes to."""
    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    given._timeout, given.config.max_ctas = timedelta(seconds=7), 3
    of_devices = {"cpu": SimpleNamespace(options=None), "cuda": SimpleNamespace(options=given)}
    group = type("Group", (), {"_device_types": of_devices, "_get_backend": lambda self, device: of_devices[device]})()
    made = []
    monkeypatch.setattr(dist, "get_process_group_ranks", {group: [4, 7]}.get)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)) or object())
    assert all_to_all.gradient_group(group) is all_to_all.gradient_group(group)
    ((ranks, options),) = made
    own = options.pop("pg_options")
    assert (ranks, options) == ([4, 7], {"timeout": timedelta(seconds=7), "use_local_synchronization": True})
    assert own is not given and (own._timeout, own.is_high_priority_stream) == (timedelta(seconds=7), True)
    assert own.config.max_ctas == 3


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q has 8 and k has 8 rows, but the shard .* has 16 and 16", lambda q, k, v, m: (q[:8], k[:8], v[:8], m)),
        ("torch.int32.*choose another backend", lambda q, k, v, m: (q.int(), k.int(), v.int(), m)),
        ("for all three", lambda q, k, v, m: (q, k, v.bfloat16(), m)),
        ("for all three", lambda q, k, v, m: (q.bfloat16(), k, v, m)),
        ("k has 8 rows", lambda q, k, v, m: (q, k[:8], v[:8], m)),
    ],
)
def test_wrong_inputs_are_refused(message, change):
    backend = BACKENDS["cpu"]
    metadata = ShardMetadata.build(per_document(np.array([16]), 1), 0, backend.encode, windows=(5,))
    given = change(*inputs(16, (4, 2), HEAD_SIZE, FP32)[:3], metadata)
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(*given, None, AttentionOptions(backend=backend, window=5))
