"""Layer kinds and parts of layers, a file each: Megatron's arguments for it, its memory and its time.

`adapter.layers` has the replacements in upstream for them.
"""

from typing import Any

from megatron_wlb.layers.attention import Attention
from megatron_wlb.layers.delta_net import DeltaNet
from megatron_wlb.layers.experts import Experts
from megatron_wlb.layers.latent import LatentAttention
from megatron_wlb.layers.mamba import Mamba
from megatron_wlb.layers.mlp import Mlp
from megatron_wlb.layers.mtp import Mtp
from megatron_wlb.layers.part import Adaptation, Part, Rules
from megatron_wlb.model import MIXERS, ModelShape

_ATTENTION, _LATENTS = Attention(), LatentAttention()
DEPTH = Mtp()
"""Of a token beyond the next, see `ModelShape.depths`."""
KINDS: tuple[Part, ...] = (DEPTH, DeltaNet(), Mamba(), Mlp(), Experts(), _LATENTS, _ATTENTION)
"""All of them, in the order in which their refusals are printed."""
_PARTS = {letter: kind for kind in KINDS if kind is not _LATENTS for letter in kind.letters}
VARIANTS = {name: kind for kind in KINDS for name in kind.variants}
"""Kinds by their names in `--experimental-attention-variant`."""
WITHOUT_ATTENTION = tuple(MIXERS.values())
"""Files of kinds without attention, here and in `adapter.layers`."""
UNMEASURED = " and ".join(kind.title for kind in KINDS if kind.taken)
"""Names of all layers whose time was never measured, for messages."""


def part_of(model: ModelShape, letter: str) -> Part:
    """Return the part of a model's layers that a letter stands for."""
    found = _PARTS[letter]
    return attention_of(model) if found is _ATTENTION else found


def attention_of(model: ModelShape) -> Attention:
    """Return the attention of a model's layers that have one."""
    return _LATENTS if model.kv_lora_rank else _ATTENTION


def parts_of(model: ModelShape, kind: str) -> list[Part]:
    """Return the parts of a layer of a kind, in the order in which rows meet them."""
    return [part_of(model, letter) for letter in model.parts_of(kind)]


def assumed(model: ModelShape) -> list[str]:
    """Return sentences on layers of a model whose time was never measured."""
    taken = dict.fromkeys(part.taken for kind in model.kinds for part in parts_of(model, kind) if part.taken)
    measured = "The time of such layers has not been compared with a measured one."
    return [f"Assumed of {UNMEASURED}: {each}. {measured}" for each in taken]


def shown_by(of: Any) -> dict[str, Any]:
    """Return the arguments that show which parts a model has (`Part.shown_by`), of its shape or of its arguments."""
    return {name: getattr(of, name) or None for kind in KINDS for name in kind.shown_by}


def refused() -> Rules:
    """Return the rules by which `--wlb` refuses arguments of any kind."""
    return {text: holds for kind in KINDS for text, holds in kind.refused.items()}


def adapted() -> tuple[Adaptation, ...]:
    """Return the adaptations of all kinds: arguments that `--wlb` sets or switches off."""
    return tuple(each for kind in KINDS for each in kind.adapted)


def ranks(a: Any) -> dict[str, Any]:
    """Return fields of `Parallel` by Megatron's arguments. Raises ValueError."""
    return {name: value for kind in KINDS for name, value in kind.ranks(a).items()}


def settings(a: Any) -> dict[str, Any]:
    """Return fields of `Job` by Megatron's arguments."""
    return {name: value for kind in KINDS for name, value in kind.settings(a).items()}


def differs() -> Rules:
    """Return how any kind is trained otherwise than without `--wlb`."""
    return {text: holds for kind in KINDS for text, holds in kind.differs.items()}
