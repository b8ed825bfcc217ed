"""Router losses and expert counts over micro-batches of unequal length, which upstream takes to be equal.

Upstream's own padding masks keep padding out. Products that should be counts are replaced here.
"""

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import get_model_config, unwrap_model

from megatron_wlb.adapter.data import Batch
from megatron_wlb.adapter.layers.kind import Kind, Run
from megatron_wlb.adapter.upstream.means import means_over
from megatron_wlb.adapter.upstream.replaced import replaced


@contextlib.contextmanager
def _installed(run: Run) -> Iterator[None]:
    """Weigh router losses by tokens inside, and log them as means over the micro-batches that ran.

    Upstream divides sums over tokens by the trained ones, also the router losses, which are of all tokens.
    """
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").MoEMetricsTracker

    def counted(original: Any) -> Any:
        def get_tokens_per_expert_and_token_count(*, reduce_group: Any, **given: Any) -> Any:
            """Return a rank's tokens as the mean over its group, whose losses add up to one over all tokens."""
            counts, _, total = original(reduce_group=reduce_group, **given)
            return counts, total / reduce_group.size(), total

        return get_tokens_per_expert_and_token_count

    def normalised(original: Any) -> Any:
        def switch_load_balancing_loss_func(*, tokens_per_expert: Any, total_num_tokens: Any, **given: Any) -> Any:
            """Take shares of all tokens counted: `global_aux_loss` counts other micro-batches, too."""
            choices = total_num_tokens * given["topk"] * tokens_per_expert.numel() / given["num_experts"]
            shares = tokens_per_expert * (choices / tokens_per_expert.sum().clamp(min=1))
            # A micro-batch may have padding alone. The fused loss takes other types of counts in every release.
            given["fused"] = False
            total = torch.as_tensor(total_num_tokens).clamp(min=1)
            return original(tokens_per_expert=shares, total_num_tokens=total, **given)

        return switch_load_balancing_loss_func

    def masked(original: Any) -> Any:
        def _apply_expert_bias(self: Any, routing_map: Any, padding_mask: Any = None) -> Any:
            """Upstream's masks have one dimension where its map has two."""
            return original(self, routing_map & ~padding_mask.unsqueeze(-1))

        return _apply_expert_bias

    def scaled(original: Any) -> Any:
        return lambda scale: original(scale * run.trained())

    group, losses = ("routing_map", "reduce_group", "with_padding_mask"), ("tokens_per_expert", "total_num_tokens")
    with (
        replaced(router, "get_tokens_per_expert_and_token_count", counted, group),
        replaced(router, "switch_load_balancing_loss_func", normalised, (*losses, "topk", "num_experts")),
        replaced(router.TopKRouter, "_apply_expert_bias", masked, ("routing_map", "padding_mask")),
        replaced(router.MoEAuxLossAutoScaler, "set_loss_scale", scaled, ("scale",)),
        replaced(tracker, "report", means_over(run.windows), ("loss_scale",)),
    ):
        yield


def _rows_of(model: Any, padding: torch.Tensor) -> torch.Tensor:
    """Return `padding` [s] as upstream's forward pass wants it, [1, rows]; GPT divides them itself on a first stage."""
    inner = unwrap_model(model)
    if get_model_config(model).sequence_parallel and not (inner.pre_process and isinstance(inner, GPTModel)):
        padding = padding.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    return padding.unsqueeze(0)


class _Experts(Kind):
    padded = True
    groups = ("ep", "tp_ep", "intra_expt_dp")

    def applies(self, args: Namespace) -> bool:
        return bool(args.num_experts)

    def installed(self, run: Run) -> contextlib.AbstractContextManager[None]:
        return _installed(run)

    def inputs(self, batch: Batch, model: Any) -> dict[str, Any]:
        return {} if batch.padding is None else {"padding_mask": _rows_of(model, batch.padding)}


KIND = _Experts()
