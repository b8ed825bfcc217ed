"""Context-parallel attention in real gloo processes against the dense oracle."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_wlb.runtime import all_to_all
from megatron_wlb.runtime.all_to_all import exchange_rows, seen_sums
from megatron_wlb.runtime.attention import AttentionOptions, attention_to_keys, context_parallel_attention, send_ahead
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.backends.cpu import CpuBackend
from megatron_wlb.runtime.backends.flash import AtenBackend
from megatron_wlb.runtime.backends.protocol import side_by_side
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.covering import covering
from tests.runtime.calls import Float64
from tests.runtime.oracle import SHARDINGS, TOLERANCE, assert_close, dense, in_shares, inputs, local_rows
from tests.worlds import run_world

LENGTHS = [5, 61, 18, 33, 1, 42, 24, 8]
BF16_GRADIENTS = {"gradients_in_fp32": False}


def _plan(lengths, sharding, cp):
    in_two = {"in two shares": lambda *given: in_shares(*given, bounds=(0.0, 0.5, 1.0))}
    return (SHARDINGS | {"in shares": in_shares} | in_two)[sharding](np.array(lengths, np.int64), cp)


WAYS = {
    "per-sequence": ("per-sequence", False, None),
    "windowed": ("per-sequence", False, 7),
    "windowed in rounds": ("in rounds", False, 7),
    "windowed beside shares": ("in shares", False, 7),
    "per-document": ("per-document", False, None),
    "in rounds": ("in rounds", False, None),
    "in shares": ("in shares", False, None),
    "keys that came before": ("hybrid", True, None),
    "keys that came before, whole ones first": ("in rounds", True, None),
    "windowed keys that came before": ("per-sequence", True, 7),
}
"""Sharding, whether keys come by `exchange_rows`, and the window."""
CPU = get_backend("cpu", "cpu")
NUMBERS = {"fp32": (torch.float32, CPU), "bf16": (torch.bfloat16, CPU), "fp64": (torch.float64, Float64())}


def _attend(cp, way, numbers, heads, sizes, ahead, has_sink, gradients_in_fp32):
    """This rank's rows and out, dq, dk, dv of them; ranks are grouped cp by cp."""
    groups = [dist.new_group(range(i, i + cp)) for i in range(0, dist.get_world_size(), cp)]
    group = groups[dist.get_rank() // cp]
    sharding, keys_came_before, window = way
    plan = _plan(LENGTHS, sharding, cp)
    rows, (dtype, backend) = local_rows(plan, group.rank()), numbers
    options = AttentionOptions(backend=backend, scale=0.3, window=window, gradients_in_fp32=gradients_in_fp32)
    windows = (None,) if keys_came_before else (None, 7)
    metadata = ShardMetadata.build(plan, group.rank(), options.backend.encode, windows)
    q, k, v, dout = (x[rows] for x in inputs(sum(LENGTHS), heads, sizes, dtype))
    sinks = (_sink(heads, dtype),) if has_sink else ()
    q, k, v, *sinks = (x.requires_grad_() for x in (q, k, v, *sinks))

    def run(options, passes=1):
        if keys_came_before:
            kv = exchange_rows(torch.cat((k, v), dim=-1), metadata, group)
            kv = side_by_side(*kv.split((k.shape[-1], v.shape[-1]), dim=-1))
            out = attention_to_keys(q, kv, metadata, options, *sinks)
        else:
            out = context_parallel_attention(q, k, v, metadata, group, options, *sinks)
            if ahead:
                send_ahead(out.grad_fn)
        for _ in range(passes):
            gradients = torch.autograd.grad(out, (q, k, v, *sinks), dout, retain_graph=True)
        return out.detach(), *gradients

    first, again = run(options), run(options, passes=2)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), "two runs or passes differ"
    if not gradients_in_fp32:
        collective = all_to_all._all_to_all

        def rounded(output, given, *sizes, **rest):
            return collective(output, given.to(dtype).to(given.dtype), *sizes, **rest)

        all_to_all._all_to_all = rounded
        want = run(dataclasses.replace(options, gradients_in_fp32=True))
        assert all(torch.equal(x, y) for x, y in zip(first, want, strict=True)), "more is rounded than what leaves"
    return rows, first


