"""What the benchmark of the exchange compares: the same attention over every network, and predictions by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.cp_exchange_cpu import ALONE, HEAD_SIZE, HEADS, NETWORKS, compared, errors, measure, simulated
from benchmarks.gpu.cases import attention_job
from megatron_wlb.hardware.network import Network
from megatron_wlb.hardware.profile import KernelTimes, Profile, load_profile
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import per_document
from tests.jobs import job
from tests.runtime.oracle import TOLERANCE, in_parts, inputs
from tests.worlds import run_world

LENGTHS = np.array([5, 61, 18, 33, 3], np.int64)
FIT = Profile(
    name="",
    tile_rows=1,
    forward=KernelTimes(launch=0.0, tile=1.0, query_tile=0.0),
    backward=KernelTimes(launch=0.0, tile=2.0, query_tile=0.0),
)


@pytest.mark.parametrize("cp", [2, 4])
def test_bf16_on_the_wire_adds_an_error(cp):
    off = errors(LENGTHS, cp)
    assert 0 < off["fp32"] < off["bf16"] < TOLERANCE[torch.bfloat16]
    assert off["bf16"] ** 2 == pytest.approx(off["fp32"] ** 2 + off["added"] ** 2)


def test_nothing_is_saved_where_the_model_is_in_fp32():
    given = job(cp=2, context_length=4096, cp_sharding="per-document", profile=load_profile("h100-fa2"))
    assert simulated(given, 1)["saved"] > 0
    assert simulated(replace(given, bytes_per_value=4), 1)["saved"] == 0


def _attend(plan):
    """out, dq, dk, dv over every network, and what is measured over each."""
    options = AttentionOptions(backend=get_backend("auto", "cpu"))
    metadata = ShardMetadata.build(plan, dist.get_rank(), options.backend.encode)
    q, k, v, dout = inputs(metadata.num_rows, HEADS, HEAD_SIZE, torch.float32)
    leaves, found = [x.requires_grad_() for x in (q, k, v)], []
    for collective in NETWORKS.values():
        exchange._all_to_all = collective
        out = context_parallel_attention(*leaves, metadata, dist.group.WORLD, options)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    return found, [measure(plan, collective, 2) for collective in NETWORKS.values()]


def test_every_network_moves_the_same():
    plan = in_parts(LENGTHS, 2)
    assert len(plan.rounds) > 3
    for found, measured in run_world(_attend, 2, plan):
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
        (sizes, seconds), (other_sizes, _) = measured
        assert sizes == other_sizes and seconds.shape == (2, 3, 2)
        # K and V forward, again in backward, and their gradients: as many bytes in fp32.
        assert len(sizes) % 3 == 0 and 3 * sum(sizes[: len(sizes) // 3]) == sum(sizes) > 0


def test_predictions_by_hand():
    """Of one document at once nothing is hidden: rank 0 gets 8 of 16 rows, three times with their gradients."""
    given = replace(attention_job(16, HEADS, 2, profile=FIT), cp_exchange="shared", bytes_per_value=4, recompute=ALONE)
    plan, moved = per_document(np.array([16]), 2), 8 * 2 * HEADS[1] * HEAD_SIZE * 4
    network = Network(name="", node={"all_gather": {2: (7.0, 0.001)}})  # 7 us and 1 us a byte
    seconds = np.array([[[4e-3, 6e-3], [1e-3, 3e-3], [4e-3, 0.0]], [[4e-3, 8e-3], [1e-3, 3e-3], [4e-3, 0.0]]])
    row = compared([moved] * 3, seconds, plan, given, network)
    assert (row["hidden_min"], row["hidden_max"]) == pytest.approx((1 - 8 / 4, 1 - 6 / 4))
    assert (row["with_ms"], row["without_ms"], row["alone_ms"]) == pytest.approx((11, 4, 4))
    alone = 3 * (moved + 7) / 1e3
    assert row["predicted_over_alone"] == pytest.approx(alone / 4)
    assert (row["predicted_hidden"], row["predicted_hidden_by_profile"]) == pytest.approx((0, 0))
    # The slower rank has rows 5 to 12: 68 pairs of each head.
    for by, computed in (("", 4), ("_by_profile", 68 * HEADS[0] * (1 + 2) / 1e3)):
        assert row[f"predicted_over_with{by}_max"] == pytest.approx((computed + alone) / 10)
