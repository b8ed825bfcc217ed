"""Layer kinds in training: replacements in upstream for each, a file per kind, named as in `megatron_wlb.layers`."""

import contextlib
import copy
import importlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from megatron_wlb.adapter.data import Batch
from megatron_wlb.adapter.layers import attention, experts, latent, mtp, overlap
from megatron_wlb.adapter.layers.attention import foreign_core
from megatron_wlb.adapter.layers.kind import Kind, Run
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.layers import WITHOUT_ATTENTION
from megatron_wlb.runtime.attention import AttentionOptions

_WITHOUT_ATTENTION: list[Kind] = [importlib.import_module(f"{__name__}.{name}").KIND for name in WITHOUT_ATTENTION]
_OVERLAPPED = (mtp.OVERLAPPED, overlap.KIND)
KINDS: tuple[Kind, ...] = (mtp.KIND, experts.KIND, *_WITHOUT_ATTENTION, latent.KIND, attention.KIND, *_OVERLAPPED)


def of(args: Namespace) -> list[Kind]:
    """Return the kinds of a run's layers that need more of training than a spec."""
    return [kind for kind in KINDS if kind.applies(args)]


def depth_inputs(
    batch: Batch, positions: torch.Tensor, weights: torch.Tensor | None, context_length: int
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Return the tokens further ahead, and their targets, that the layers of a forward pass ask for."""
    return mtp.rolled(batch, positions, weights, context_length)


@contextlib.contextmanager
def installed(args: Namespace, run: Run) -> Iterator[None]:
    """Apply the replacements of all kinds of a run's layers inside."""
    with contextlib.ExitStack() as stack:
        for kind in of(args):
            stack.enter_context(kind.installed(run))
        yield


def adapt(layer: Any, config: Any, options: AttentionOptions) -> None:
    """Adapt the spec of a layer."""
    _adapt(layer, config, options, others=config.experimental_attention_variant is not None)
    if config.transformer_impl == "local":
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm


def adapt_stack(spec: Any, config: Any, options: AttentionOptions) -> Any:
    """Return the spec of a hybrid stack with its layers adapted. Raises ValueError as `check_stack`."""
    check_stack(spec)
    spec = copy.copy(spec)
    spec.submodules = copy.copy(spec.submodules)
    for name in (kind.stack_layer for kind in KINDS if kind.stack_layer):
        layer = copy.deepcopy(getattr(spec.submodules, name))
        _adapt(layer, config, options, others=True)
        setattr(spec.submodules, name, layer)
    return spec


def _adapt(layer: Any, config: Any, options: AttentionOptions, *, others: bool) -> None:
    """Adapt the attention of a layer; `others`: it may have none."""
    if others and any(kind.adapt(layer, config, options) for kind in _WITHOUT_ATTENTION):
        return
    check_layer(layer)
    if not latent.KIND.adapt(layer, config, options):
        attention.KIND.adapt(layer, config, options)


def rotary(module: Any) -> list[Any]:
    """Return the rotary embeddings that a module of a model has as a layer of its own."""
    return [each for kind in KINDS for each in kind.rotary(module)]


def check_stack(spec: Any) -> None:
    """Raise ValueError for another spec than one of Megatron's hybrid stack with its own layers."""
    for kind in KINDS:
        kind.check_stack(spec)
    check_layer(spec.submodules.attention_layer)


def check_layer(layer: Any) -> None:
    """Raise ValueError for the spec of a layer without Megatron's own self-attention and core attention."""
    found = getattr(getattr(layer.submodules, "self_attention", None), "module", None)
    inherits = getattr(found, "forward", None) is SelfAttention.forward
    if not inherits and found not in latent.CLASSES:
        raise ValueError(
            f"--wlb: --spec names a layer with {getattr(found, '__name__', 'no self-attention')}, without the forward "
            "pass of Megatron's SelfAttention or MLASelfAttention; leave one of them out"
        )
    if core := foreign_core(layer):
        raise ValueError(
            f"--wlb has a core attention of its own, and the layer's is {core}, not Megatron's "
            "DotProductAttention; leave --wlb out, or --spec or the flag that names it"
        )
