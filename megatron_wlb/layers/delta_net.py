"""Gated delta nets."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_wlb.layers.linear import LinearLayer, ranks_of_heads
from megatron_wlb.layers.part import LAUNCHES_US, Rules
from megatron_wlb.model import DELTA_NET, Mixer


def gated_delta_net(*, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Mixer:
    """Return the mixer by Megatron's sizes: Q, K, V, a gate, and two values a head; state, its decay and output.

    It keeps its rows, Q and K normed and then repeated for every head of values, V, 64 values a row and head, the
    output before and after its norm, and as if nothing was compiled the gate and its SiLU in fp32.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    projected, repeated = 2 * keys + 2 * values + 2 * value_heads, 2 * value_heads * key_dim * (value_heads > key_heads)
    kept = projected + 2 * keys + repeated + 64 * value_heads + 7 * values
    return Mixer(projected=projected, inner=values, scan=3 * value_heads * key_dim * value_dim, kept=kept)


def has_delta_nets(a: Any) -> bool:
    of_pattern = DELTA_NET in (getattr(a, "hybrid_layer_pattern", None) or "")
    return of_pattern or bool(getattr(a, "experimental_attention_variant", None))


class DeltaNet(LinearLayer):
    letters = DELTA_NET
    title = "gated delta nets"
    variants = ("gated_delta_net", "gdn")
    modules: ClassVar[Mapping[str, float]] = {"attn": LAUNCHES_US}
    refused: ClassVar[Rules] = LinearLayer.refused | {
        (
            "--linear-num-key-heads and --linear-num-value-heads do not divide by --tensor-model-parallel-size x "
            "--context-parallel-size, and every rank computes whole heads; give fewer ranks"
        ): lambda a: (
            has_delta_nets(a)
            and any(
                heads % ranks_of_heads(a) for heads in (a.linear_num_key_heads or 16, a.linear_num_value_heads or 32)
            )
        ),
        "--deterministic-mode has no gated delta nets by document in upstream; leave it out": lambda a: (
            has_delta_nets(a) and a.deterministic_mode
        ),
        (
            "--tensor-model-parallel-size over 1 without --sequence-parallel leaves gradients of norms in gated delta "
            "nets that upstream does not sum over ranks; give --sequence-parallel"
        ): lambda a: has_delta_nets(a) and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
        "gated delta nets know no activation but SiLU, and upstream fails at the first step with another; give "
        "--swiglu": lambda a: has_delta_nets(a) and not a.swiglu,
    }

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        if DELTA_NET not in sizes["pattern"]:
            return {}
        if a.linear_num_value_heads % a.linear_num_key_heads:
            raise ValueError(
                f"--linear-num-key-heads {a.linear_num_key_heads} does not divide --linear-num-value-heads "
                f"{a.linear_num_value_heads}; change one of them"
            )
        mixer = gated_delta_net(
            key_heads=a.linear_num_key_heads,
            value_heads=a.linear_num_value_heads,
            key_dim=a.linear_key_head_dim,
            value_dim=a.linear_value_head_dim,
        )
        return {"delta_net": mixer}
