"""Layer kinds and parts of layers, a file each: what one needs of Megatron's arguments, of memory and of time.

`adapter.layers` has what training replaces in upstream for them.
"""

from megatron_wlb.layers.attention import Attention
from megatron_wlb.layers.delta_net import DeltaNet
from megatron_wlb.layers.experts import Experts
from megatron_wlb.layers.latent import LatentAttention
from megatron_wlb.layers.linear import DIFFERS, REFUSED, LinearLayer
from megatron_wlb.layers.mamba import Mamba
from megatron_wlb.layers.mlp import Mlp
from megatron_wlb.layers.part import Part, Rules
from megatron_wlb.model import ModelShape

_ATTENTION, _LATENTS = Attention(), LatentAttention()
KINDS: tuple[Part, ...] = (DeltaNet(), Mamba(), Mlp(), Experts(), _LATENTS, _ATTENTION)
"""All of them, in the order in which their refusals are printed."""
_PARTS = {letter: kind for kind in KINDS if kind is not _LATENTS for letter in kind.letters}
VARIANTS = {name: kind for kind in KINDS for name in kind.variants}
"""Kinds by their names in `--experimental-attention-variant`."""
LINEAR = " and ".join(kind.title for kind in KINDS if isinstance(kind, LinearLayer))
"""Names of all linear layers, for messages."""


def part_of(model: ModelShape, letter: str) -> Part:
    """Return the part of a model's layers that a letter stands for."""
    found = _PARTS[letter]
    return _LATENTS if found is _ATTENTION and model.kv_lora_rank else found


def refused() -> Rules:
    """Return what `--wlb` cannot serve of any kind."""
    return REFUSED | {text: holds for kind in KINDS for text, holds in kind.refused.items()}


def differs() -> Rules:
    """Return how any kind is trained otherwise than without `--wlb`."""
    return DIFFERS | {text: holds for kind in KINDS for text, holds in kind.differs.items()}
