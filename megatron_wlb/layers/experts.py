"""Experts, of which a router picks some for every row, and experts that all rows share."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.job import Job
from megatron_wlb.layers.mlp import Mlp
from megatron_wlb.layers.part import (
    ONE_SIZE,
    Adaptation,
    Again,
    Rules,
    Tensor,
    layer_input_bytes,
    mask_bytes,
    memory_time,
    pads_rows,
    without,
)
from megatron_wlb.layers.pattern import chosen
from megatron_wlb.model import EXPERTS, MLP

_NCCLEP = "ncclep sizes its buffers by the first micro-batch, and micro-batches vary in length"
_OF_NCCLEP = {"moe_expert_rank_capacity_factor": None} | without("moe_ncclep_static_shape", "moe_ncclep_zero_copy")
_NO_OVERLAP = without("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release")
_NOT_HIDDEN = "the all-to-all of experts is no longer hidden"
_BALANCED = {"aux_loss", "seq_aux_loss", "global_aux_loss"}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _balances(a: Any) -> bool:
    """Whether a loss balances experts, micro-batch by micro-batch."""
    types = set(_listed(a.moe_router_load_balancing_type or "aux_loss"))
    return bool(a.num_experts) and bool(types & _BALANCED) and any(_listed(a.moe_aux_loss_coeff or 0))


def _by_quantiles(a: Any) -> bool:
    types = a.moe_router_load_balancing_type or ()
    return bool(a.num_experts) and "quantile_balancing" in ([types] if isinstance(types, str) else types)


def dispatches(a: Any, dispatcher: str, backend: str | None = None) -> bool:
    chosen = a.moe_token_dispatcher_type == dispatcher and backend in (None, a.moe_flex_dispatcher_backend)
    return bool(a.num_experts) and chosen


def dispatcher_of(a: Any) -> str:
    """Return the dispatcher of tokens that runs with --wlb in the place of `a`'s, see `Job.moe_dispatcher`."""
    runs = a.moe_flex_dispatcher_backend != "ncclep" or has_hybridep()
    return "flex" if a.moe_token_dispatcher_type == "flex" and runs else "alltoall"


def _have_experts(frequency: tuple[int, ...] | str, count: int) -> list[int]:
    """Return 1 or 0 for every layer, by N or a list: the first of every N has 1. Raises ValueError."""
    if (text := str(frequency)).isdecimal() and int(text):
        return [int(i % int(text) == 0) for i in range(count)]
    return chosen("--moe-layer-freq", frequency, count)


def has_hybridep() -> bool:
    """Whether upstream would find HybridEP on this machine."""
    try:
        return hasattr(importlib.import_module("deep_ep"), "HybridEPBuffer")
    except ImportError:
        return False


EXPERT_US = {False: 30.0, True: 430.0}
"""Launches of every expert of a rank. In bf16, derived: six products, 5 us each. With casts, of which every expert has
its own, fitted with `LAUNCHES_US`: 16 us for each of the 27 launches that a rehearsal counts."""
OVERLAP_HIDES = 0.73
"""Share of the experts' exchange that `--overlap-moe-expert-parallel-comm` hides: fitted to published steps, as
`LAUNCHES_US` is, so it stands for launches that overlap as well, and for passes that run alone."""
COPY_PASSES = {False: 16.0, True: 6.0}
"""Reads and writes of all copies of rows, between matrices as well, besides one of each in the dispatcher. With
`--use-transformer-engine-op-fuser`, the second. Fitted, as `OVERLAP_HIDES` is: permutation, padding, casts for both
directions, and products slower than with equal rows."""


