"""The shape of a model by Megatron's arguments."""

import math
from dataclasses import fields, replace
from typing import Any

from megatron_wlb import layers
from megatron_wlb.describe.arguments import MegatronArguments, flag_of
from megatron_wlb.layers.pattern import chosen, repeated
from megatron_wlb.model import FULL, MODELS, ModelShape


def model_of(a: MegatronArguments, name: str | None = None) -> ModelShape:
    """Return the model of arguments, or one of `MODELS` with their sizes.

    Missing sizes are Megatron's defaults; a missing vocabulary has size 0. Raises ValueError for contradictory sizes.
    """
    base = {f.name: getattr(MODELS[name], f.name) for f in fields(ModelShape)} if name else {}
    names = ("num_layers", "hidden_size", "num_attention_heads")
    if missing := [flag_of(name) for name in names if not base and getattr(a, name) is None]:
        raise ValueError(f"no {', '.join(missing)}: give the sizes of the model")
    kept = (*names, "kv_channels", "ffn_hidden_size", "num_query_groups", "qk_layernorm")
    sizes: dict[str, Any] = base | {name: getattr(a, name) for name in kept if getattr(a, name) is not None}
    if a.swiglu is not None:
        sizes["gated_linear_unit"] = a.swiglu
    if not base:
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if a.kv_channels is None and hidden % heads:
            raise ValueError(
                f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; change one, or give "
                "--kv-channels"
            )
        sizes["num_query_groups"] = (a.num_query_groups or 1) if a.group_query_attention else heads
        sizes.setdefault("kv_channels", hidden // heads)
        sizes.setdefault("ffn_hidden_size", max(64, hidden * 8 // 3 // 64 * 64) if a.swiglu else 4 * hidden)
        sizes["gated_linear_unit"] = bool(a.swiglu)
    vocabulary = a.padded_vocab_size or a.vocab_size
    if vocabulary is not None or not base:
        multiple = a.make_vocab_size_divisible_by * a.tensor_model_parallel_size
        sizes["padded_vocab_size"] = a.padded_vocab_size or math.ceil((vocabulary or 0) / multiple) * multiple
    sizes |= _layers(a, sizes["num_layers"], name)
    for kind in layers.KINDS:
        sizes |= kind.sizes(a, sizes)
    if a.attention_output_gate:
        sizes["output_gate"] = True
    return ModelShape(**sizes | {"pattern": "".join(repeated(sizes["pattern"]))})


def _layers(a: MegatronArguments, count: int, name: str | None) -> dict[str, Any]:
    """Return the kind of every layer, of a model by its name as there; `ModelShape` checks them."""
    kinds = replace(MODELS[name], num_layers=count).layer_kinds if name else [FULL] * count
    if a.hybrid_layer_pattern:
        kinds = list(a.hybrid_layer_pattern.replace("|", ""))
    elif variant := layers.VARIANTS.get(a.experimental_attention_variant or ""):
        linear = chosen("--linear-attention-freq", a.linear_attention_freq or "", count)
        kinds = [variant.letters if each else FULL for each in linear]
    return {"pattern": kinds, "hybrid": bool(a.hybrid_layer_pattern)}
