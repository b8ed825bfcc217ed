"""Experts, of which a router picks some for every row, and experts that all rows share."""

from typing import Any, ClassVar

from megatron_wlb.job import Job
from megatron_wlb.layers.mlp import Mlp
from megatron_wlb.layers.part import Again, Rules, Tensor, layer_input_bytes, mask_bytes
from megatron_wlb.model import EXPERTS

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


class Experts(Mlp):
    letters = EXPERTS
    modules = ("moe_router", "moe")
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
    differs: ClassVar[Rules] = {
        "losses that balance experts are of other micro-batches (1.2 % of a small GPT's gradient, as with another "
        "--micro-batch-size)": _balances,
        "seq_aux_loss takes a micro-batch, of several samples or parts of them, for its sequence": lambda a: (
            _balances(a) and "seq_aux_loss" in _listed(a.moe_router_load_balancing_type)
        ),
        "experts see no padding of rows": lambda a: a.num_experts and a.sft,
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
        known = sizes.get("moe_router_topk") and a.moe_ffn_hidden_size is None
        if (a.num_experts or 0) < (1 if a.hybrid_layer_pattern else 2) or known:
            return {}
        dense, shared = sizes["ffn_hidden_size"], a.moe_shared_expert_intermediate_size or 0
        routed = a.moe_router_topk * (a.moe_ffn_hidden_size or dense)
        beside = {"dense_ffn_hidden_size": dense} if a.hybrid_layer_pattern else {}
        experts = {"num_experts": a.num_experts or 0, "shared_ffn_hidden_size": shared}
        if a.moe_router_group_topk:
            experts |= {name: getattr(a, name) or 1 for name in ("moe_router_num_groups", "moe_router_group_topk")}
        return beside | experts | {"ffn_hidden_size": routed + shared, "moe_router_topk": a.moe_router_topk}

    def kept(self, job: Job) -> dict[str, Tensor]:
        """Return what experts keep with their rows, and the norm before them."""
        model, row = job.model, layer_input_bytes(job)
        values, shared = job.bytes_per_value * model.ffn_size_of(EXPERTS) / job.parallel.tp, self._shared(job)
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

    def again(self, job: Job, dropped: set[str]) -> Again:
        activation, shared, found = self.values(job), self._shared(job), Again()
        if "moe" in dropped:
            found = Again(tuple(job.model.part(EXPERTS)), values=activation, kernels=1, dispatched=True)
        else:
            if "shared_experts" in dropped and shared:
                found = Again(tuple(job.model.part(EXPERTS)), shared, shared * activation, 1)
            if "moe_act" in dropped:
                values = found.values + (1 - shared) * activation
                found = found._replace(values=values, kernels=found.kernels + 1)
        if "layernorm" in dropped:
            found = found._replace(values=found.values + 2 * job.model.hidden_size, kernels=found.kernels + 1)
        return found

    @staticmethod
    def _shared(job: Job) -> float:
        return job.model.shared_ffn_hidden_size / job.model.ffn_hidden_size