@covering(
    ranks={"2": (2, 2), "3": (3, 3), "2 groups of 2": (4, 2)},
    way=WAYS,
    numbers=NUMBERS,
    heads={"GQA": (8, 2), "MHA": (4, 4)},
    sizes={"D=Dv": 16, "D>Dv": (24, 16)},
    ahead=[False, True],
    sink=[False, True],
    gradients_in_fp32=[True, False],
)
def test_processes_together_are_dense_attention(ranks, way, numbers, heads, sizes, ahead, sink, gradients_in_fp32):
    world_size, cp = ranks
    dtype, window = numbers[0], way[-1]
    # Ranks round their shares of dK and dV before they add them up.
    tolerance = TOLERANCE[dtype] * (2 if way[1] and dtype == torch.bfloat16 else 1)
    answers = run_world(_attend, world_size, cp, way, numbers, heads, sizes, ahead, sink, gradients_in_fp32)
    sinks = (_sink(heads, dtype),) if sink else ()
    want = dense(*inputs(sum(LENGTHS), heads, sizes, dtype), LENGTHS, 0.3, window, *sinks)
    for i in range(0, world_size, cp):
        rows = torch.cat([rows for rows, _ in answers[i : i + cp]])
        *parts, sinks = zip(*((*parts[:4], parts[4:]) for _, parts in answers[i : i + cp]), strict=True)
        got = [*map(torch.cat, parts), *map(sum, zip(*sinks, strict=True))]
        assert_close(tuple(got), (*(x[rows] for x in want[:4]), *want[4:]), tolerance)


def _noted():
    """Shape and dtype of what this rank gives from here on, and whether to all ranks' own group, by collective."""
    calls, collective = [], all_to_all._all_to_all

    def noting(output, given, *sizes, **rest):
        calls.append((tuple(given.shape), given.dtype, rest["group"] is dist.group.WORLD))
        return collective(output, given, *sizes, **rest)

    all_to_all._all_to_all = noting
    return calls


def _gradients_of_rows():
    """What comes back for 256 from a row's own rank and 1 from others; how many those are, collectives, and dtypes."""
    calls, rank, sums, add = _noted(), dist.get_rank(), set(), torch.Tensor.index_add_
    torch.Tensor.index_add_ = lambda total, *rest: sums.add(total.dtype) or add(total, *rest)
    plan = SHARDINGS["per-document"](np.array(LENGTHS, np.int64), dist.get_world_size())
    metadata = ShardMetadata.build(plan, rank, get_backend("cpu", "cpu").encode)
    rows = torch.ones(metadata.num_rows, 3, dtype=torch.bfloat16, requires_grad=True)
    keys, part = exchange_rows(rows, metadata, dist.group.WORLD), metadata.rounds[0]
    given = torch.ones_like(keys)
    given[part.own_keys] = 256
    keys.backward(given)
    return rows.grad, torch.bincount(part.sent_rows, minlength=len(rows)), calls, sums


def test_gradients_of_exchanged_rows_are_summed_in_fp32():
    """256 + 1 + 1 + 1 is 256 in bf16, but not on a CPU, whose sums are in fp32 anyway. Rows travel in their dtype."""
    most = 0
    for gradients, others, calls, sums in run_world(_gradients_of_rows, 4):
        assert sums == {torch.float32}
        assert torch.equal(gradients, (256 + others[:, None]).expand(-1, 3).bfloat16())
        assert [(shape[1:], dtype) for shape, dtype, _ in calls] == [((3,), torch.bfloat16)] * 2
        most = max(most, int(others.max()))
    assert most == 3


def test_rows_that_do_not_fit_the_plan_are_refused():
    for sharding, message in (
        ("in shares", "whose cp_exchange is latents"),
        ("per-document", "rows, but the shard of"),
    ):
        metadata = ShardMetadata.build(_plan(LENGTHS, sharding, 2), 0, CPU.encode)
        q, kv = torch.zeros(metadata.num_rows, 2, 4), torch.zeros(1, 2, 2, 4)
        with pytest.raises(ValueError, match=message):
            attention_to_keys(q, kv, metadata, AttentionOptions(backend=CPU))