class Experts(Mlp):
    letters = EXPERTS
    # moe_router stands for moe_preprocess, too, and moe for what is left: dispatcher, permutation, activation. Both are
    # fitted as `LAUNCHES_US` is.
    modules: ClassVar[Mapping[str, float]] = {"moe_router": 1750.0, "moe": 1500.0}
    gathered = False
    pooled = True
    shown_by = ("num_experts",)
    refused: ClassVar[Rules] = {
        (
            "--moe-router-load-balancing-type quantile_balancing needs tokens * topk of every micro-batch to divide by "
            "the experts, and micro-batches vary in length; choose another"
        ): _by_quantiles,
        "--mlp-chunks-for-training routes the chunks of a micro-batch without its padding mask; leave it out": (
            lambda a: a.num_experts and (a.mlp_chunks_for_training or 1) > 1
        ),
        "--moe-expert-rank-capacity-factor reads a step's micro-batches ahead, by --global-batch-size; leave it out": (
            lambda a: a.moe_expert_rank_capacity_factor and a.moe_flex_dispatcher_backend == "hybridep"
        ),
    }
    adapted = (
        Adaptation(
            lambda a, given: dispatches(a, "allgather"),
            {"moe_token_dispatcher_type": "alltoall"},
            "allgather needs equal lengths on all ranks",
        ),
        Adaptation(
            lambda a, given: a.moe_flex_dispatcher_backend == "ncclep" and has_hybridep(),
            {"moe_flex_dispatcher_backend": "hybridep"} | _OF_NCCLEP,
            _NCCLEP,
        ),
        Adaptation(
            lambda a, given: a.moe_flex_dispatcher_backend == "ncclep" and not has_hybridep(),
            {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": "deepep"} | _OF_NCCLEP,
            f"{_NCCLEP}; hybridep, which would do, is not installed",
            "a token travels to each of its experts by itself",
        ),
        Adaptation(
            lambda a, given: dispatches(a, "flex", "hybridep") and not a.moe_hybridep_pad_uneven_dispatch_inputs,
            {"moe_hybridep_pad_uneven_dispatch_inputs": True},
            "hybridep needs equal lengths on all ranks, or padding",
        ),
        Adaptation(
            lambda a, given: a.overlap_moe_expert_parallel_comm and a.hybrid_layer_pattern,
            _NO_OVERLAP,
            "hybrid models have no combined schedule, or one of their own",
            _NOT_HIDDEN,
        ),
        Adaptation(
            lambda a, given: a.overlap_moe_expert_parallel_comm and a.moe_ncclep_zero_copy,
            _NO_OVERLAP,
            f"--moe-ncclep-zero-copy with it: {ONE_SIZE}",
            _NOT_HIDDEN,
        ),
    )
    assumed: ClassVar[Rules] = {
        "Experts get equally many tokens, as --moe-router-force-load-balancing makes them. A free router took 1.22 "
        "times as long a step in the one public run of both (NVIDIA-NeMo/Megatron-Bridge, Qwen3-30B on 16 H100).": (
            lambda a: (a.num_experts or 1) > 1
        ),
    }
    differs: ClassVar[Rules] = {
        "losses that balance experts are of other micro-batches (1.2 % of a small GPT's gradient, as with another "
        "--micro-batch-size)": _balances,
        "seq_aux_loss takes a micro-batch, of several samples or parts of them, for its sequence": lambda a: (
            _balances(a) and "seq_aux_loss" in _listed(a.moe_router_load_balancing_type)
        ),
        "padding tokens are not routed to experts": lambda a: a.num_experts and pads_rows(a),
        "experts take tokens by micro-batch, as with another --micro-batch-size": lambda a: (
            a.num_experts
            and (a.moe_expert_capacity_factor or "sinkhorn" in _listed(a.moe_router_load_balancing_type or ""))
        ),
        "routers draw other numbers": lambda a: (
            a.num_experts
            and (a.moe_input_jitter_eps or a.moe_router_force_load_balancing or a.moe_router_force_biased is not None)
        ),
    }

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        if EXPERTS in sizes["pattern"] and not a.num_experts:
            raise ValueError("--hybrid-layer-pattern has E without --num-experts; give both or none")
        kinds, named = sizes["pattern"], sizes.get("moe_router_topk")
        few = (a.num_experts or 0) < (1 if a.hybrid_layer_pattern else 2)
        if few and not named:
            return {}
        if a.moe_layer_freq is not None and not a.hybrid_layer_pattern:
            has = _have_experts(a.moe_layer_freq, len(kinds))
            kinds = [kind[0] + MLP * (not each) for kind, each in zip(kinds, has, strict=True)]
        if few or (named and a.moe_ffn_hidden_size is None):
            return {"pattern": kinds}
        dense, shared = sizes["ffn_hidden_size"], a.moe_shared_expert_intermediate_size or 0
        routed = a.moe_router_topk * (a.moe_ffn_hidden_size or dense)
        beside = {"pattern": kinds}
        if a.hybrid_layer_pattern or MLP in "".join(kinds):
            beside["dense_ffn_hidden_size"] = dense
        experts = {"num_experts": a.num_experts or 0, "shared_ffn_hidden_size": shared}
        if a.moe_router_group_topk:
            experts |= {name: getattr(a, name) or 1 for name in ("moe_router_num_groups", "moe_router_group_topk")}
        return beside | experts | {"ffn_hidden_size": routed + shared, "moe_router_topk": a.moe_router_topk}

    def ranks(self, a: Any) -> dict[str, Any]:
        if a.expert_model_parallel_size > 1 and not a.num_experts:
            raise ValueError("--expert-model-parallel-size without --num-experts; give both or none")
        return {
            "ep": a.expert_model_parallel_size,
            "etp": a.expert_tensor_parallel_size if a.num_experts else None,
        }

    def settings(self, a: Any) -> dict[str, Any]:
        return {
            "moe_dispatcher": dispatcher_of(a),
            "fused_experts": a.use_transformer_engine_op_fuser,
            "overlaps_experts": a.overlap_moe_expert_parallel_comm and not a.hybrid_layer_pattern,
        }

    def kept(self, job: Job) -> dict[str, Tensor]:
        """Return the tensors that experts keep with their rows, and the norm before them."""
        model, row = job.model, layer_input_bytes(job)
        values, shared = job.bytes_per_value * model.ffn_size_of(EXPERTS) / job.parallel.tp, model.shared_part
        before, routed = 2 if model.gated_linear_unit else 1, (1 - shared) * values
        return {
            "input": Tensor(row),
            "dropout": Tensor(mask_bytes(job)),
            "norm": Tensor(row, ("layernorm",)),
            "sent": Tensor(row * model.moe_router_topk * job.parallel.expert_tp, ("moe",)),
            "before activation": Tensor(before * routed, ("moe",)),
            "activation": Tensor(routed, ("moe", "moe_act")),
            "shared experts": Tensor(shared * (before + 1) * values, ("moe", "shared_experts")),
        }

    def gradient_rows(self, job: Job) -> int:
        return 1 + job.model.moe_router_topk  # of its output, and as sent

    def again(self, job: Job, dropped: set[str]) -> Again:
        activation, shared, found = self.values(job), job.model.shared_part, Again()
        if "moe" in dropped:
            found = Again(tuple(job.model.part(EXPERTS)), values=activation, kernels=1, travels=True)
        else:
            if "shared_experts" in dropped and shared:
                found = Again(tuple(job.model.part(EXPERTS)), shared, shared * activation, 1)
            if "moe_act" in dropped:
                values = found.values + (1 - shared) * activation
                found = found._replace(values=values, kernels=found.kernels + 1)
        if "layernorm" in dropped:
            found = found._replace(values=found.values + 2 * job.model.hidden_size, kernels=found.kernels + 1)
        return found

    def launches_us(self, job: Job) -> float:
        of_rank = (job.model.num_experts or job.model.moe_router_topk) / job.parallel.ep
        return EXPERT_US[job.precision != "bf16"] * of_rank

    def travel(self, job: Job, tokens: np.ndarray) -> np.ndarray:
        """Return the time in which the rows of a layer travel to their experts and back, us.

        By `--moe-token-dispatcher-type`, a row is sent once for every expert that it goes to (alltoall), once to a node
        and in it once to a rank (flex: DeepEP and HybridEP), or to all ranks (allgather).
        """
        parallel, network, topk = job.parallel, job.profile.network, job.model.moe_router_topk
        row_bytes = tokens / parallel.tp * job.model.hidden_size * job.bytes_per_value
        rows = row_bytes * topk
        time = np.zeros_like(tokens)
        if job.profile.counts_pairs:
            return time
        ranks = Group(size=parallel.ep, stride=parallel.expert_tp)
        if job.moe_dispatcher == "allgather":
            ranks, gathered = Group(size=parallel.expert_ranks, stride=1), row_bytes * parallel.expert_ranks
            return time + sum(network.collective(name, gathered, ranks) for name in ("all_gather", "reduce_scatter"))
        if parallel.ep > 1:
            joined = topk if job.moe_dispatcher == "flex" else 0
            latency, byte = network.all_to_all(
                ranks, joined, (job.model.moe_router_group_topk, job.model.moe_router_num_groups)
            )
            time = time + 2 * (latency + rows * byte * (parallel.ep - 1) / parallel.ep)
        inside = Group(size=parallel.expert_tp, stride=1)
        for name in ("all_gather", "reduce_scatter"):
            time = time + network.collective(name, rows * parallel.expert_tp, inside)
        return time

    def dispatched(self, job: Job, tokens: np.ndarray, beside: Sequence[float]) -> np.ndarray:
        pairs = zip(beside, self.copies(job, tokens), strict=True)
        return np.array([self.exposed(job, tokens, each) + copied for each, copied in pairs])

    def exposed(self, job: Job, tokens: np.ndarray, beside: float) -> np.ndarray:
        """Return the exposed part of `travel`, us: computation of `beside` us hides some if passes run by turns
        (`Job.overlaps_experts`)."""
        moved = self.travel(job, tokens)
        return moved - job.overlaps_experts * OVERLAP_HIDES * np.minimum(moved, beside)

    def copies(self, job: Job, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the time in which copies of rows, one for each of their experts, are read and written, us; forward and
        backward, which has twice as many passes over them."""
        model, topk = job.model, job.model.moe_router_topk
        values = topk * model.hidden_size + model.ffn_hidden_size - model.shared_ffn_hidden_size
        moved = 2 * (1 + topk) * model.hidden_size
        forward, backward = (moved + COPY_PASSES[job.fused_experts] * share * values for share in (1 / 3, 2 / 3))
        forward, backward = (each * job.bytes_per_value for each in (forward, backward))
        return memory_time(job, forward, tokens), memory_time(job, backward, tokens)
