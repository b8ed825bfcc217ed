"""Context-parallel attention in real gloo processes against the dense oracle."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_wlb.runtime import attention
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.encoding import varlen
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.runtime.oracle import SHARDINGS, TOLERANCE, assert_close, dense, inputs, local_rows
from tests.worlds import run_world

LENGTHS = [5, 61, 18, 33, 1, 42, 24, 8]


def _attend(cp, sharding, dtype, backend, heads, settings):
    """This rank's rows and out, dq, dk, dv of them; ranks are grouped cp by cp."""
    groups = [dist.new_group(range(i, i + cp)) for i in range(0, dist.get_world_size(), cp)]
    group = groups[dist.get_rank() // cp]
    plan = SHARDINGS[sharding](np.array(LENGTHS, np.int64), cp)
    rows = local_rows(plan, group.rank())
    options = AttentionOptions(backend=get_backend(backend, "cpu"), scale=0.3, **settings)
    metadata = ShardMetadata.build(plan, group.rank(), options.backend.encode)
    q, k, v, dout = (x[rows] for x in inputs(sum(LENGTHS), heads, 16, dtype))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    runs = []
    for _ in range(2):
        out = context_parallel_attention(q, k, v, metadata, group, options)
        runs.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True)), "two runs differ"
    return rows, runs[0]


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["GQA", "MHA"])
@pytest.mark.parametrize(
    ("world_size", "cp", "sharding", "dtype", "backend", "settings"),
    [
        (2, 2, "per-sequence", torch.float32, "cpu", {}),
        (2, 2, "per-document", torch.bfloat16, "cpu", {}),
        (2, 2, "per-document", torch.float64, "reference", {}),
        (2, 2, "hybrid", torch.float32, "cpu", {"head_groups": 2}),
        (2, 2, "hybrid", torch.bfloat16, "cpu", {"head_groups": 2, "save_gathered": True}),
        (2, 2, "per-sequence", torch.float32, "cpu", {"head_groups": 2, "window": 7}),
        (4, 4, "per-sequence", torch.bfloat16, "cpu", {"head_groups": 2}),
        (4, 4, "per-document", torch.float32, "cpu", {}),
        (4, 4, "hybrid", torch.float64, "reference", {"head_groups": 2, "save_gathered": True}),
        (4, 4, "hybrid", torch.float32, "cpu", {"window": 20}),
        (4, 2, "per-document", torch.float32, "cpu", {"save_gathered": True}),
        (8, 8, "hybrid", torch.float32, "cpu", {"head_groups": 2}),
        (8, 8, "per-document", torch.bfloat16, "cpu", {}),
    ],
)
def test_processes_together_are_dense_attention(world_size, cp, sharding, dtype, backend, heads, settings):
    answers = run_world(_attend, world_size, cp, sharding, dtype, backend, heads, settings)
    tensors = inputs(sum(LENGTHS), heads, 16, dtype)
    want = dense(*tensors, LENGTHS, 0.3, settings.get("window"))
    for i in range(0, world_size, cp):
        rows = torch.cat([rows for rows, _ in answers[i : i + cp]])
        got = [torch.cat(parts) for parts in zip(*(parts for _, parts in answers[i : i + cp]), strict=True)]
        assert_close(tuple(got), tuple(x[rows] for x in want), TOLERANCE[dtype])


def _calls(lengths, sharding, settings):
    """Collectives of one forward and backward."""
    calls = []

    def counted(name, collective):
        def call(output, input, **rest):
            calls.append((name, tuple(input.shape), input.dtype))
            return collective(output, input, **rest)

        return call

    attention._all_gather = counted("all-gather", attention._all_gather)
    attention._reduce_scatter = counted("reduce-scatter", attention._reduce_scatter)
    plan = SHARDINGS[sharding](np.array(lengths, np.int64), dist.get_world_size())
    options = AttentionOptions(backend=get_backend("auto", "cpu"), **settings)
    metadata = ShardMetadata.build(plan, dist.get_rank(), options.backend.encode)
    q, k, v, dout = (x[: metadata.num_rows] for x in inputs(sum(lengths), (8, 2), 16, torch.bfloat16))
    context_parallel_attention(q.requires_grad_(), k, v, metadata, dist.group.WORLD, options).backward(dout)
    return calls


_GATHER, _SCATTER = ("all-gather", torch.bfloat16, 96), ("reduce-scatter", torch.float32, 192)


@pytest.mark.parametrize(
    ("settings", "heads", "expected"),
    [
        ({}, 2, [_GATHER, _GATHER, _SCATTER]),
        ({"head_groups": 2}, 1, [_GATHER] * 4 + [_SCATTER] * 2),
        ({"save_gathered": True}, 2, [_GATHER, _SCATTER]),
    ],
    ids=["one gather each way", "gathered ahead", "kept"],
)
def test_collectives_of_forward_and_backward(settings, heads, expected):
    calls = [(name, (rows, 2, heads, 16), dtype) for name, dtype, rows in expected]
    assert run_world(_calls, 2, LENGTHS, "per-document", settings) == [calls] * 2


def test_only_documents_on_several_ranks_are_exchanged():
    # The longest three, 61 + 42 + 33 tokens, are sharded, and one of the others is cut to fill up a rank.
    (name, shape, _), *_ = run_world(_calls, 2, LENGTHS, "hybrid", {})[0]
    assert name == "all-gather"
    assert 68 <= shape[0] < 96
    # Per sequence, documents of which every rank holds whole ones need no communication at all.
    assert run_world(_calls, 2, [4] * 8, "per-sequence", {}) == [[], []]


@pytest.mark.parametrize("settings", [{}, {"head_groups": 2}, {"save_gathered": True}])
def test_a_rank_whose_documents_live_nowhere_else_takes_part(settings):
    """Of the first document, ranks 0 and 1 hold a half each; all others are whole, on one rank."""
    lengths = [16] + [8] * 6
    metadata = [ShardMetadata.build(SHARDINGS["per-sequence"](np.array(lengths), 4), r, varlen) for r in range(4)]
    assert [len(m.sent_rows) for m in metadata] == [8, 8, 0, 0]
    first, *others = run_world(_calls, 4, lengths, "per-sequence", settings)
    assert first and others == [first] * 3