def _sink(heads, dtype):
    return torch.linspace(-2, 3, heads[0], dtype=dtype)


def _calls(lengths, sharding, settings):
    """What this rank gives in the collectives of one forward and backward, and rows it sends and receives by round."""
    calls = _noted()
    plan = _plan(lengths, sharding, dist.get_world_size())
    options = AttentionOptions(backend=get_backend("auto", "cpu"), **settings)
    metadata = ShardMetadata.build(plan, dist.get_rank(), options.backend.encode)
    q, k, v, dout = (x[: metadata.num_rows] for x in inputs(sum(lengths), (8, 2), 16, torch.bfloat16))
    context_parallel_attention(q.requires_grad_(), k, v, metadata, dist.group.WORLD, options).backward(dout)
    return calls, [(sum(documents.sent), sum(documents.received)) for documents in metadata.rounds if documents.sent]


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [({}, "k", "kg"), (BF16_GRADIENTS, "k", "kh")],
    ids=["once each way", "bf16"],
)
def test_collectives_of_forward_and_backward(settings, forward, backward):
    """K and V, k, as they are needed, and their gradients, g in fp32 or h in bf16, back to where they came from."""
    answers = run_world(_calls, 2, LENGTHS, "per-document", settings)
    for calls, ((sent, received),) in answers:
        given = {"k": ((sent, 2, 2, 16), torch.bfloat16), "g": ((received, 2, 2, 16), torch.float32)}
        given["h"] = given["g"][0], torch.bfloat16
        assert [each[:2] for each in calls] == [given[what] for what in forward + backward]
    # Of each document, rank 1 needs the first quarter, and rank 0 the two in the middle.
    (sent_by_0, _), (sent_by_1, _) = (moved[0] for _, moved in answers)
    assert (sent_by_0, sent_by_1) == (48, 95)  # the document of one token is on one rank


def test_gradients_of_many_rounds_hold_up_no_keys():
    for sharding, beside in (("in shares", True), ("in two shares", False)):
        for calls, _ in run_world(_calls, 2, LENGTHS, sharding, {}):
            assert {call[1:] for call in calls} == {(torch.bfloat16, True), (torch.float32, not beside)}


def test_a_rank_whose_documents_live_nowhere_else_takes_part():
    """Of the first document, ranks 0 and 1 hold a half each; all others are whole, on one rank."""
    answers = run_world(_calls, 4, [16] + [8] * 6, "per-sequence", {})
    assert [moved for _, moved in answers] == [[(8, 0)], [(0, 8)], [(0, 0)], [(0, 0)]]


def test_only_documents_on_several_ranks_are_exchanged():
    # Per sequence, documents of which every rank holds whole ones need no communication at all.
    assert run_world(_calls, 2, [4] * 8, "per-sequence", {}) == [([], [])] * 2


def _summed(x):
    """The sums of rows of `x`, int64 [S], over the keys that they see, by sharding, window and backend; and the right
    ones."""
    cp, rank, found = dist.get_world_size(), dist.get_rank(), []
    for sharding, _, window in WAYS.values():
        plan = _plan(LENGTHS, sharding, cp)
        rows = local_rows(plan, rank)
        position = torch.cat([torch.arange(n) for n in LENGTHS])
        first = torch.arange(len(x)) - (position if window is None else position.clamp(max=window))
        right = torch.stack([x[a : b + 1].sum() for a, b in zip(first, range(len(x)), strict=True)])
        for backend in (CpuBackend, AtenBackend, TeBackend):
            metadata = ShardMetadata.build(plan, rank, backend.encode, (None, 7))
            found.append((seen_sums(x[rows], metadata, backend.spans, window, dist.group.WORLD), right[rows]))
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_sums_over_the_keys_that_arrive(cp):
    x = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, sum(LENGTHS)))
    for found in run_world(_summed, cp, x):
        assert all(torch.equal(*each) for each in found)
