"""Context-parallel attention in real gloo processes against the dense oracle."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_wlb.runtime import attention
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.runtime.oracle import SHARDINGS, assert_close, dense, inputs, local_rows
from tests.worlds import run_world

LENGTHS = [5, 61, 18, 33, 1, 42, 24, 8]


def _attend(cp_size, sharding, dtype, backend, heads, settings):
    """This rank's rows and out, dq, dk, dv of them; ranks are grouped cp_size by cp_size."""
    groups = [dist.new_group(range(i, i + cp_size)) for i in range(0, dist.get_world_size(), cp_size)]
    group = groups[dist.get_rank() // cp_size]
    plan = SHARDINGS[sharding](np.array(LENGTHS, np.int64), cp_size)
    rows = local_rows(plan, group.rank())
    metadata = ShardMetadata.build(plan, group.rank())
    options = AttentionOptions(backend=get_backend(backend, "cpu"), scale=0.3, **settings)
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
    ("world_size", "cp_size", "sharding", "dtype", "backend", "settings"),
    [
        (2, 2, "per-sequence", torch.float32, "cpu", {}),
        (2, 2, "per-document", torch.bfloat16, "cpu", {}),
        (2, 2, "per-document", torch.float64, "reference", {}),
        (2, 2, "hybrid", torch.float32, "cpu", {"head_groups": 2}),
        (2, 2, "hybrid", torch.bfloat16, "cpu", {"head_groups": 9, "save_gathered": True}),
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
def test_processes_together_are_dense_attention(world_size, cp_size, sharding, dtype, backend, heads, settings):
    answers = run_world(_attend, world_size, cp_size, sharding, dtype, backend, heads, settings)
    tensors = inputs(sum(LENGTHS), heads, 16, dtype)
    want = dense(*tensors, LENGTHS, 0.3, settings.get("window"))
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    for i in range(0, world_size, cp_size):
        rows = torch.cat([rows for rows, _ in answers[i : i + cp_size]])
        got = [torch.cat(parts) for parts in zip(*(parts for _, parts in answers[i : i + cp_size]), strict=True)]
        assert_close(tuple(got), tuple(x[rows] for x in want), tolerance)


def _calls(lengths, sharding, settings, mismatch=False):
    """Collectives of one forward and backward, or the error of a plan for another group."""
    calls = []

    def counted(name, collective):
        def call(output, input, **rest):
            calls.append((name, tuple(input.shape), input.dtype))
            return collective(output, input, **rest)

        return call

    attention._all_gather = counted("all-gather", attention._all_gather)
    attention._reduce_scatter = counted("reduce-scatter", attention._reduce_scatter)
    rank = dist.get_rank()
    plan = SHARDINGS[sharding](np.array(lengths, np.int64), 2)
    metadata = ShardMetadata.build(plan, 1 - rank if mismatch else rank)
    options = AttentionOptions(backend=get_backend("auto", "cpu"), **settings)
    q, k, v, dout = (x[: metadata.num_rows] for x in inputs(sum(lengths), (8, 2), 16, torch.bfloat16))
    try:
        out = context_parallel_attention(q.requires_grad_(), k, v, metadata, dist.group.WORLD, options)
    except ValueError as error:
        return str(error)
    out.backward(dout)
    return calls


def test_one_gather_each_way_and_one_fp32_reduce_scatter():
    gather = ("all-gather", (96, 2, 2, 16), torch.bfloat16)
    calls = [gather, gather, ("reduce-scatter", (192, 2, 2, 16), torch.float32)]
    assert run_world(_calls, 2, LENGTHS, "per-document", {}) == [calls] * 2


def test_head_groups_are_gathered_ahead():
    gather = ("all-gather", (96, 2, 1, 16), torch.bfloat16)
    scatter = ("reduce-scatter", (192, 2, 1, 16), torch.float32)
    calls = [gather, gather, gather, gather, scatter, scatter]
    assert run_world(_calls, 2, LENGTHS, "per-document", {"head_groups": 2}) == [calls] * 2


def test_gathered_keys_can_be_kept():
    calls = [("all-gather", (96, 2, 2, 16), torch.bfloat16), ("reduce-scatter", (192, 2, 2, 16), torch.float32)]
    assert run_world(_calls, 2, LENGTHS, "per-document", {"save_gathered": True}) == [calls] * 2


def test_only_documents_on_several_ranks_are_exchanged():
    # The longest three, 61 + 42 + 33 tokens, are sharded, and one of the others is cut to fill up a rank.
    (name, shape, _), *_ = run_world(_calls, 2, LENGTHS, "hybrid", {})[0]
    assert name == "all-gather"
    assert 68 <= shape[0] < 96
    # Per sequence, documents of which every rank holds whole ones need no communication at all.
    assert run_world(_calls, 2, [4] * 8, "per-sequence", {}) == [[], []]


def test_a_plan_for_another_rank_is_refused_before_any_communication():
    assert run_world(_calls, 2, LENGTHS, "per-document", {}, True)[0].startswith(
        "this is rank 0 of 2 context-parallel ranks, but the metadata is for rank 1 of 2"
    )
