"""Mamba layers: upstream's, over context-parallel shards, see `delta_net`."""

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_wlb.adapter.layers.kind import Kind, Run
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.layers.mamba import has_mamba


class _Mamba(Kind):
    in_order, since = True, (0, 19)

    def applies(self, args: Namespace) -> bool:
        return has_mamba(args)

    @contextlib.contextmanager
    def installed(self, run: Run) -> Iterator[None]:
        """Make upstream's layers find their rows by the plan inside."""
        mamba, rows = (
            importlib.import_module("megatron.core.ssm.mamba_context_parallel"),
            ("input_", "packed_seq_params"),
        )
        with (
            replaced(mamba, "_undo_attention_load_balancing", lambda original: _from_ranks, rows),
            replaced(mamba, "_redo_attention_load_balancing", lambda original: _to_ranks, rows),
        ):
            yield

    def check_stack(self, spec: Any) -> None:
        mixer = getattr(getattr(spec, "submodules", None), "mamba_layer", None)
        found = getattr(getattr(getattr(mixer, "submodules", None), "mixer", None), "module", None)
        if found is not MambaMixer:
            raise ValueError(
                f"--wlb: --spec names {getattr(found, '__name__', 'no Mamba layers')}, and --hybrid-layer-pattern "
                "wants layers with Megatron's MambaMixer; leave one of them out"
            )


def _from_ranks(input_: torch.Tensor, cp_size: int, packed_seq_params: Any) -> torch.Tensor:
    return input_.index_select(0, packed_seq_params.wlb.packed.from_ranks)


def _to_ranks(input_: torch.Tensor, cp_size: int, packed_seq_params: Any) -> torch.Tensor:
    return input_.index_select(0, packed_seq_params.wlb.packed.to_ranks)


KIND = _Mamba()
