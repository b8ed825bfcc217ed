"""The shape of a model by Megatron's arguments."""

import ast
import contextlib
import math
import re
from dataclasses import fields
from typing import Any

from megatron_wlb import layers
from megatron_wlb.describe.arguments import MegatronArguments, flag_of, short
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.model import FULL, MODELS, WINDOWED, ModelShape

MOST_LAYERS = 1 << 12
"""Of a list, as long as `--num-layers` may be."""


def model_of(a: MegatronArguments, name: str | None = None) -> ModelShape:
    """Return the model of arguments, or one of `MODELS` with their sizes.

    Missing sizes are Megatron's defaults; a missing vocabulary has size 0. Raises ValueError for contradictory sizes.
    """
    base = {f.name: getattr(MODELS[name], f.name) for f in fields(ModelShape)} if name else {}
    names = ("num_layers", "hidden_size", "num_attention_heads")
    if missing := [flag_of(name) for name in names if not base and getattr(a, name) is None]:
        raise ValueError(f"no {', '.join(missing)}: give the sizes of the model")
    kept = (*names, "kv_channels", "ffn_hidden_size", "num_query_groups", "qk_layernorm", "mtp_num_layers")
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
    sizes |= _layers(a, sizes["num_layers"])
    for kind in layers.KINDS:
        sizes |= kind.sizes(a, sizes)
    if a.attention_output_gate:
        sizes["output_gate"] = True
    return ModelShape(**sizes)


def _window(given: tuple[int, int] | str | None) -> int | None:
    """Return the keys that a query sees before its own; None: all. Raises ValueError for anything else."""
    if given is None:
        return None
    sides = re.fullmatch(r"[\[(]?(-?\d{1,9}), ?-?\d{1,9}[\])]?", str(given))
    if not sides or not -1 <= (left := int(sides[1])) <= MAX_TOKENS:
        raise ValueError(f"--window-size is {short(given)}; give LEFT,0, with LEFT from -1 (no window) to {MAX_TOKENS}")
    return None if left < 0 else left


def _layers(a: MegatronArguments, count: int) -> dict[str, Any]:
    """Return the kinds of layers; `ModelShape` checks them."""
    kinds = [FULL] * count
    if a.hybrid_layer_pattern:
        kinds = list(a.hybrid_layer_pattern.replace("|", ""))
    elif variant := layers.VARIANTS.get(a.experimental_attention_variant or ""):
        linear = _flags("linear_attention_freq", a.linear_attention_freq or "", count)
        kinds = [variant.letters if each else FULL for each in linear]
    window = _window(a.window_size)
    if window is not None:
        frequency = a.window_attn_skip_freq
        has = [1] * count if frequency is None else _flags("window_attn_skip_freq", frequency, count)
        kinds = [WINDOWED if kind == FULL and each else kind for kind, each in zip(kinds, has, strict=True)]
    pattern = "".join(kinds)
    # The shortest that is repeated.
    periods = range(1, count // 2 + 1)
    period = next((n for n in periods if (pattern[:n] * -(-count // n))[:count] == pattern), count)
    return {"window": window, "pattern": pattern[:period], "hybrid": bool(a.hybrid_layer_pattern)}


def _flags(name: str, given: tuple[int, ...] | str, count: int) -> list[int]:
    """Return 1 or 0 for every layer, by N or a list: every Nth has 0. Raises ValueError for anything else."""
    text = given if isinstance(given, str) else str(list(given))
    if text.isdecimal() and int(text):
        return [int((i + 1) % int(text) != 0) for i in range(count)]
    found: list[int] = []
    with contextlib.suppress(SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        found = _list_of(ast.parse(text, mode="eval").body)
    if len(found) < count:
        raise ValueError(
            f"{flag_of(name)} is {short(text) or 'missing'}; give N, or a list of 1 and 0 for each of {count} layers, "
            "such as ([1]*5+[0])*4"
        )
    return found[:count]


def _list_of(node: ast.expr) -> list[int]:
    """Return the list of an expression such as [1] * 5 + [0], as Megatron evaluates it, up to `MOST_LAYERS`."""
    match node:
        case ast.List(elts=items) if all(isinstance(each, ast.Constant) and each.value in (0, 1) for each in items):
            return [int(isinstance(each, ast.Constant) and bool(each.value)) for each in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_list_of(left) + _list_of(right))[:MOST_LAYERS]
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return (_list_of(left) * min(times, MOST_LAYERS))[:MOST_LAYERS]
    raise TypeError(ast.dump(node))
