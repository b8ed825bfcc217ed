"""Mamba-2."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_wlb.layers.linear import LinearLayer, ranks_of_heads
from megatron_wlb.layers.part import LAUNCHES_US, Rules
from megatron_wlb.model import MAMBA, Mixer


def mamba(*, heads: int, head_dim: int, groups: int, state_dim: int) -> Mixer:
    """Return the mixer of Mamba-2 by Megatron's sizes: z, x, B, C and a step a head; state and output.

    It keeps its rows, and the output before and after the gate.
    """
    inner = heads * head_dim
    projected = 2 * inner + 2 * groups * state_dim + heads
    return Mixer(projected=projected, inner=inner, scan=2 * inner * state_dim, kept=projected + 2 * inner)


def has_mamba(a: Any) -> bool:
    return MAMBA in (getattr(a, "hybrid_layer_pattern", None) or "")


def _heads(a: Any) -> int:
    """Heads of a Mamba layer, 0 without such layers."""
    counted = a.mamba_num_heads or 2 * (a.hidden_size or 0) // (a.mamba_head_dim or 64)
    return counted if has_mamba(a) else 0


class Mamba(LinearLayer):
    letters = MAMBA
    title = "Mamba layers"
    modules: ClassVar[Mapping[str, float]] = {"mamba": LAUNCHES_US}
    refused: ClassVar[Rules] = LinearLayer.refused | {
        (
            "--mamba-num-heads (default: 2 x --hidden-size / --mamba-head-dim) does not divide by "
            "--tensor-model-parallel-size x --context-parallel-size, and every rank computes whole heads; give fewer "
            "ranks"
        ): lambda a: _heads(a) % ranks_of_heads(a),
        "--disable-mamba-mem-eff-path has no states by document in upstream; leave it out": lambda a: (
            a.hybrid_layer_pattern and a.use_mamba_mem_eff_path is False
        ),
    }

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        if MAMBA not in sizes["pattern"]:
            return {}
        heads = a.mamba_num_heads or 2 * sizes["hidden_size"] // a.mamba_head_dim
        groups, state = a.mamba_num_groups, a.mamba_state_dim
        if not heads or heads % groups:
            raise ValueError(
                f"--mamba-num-groups {groups} does not divide {heads} heads of Mamba layers (--mamba-num-heads, or 2 x "
                "--hidden-size / --mamba-head-dim); change one of them"
            )
        return {"mamba": mamba(heads=heads, head_dim=a.mamba_head_dim, groups=groups, state_dim=state)}
