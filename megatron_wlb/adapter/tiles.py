"""Overlaps tensor-parallel communication at any length, in tiles of a fixed number of rows.

With `--tp-comm-overlap`, TransformerEngine runs matrix products and tensor-parallel communication at once, in user
buffers of one size. QKV, projection and MLP know nothing of documents, so they run tile by tile here, and buffers of
one tile serve every micro-batch. Attention runs over all rows. NCCL communicates the last rows, fewer than a tile.

A tensor-parallel rank holds its share of every tile instead of one share of the micro-batch. `order` brings tokens and
labels into this order, which rows outside attention keep.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args

_USER_BUFFERS = "overlap_ag_fprop overlap_rs_fprop overlap_ag_dgrad overlap_rs_dgrad bulk_dgrad bulk_wgrad"
_BY_NCCL = {f"ub_{name}": False for name in _USER_BUFFERS.split()}
"""What makes layers of TransformerEngine communicate without user buffers, in a forward pass and its backward."""


def order(rows: int, *, ranks: int, tile: int) -> torch.Tensor:
    """Rows of a micro-batch, rank by rank, as `ranks` tensor-parallel ranks hold them: int64 [rows]."""
    natural = torch.arange(rows)
    whole = rows // tile * tile
    tiles, rest = natural[:whole].view(-1, ranks, tile // ranks), natural[whole:].view(1, ranks, -1)
    return torch.cat([part.transpose(0, 1).reshape(ranks, -1) for part in (tiles, rest)], dim=1).flatten()


def tile_layers(chunks: list[Any], *, tile: int, ranks: int) -> list[Any]:
    """Make the layers of a model run in tiles of `tile` rows; a `pre_wrap_hook` of upstream's model."""
    for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)):
        _tile(layer.self_attention.linear_qkv, tile // ranks)
        _tile(layer.self_attention.linear_proj, tile)
        shared = getattr(layer.mlp, "shared_experts", None)
        if isinstance(layer.mlp, MLP):
            _tile(layer.mlp, tile // ranks, [layer.mlp.linear_fc1, layer.mlp.linear_fc2])
        elif shared is not None and not shared.config.moe_shared_expert_overlap:
            _tile(shared.linear_fc1, tile // ranks)
            _tile(shared.linear_fc2, tile)
    return chunks


def _tile(module: Any, rows: int, linears: list[Any] | None = None) -> None:
    """Make `module`, which runs `linears` (default: itself), run its input [s, 1, ...] in tiles of `rows`."""
    forward, linears = module.forward, linears or [module]

    def tiled(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = x.split(rows)
        # In the first micro-batch of a step, TransformerEngine's weight gradient replaces what main_grad holds. Only
        # the last tile counts as first, since backward begins with it.
        first = [linear for linear in linears if getattr(linear, "is_first_microbatch", False)]
        done = []
        with contextlib.ExitStack() as stack:
            for linear in linears:
                stack.enter_context(_stored_together(linear, len(parts)))
            for part in parts:
                for linear in first:
                    linear.is_first_microbatch = True
                with (
                    _set(first if part is not parts[-1] else [], disable_parameter_transpose_cache=True),
                    _set(linears if len(part) < rows else [], **_BY_NCCL),
                ):
                    done.append(forward(part, *args, **kwargs))
        return torch.cat([output for output, _ in done]), done[0][1]

    module.forward = tiled


@contextlib.contextmanager
def _set(linears: list[Any], **values: Any) -> Iterator[None]:
    """Inside, attributes of layers have other values, where a layer has them."""
    given = [(linear, name, getattr(linear, name)) for linear in linears for name in values if hasattr(linear, name)]
    for linear, name, _ in given:
        setattr(linear, name, values[name])
    try:
        yield
    finally:
        for linear, name, value in given:
            setattr(linear, name, value)


# Deferred weight gradients -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stored_together(linear: Any, count: int) -> Iterator[None]:
    """Inside, the weight gradients that `count` forward passes of a layer will defer count as one."""
    store = getattr(linear, "wgrad_store", None)
    if store is None or not store.delay_wgrad_compute():
        yield
        return
    linear.wgrad_store = _Together(linear, count)
    try:
        yield
    finally:
        linear.wgrad_store = store


class _Together:
    """Stands in for a layer's store of deferred weight gradients while a micro-batch runs through it."""

    def __init__(self, linear: Any, count: int) -> None:
        self._put, self._count = linear.wgrad_store.put, count
        self._in_buffer = getattr(linear, "ub_overlap_ag_dgrad", False)
        self._fused = getattr(linear, "fuse_wgrad_accumulation", False)
        self._tiles: list[tuple[list[Any], Callable[..., Any]]] = []

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: list[Any], product: Callable[..., Any]) -> None:
        """Keep the inputs of a tile's weight gradient; after the last tile, store all of them."""
        x, gradient = tensors
        # Without the graph, which would keep the chunk's input. The next tile uses the buffer again.
        self._tiles.append(([x.detach(), gradient.clone() if self._in_buffer else gradient], product))
        if len(self._tiles) == self._count:
            inputs = [list(each) for each in zip(*(tensors for tensors, _ in self._tiles), strict=True)]
            self._put(inputs, partial(_summed, [product for _, product in self._tiles], self._fused))


def _summed(products: list[Callable[..., Any]], fused: bool, xs: list[Any], gradients: list[Any]) -> Any:
    """Weight gradient of all tiles, as `products` return it; `fused` ones have added theirs to main_grad."""
    results = [product(x, gradient) for product, x, gradient in zip(products, xs, gradients, strict=True)]
    return results[-1] if fused or results[-1][0] is None else (sum(result[0] for result in results), None)


# User buffers --------------------------------------------------------------------------------------------------------


def sized(tile: int) -> Callable[[Any], Any]:
    """Make a wrapper of upstream's function that creates user buffers, for buffers of a tile."""

    def wrapped(original: Any) -> Any:
        def initialize() -> None:
            args = get_args()
            with _set([args], seq_length=tile * args.context_parallel_size, decoder_tp_comm_overlap=False):
                original()

        return initialize

    return wrapped
