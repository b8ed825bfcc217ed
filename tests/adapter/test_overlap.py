"""`--overlap-moe-expert-parallel-comm` with `--wlb`: equal to the bit to `--wlb` without it, and equal to Megatron.

Upstream's plans run over gloo as they are; streams and events do nothing on a CPU.
"""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.adapter import clock
from megatron_wlb.job import Job
from megatron_wlb.runtime import all_to_all
from tests.adapter.training import (
    BY_DOCUMENT,
    CP2,
    EP2,
    EXPERT_BIAS,
    GQA,
    LATENT,
    LINEAR,
    MOE,
    QUERY_LATENT,
    SELECTIVE,
    SHARED,
    SINKS,
    TP2,
    VPP2,
    each_version,
    full,
    named,
    train,
)
from tests.jobs import job
from tests.upstream.test_same_step import EVALUATE, GENTLE, compare, digests, spread

UNEVEN = "--wlb-micro-batches 11"
"""Which no whole samples fill, as they would on one rank and stage."""
OVERLAP = "--overlap-moe-expert-parallel-comm"
LOSSES = "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
MTP = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5"
DISTRIBUTED = "--optimizer adam --lr 1e-3 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LATENTS = f"{LATENT} {QUERY_LATENT} {SELECTIVE} core_attn mla_up_proj"
FOUR = "--num-layers 4 --global-batch-size 16"


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch):
    """Upstream's check of the flag wants bf16, whose rounding would hide differences; the other checks hold here."""
    check = TransformerConfig.__post_init__

    def __post_init__(self):
        names = "overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release"
        given = {} if self.bf16 else {name: getattr(self, name, False) for name in names}
        vars(self).update(dict.fromkeys(given, False))
        check(self)
        vars(self).update(given)

    monkeypatch.setattr(TransformerConfig, "__post_init__", __post_init__)


@pytest.fixture
def noted(monkeypatch, tmp_path):
    """Notes of all ranks, to which `note` adds a line, and from which `read` takes all."""
    path = tmp_path / "notes"
    path.mkdir()

    def note(*words):
        with (path / str(os.getpid())).open("a") as file:
            print(*words, file=file)

    def read():
        found = [file.read_text().splitlines() for file in sorted(path.iterdir())]
        for file in path.iterdir():
            file.unlink()
        return found

    note.read = read
    return note


@pytest.fixture
def one_order(monkeypatch):
    """Micro-batches in the order of a run without the flag, whose warm-up is shorter."""
    schedule = Job.schedule
    monkeypatch.setattr(Job, "schedule", lambda *given: replace(schedule(*given), by_turns=False))


def both(size, flags, dataset, tmp_path, without="", **more):
    """Runs with the flag and without it, which train the same tokens."""
    found, said = [], []
    for name in (OVERLAP, ""):
        prints = tmp_path / f"prints{name}"
        given = [*GENTLE.split(), "--train-iters", "3", "--wlb-digest", *flags.split(), *name.split()]
        if not name:
            given = [flag for flag in given if "early" not in flag]
        found.append(train(size, dataset, *given, prints=prints, without=without, **more))
        said.append(digests(prints))
    assert said[0] == said[1] and len(said[0]) >= 3
    return found


CASES = {
    "dp": each_version(2, f"{MOE} {EP2}"),
    "sinks": (2, f"{MOE} {SINKS} {EP2} {CP2}"),
    "tp": each_version(2, f"{MOE} {EXPERT_BIAS} {LOSSES} {SHARED} {EP2} {TP2} --expert-tensor-parallel-size 1"),
    "stages": each_version(4, f"{FOUR} {MOE} {VPP2} {EP2}"),
    "steps": full(2, f"{MOE} {EXPERT_BIAS} {LOSSES} {EP2} --train-iters 25 --wlb-max-tokens 512"),
    "bf16": full(2, f"--bf16 {MOE} {EXPERT_BIAS} {LOSSES} {EP2}"),
    "global-aux": full(2, f"{MOE} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1 {EP2}"),
    "early-release": full(2, f"{MOE} {EP2} --ep-overlap-early-attn-memory-release"),
    "distributed": full(2, f"{MOE} {EP2} {DISTRIBUTED}"),
    "evaluation": full(2, f"{MOE} {EP2} {EVALUATE}"),
    "cp": full(2, f"{MOE} {EXPERT_BIAS} --moe-z-loss-coeff 1e-3 {EP2} {CP2}"),
    "recomputed": full(2, f"{MOE} {EP2} {CP2} {SELECTIVE} core_attn"),
    "latents": full(2, f"{MOE} {LATENTS} {EP2} {CP2}"),
    "linear": full(2, f"{MOE} {LINEAR} --num-layers 4 {EP2} {CP2}"),
    "all": full(4, f"{FOUR} {MOE} {EXPERT_BIAS} {LOSSES} {VPP2} {CP2} {EP2} {BY_DOCUMENT}"),
}


@pytest.mark.parametrize(("size", "flags"), named(CASES))
def test_equal_to_the_bit(size, flags, dataset, tmp_path, one_order):
    with_it, without_it = both(size, flags, dataset, tmp_path, without=GQA if LATENT in flags else "")
    assert spread(with_it, without_it) == (0, 0, 0)
    assert with_it["evaluations"] == without_it["evaluations"]


