"""Gated delta nets: upstream's, over context-parallel shards.

Upstream's all-to-all gives a rank all rows for some of its heads. Which row of the packed micro-batch each of them is,
upstream derives from a layout of its own, and here the plan says it (`PackedOrder`).
"""

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron_wlb.adapter.layers.kind import Kind, Run
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.layers.delta_net import has_delta_nets
from megatron_wlb.runtime.attention import AttentionOptions


class WlbGatedDeltaNet(GatedDeltaNet):  # type: ignore[misc]
    """Upstream's gated delta net, with documents of any length and on any ranks."""

    def forward(self, hidden_states: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Hidden states [s, 1, h], of this rank's rows, or of its share of them with sequence parallelism."""
        order = packed_seq_params.wlb.packed
        begins = order.cu_seqlens
        begins.order = order.from_ranks, order.to_ranks  # upstream passes `begins` alone to `_order`
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=begins, cu_seqlens_kv=begins)
        return super().forward(hidden_states, *args, packed_seq_params=packed, **kwargs)

    def _resolve_cu_seqlens(self, padded: Any, actual: torch.Tensor, *unused: Any, **options: Any) -> torch.Tensor:
        """Return `actual`; upstream's wants lengths that divide by the ranks, and waits for the device to see them."""
        return actual


class _DeltaNet(Kind):
    stack_layer = "gdn_layer"
    in_order, since = True, (0, 19)

    def applies(self, args: Namespace) -> bool:
        return has_delta_nets(args)

    @contextlib.contextmanager
    def installed(self, run: Run) -> Iterator[None]:
        """Make upstream's layers find their rows by the plan inside."""
        package, parameters = "megatron.core.ssm.gated_delta_net", ("cu_seqlens", "cp_size", "t_global")
        common, gdn = (importlib.import_module(f"{package}.{name}") for name in ("common", "gdn"))
        # 0.19 calls it in one of these modules, 0.20 in the other.
        caller = gdn if hasattr(gdn, "_build_thd_cp_a2a_perm") else common
        with replaced(caller, "_build_thd_cp_a2a_perm", lambda original: _order, parameters):
            yield

    def adapt(self, layer: Any, config: Any, options: AttentionOptions) -> bool:
        spec: Any = getattr(layer.submodules, "self_attention", None)
        if getattr(spec, "module", None) not in (GatedDeltaNet, WlbGatedDeltaNet):
            return False
        spec.module = WlbGatedDeltaNet
        return True


def _order(cu_seqlens: Any, cp_size: int, t_global: int) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = cu_seqlens.order
    return found


KIND = _DeltaNet()