@pytest.mark.parametrize(("size", "flags"), [(2, f"{EP2} {CP2}"), full(4, f"{FOUR} {VPP2} {EP2}")])
def test_multi_token_prediction(size, flags, dataset, tmp_path, one_order):
    """Gradients of the embedding, which has two of them, add up in another order."""
    with_it, without_it = both(size, f"{MOE} {EXPERT_BIAS} {LOSSES} {MTP} {flags}", dataset, tmp_path)
    assert max(spread(with_it, without_it)) < 1e-7


@pytest.mark.parametrize(
    ("size", "layout", "flags"), [(2, f"{EP2} {CP2} {UNEVEN}", ""), full(2, EP2, ""), full(4, f"{VPP2} {EP2}", FOUR)]
)
def test_equal_to_megatron(size, layout, flags, dataset, upstream):
    common = f"{GENTLE} {MOE} {flags}"
    theirs = upstream(common)
    compare(train(size, dataset, *common.split(), *layout.split(), OVERLAP), theirs)


@pytest.mark.parametrize(("size", "flags"), [(2, EP2), (2, f"{EP2} {CP2} {UNEVEN}"), (4, f"{FOUR} {VPP2} {EP2}")])
def test_lengths_of_micro_batches_that_run_together_differ(size, flags, dataset, noted, monkeypatch):
    """Or the tests above would show less."""
    run = TransformerModelChunkSchedulePlan.run

    def noting(forward, backward, **rest):
        if forward is not None and backward is not None:
            noted(*(len(plan.state.packed_seq_params.wlb.positions) for plan in (forward, backward)))
        return run(forward, backward, **rest)

    monkeypatch.setattr(TransformerModelChunkSchedulePlan, "run", staticmethod(noting))
    train(size, dataset, *GENTLE.split(), *MOE.split(), *flags.split(), OVERLAP)
    pairs = [line.split() for rank in noted.read() for line in rank]
    assert len(pairs) >= 2 * size and np.mean([one != other for one, other in pairs]) > 0.5


def test_routers_see_the_padding(dataset, noted, monkeypatch):
    """Of the rows that tensor-parallel ranks divide, as without the flag."""
    routing = TopKRouter.routing

    def noting(self, logits, padding_mask=None, **rest):
        noted(self.layer_number, *padding_mask.shape, int(padding_mask.sum()))
        return routing(self, logits, padding_mask=padding_mask, **rest)

    monkeypatch.setattr(TopKRouter, "routing", noting)
    flags = f"{GENTLE} {MOE} {EP2} {TP2} {UNEVEN} --expert-tensor-parallel-size 1".split()
    seen = []
    for more in ([OVERLAP], []):
        train(2, dataset, *flags, *more)
        seen.append([Counter(rank) for rank in noted.read()])
    assert sorted(map(str, seen[0])) == sorted(map(str, seen[1])) and len(seen[0]) == 2
    assert any(not line.endswith(" 0") for rank in seen[0] for line in rank)


def test_the_first_keys_of_backward_travel_while_experts_compute(dataset, noted, monkeypatch):
    """Nodes in upstream's order: keys and values leave before the other micro-batch's dispatch."""
    forward, backward, exchange = ScheduleNode.forward, ScheduleNode.backward, all_to_all._all_to_all

    def node(way, original):
        def noting(self, *args):
            noted(way, self.name)
            return original(self, *args)

        return noting

    def exchanging(*args, **rest):
        noted("exchange")
        return exchange(*args, **rest)

    monkeypatch.setattr(ScheduleNode, "forward", node("forward", forward))
    monkeypatch.setattr(ScheduleNode, "backward", node("backward", backward))
    monkeypatch.setattr(all_to_all, "_all_to_all", exchanging)
    flags = f"{GENTLE} {MOE} {EP2} {CP2} {BY_DOCUMENT} --train-iters 1".split()
    train(2, dataset, *flags, OVERLAP)
    layer = (
        "backward mlp|exchange|forward moe_dispatch|backward moe_dispatch|forward mlp|forward moe_combine|backward pre"
    )
    on = noted.read()
    for rank in on:
        assert "|".join(rank).count(layer) == 2 * 7  # in the pairs of 8 micro-batches, and 2 layers
        assert all(rank[i + 1] == "exchange" for i, line in enumerate(rank) if line == "backward mlp")
    train(2, dataset, *flags)
    assert [rank.count("exchange") for rank in on] == [rank.count("exchange") for rank in noted.read()]


def test_passes_that_run_by_turns_are_timed_by_their_nodes(monkeypatch):
    """Waits for other stages are between nodes, and belong to neither."""
    ticks = iter(range(100))
    monkeypatch.setattr(clock, "_now", lambda: float(next(ticks)))
    timer = clock.Clock()
    timer.begin()
    with timer.passes("forward"), timer.span("forward"):  # not measured
        pass
    timer.measure(job())
    with timer.span("forward"):
        pass
    with timer.passes("forward", "backward"):
        for way in ("forward", "backward", "forward"):
            with timer.span(way), timer.span("exchange"):
                pass
    with timer.passes("backward"), timer.span("backward"):
        pass
    spans = {name: [clock._sum(parts) for parts in found] for name, found in timer._spans.items()}
    assert spans == {"forward": [1, 6], "backward": [3, 1], "exchange": [1, 1, 1]}


def test_every_share_of_a_step_is_measured(dataset, tmp_path):
    flags = f"{GENTLE} {FOUR} {MOE} {VPP2} {EP2} {OVERLAP}".split()
    log = train(4, dataset, *flags, log=tmp_path / "log.jsonl")["log"]
    assert log[0]["job"]["overlaps_experts"]
    for entry in log:
        assert sum(entry["measured"].values()) == pytest.approx(1)
        assert entry["measured"]["busy"] > 0
