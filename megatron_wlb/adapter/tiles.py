"""Overlaps tensor-parallel communication at any length, in tiles of a few fixed numbers of rows.

With `--tp-comm-overlap`, TransformerEngine runs matrix products and tensor-parallel communication at once, in user
buffers of one size. QKV, projection and MLP do not depend on documents, so they run tile by tile here: as many of the
largest size as there are, then at most one of each smaller size. Buffers of these sizes serve every micro-batch.
Attention runs over all rows. NCCL communicates the last rows, fewer than the smallest tile.

A tensor-parallel rank holds its share of every tile instead of one share of the micro-batch. `Tiles.order` brings
tokens and labels into this order, which rows outside attention keep.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import is_te_min_version
from megatron.training import get_args, initialize
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron_wlb.adapter.upstream.replaced import replaced

_TE_MODULE = "transformer_engine.pytorch.module.base"
_USER_BUFFERS = "overlap_ag_fprop overlap_rs_fprop overlap_ag_dgrad overlap_rs_dgrad bulk_dgrad bulk_wgrad"
_BY_NCCL = {f"ub_{name}": False for name in _USER_BUFFERS.split()}
"""Options for layers of TransformerEngine to communicate without user buffers, in a forward pass and its backward."""
_CLASSES = ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P")

_made: dict[int, Any] = {}
"""TransformerEngine's communicators with user buffers, by rows."""


def split(rows: int, sizes: Sequence[int]) -> list[int]:
    """Return the rows of the tiles of a micro-batch, `sizes` falling, and of the rest, if any."""
    tiles = []
    for size in sizes:
        tiles += [size] * (rows // size)
        rows %= size
    return tiles + [rows] * (rows > 0 or not tiles)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a run."""

    sizes: Sequence[int]
    """Rows, falling; () for layers that user buffers do not serve."""
    ranks: int
    """Tensor-parallel ranks, which have a share each of every tile."""

    def order(self, rows: int) -> torch.Tensor:
        """Rows of a micro-batch, rank by rank, as tensor-parallel ranks hold them: int64 [rows]."""
        tiles = torch.arange(rows).split(split(rows, self.sizes))
        return torch.cat([tile.view(self.ranks, -1) for tile in tiles], dim=1).flatten()

    def tile_layers(self, chunks: list[Any]) -> list[Any]:
        """Make the layers of a model run in tiles; a `pre_wrap_hook` of upstream's model."""
        sizes, ranks = self.sizes, self.ranks
        for layer in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)):
            _tile(layer.self_attention.linear_qkv, sizes, ranks)
            _tile(layer.self_attention.linear_proj, sizes)
            shared = getattr(layer.mlp, "shared_experts", None)
            if isinstance(layer.mlp, MLP):
                _tile(layer.mlp, sizes, ranks, [layer.mlp.linear_fc1, layer.mlp.linear_fc2])
            elif shared is not None and not shared.config.moe_shared_expert_overlap:
                _tile(shared.linear_fc1, sizes, ranks)
                _tile(shared.linear_fc2, sizes)
        return chunks

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, upstream makes user buffers of these sizes."""
        with replaced(initialize, "_initialize_tp_communicators", _sized(self.sizes), ()):
            yield


def _tile(module: Any, sizes: Sequence[int], ranks: int = 1, linears: list[Any] | None = None) -> None:
    """Make `module`, which runs `linears` (default: itself), run its input in tiles of `sizes`.

    The input is [s, 1, ...], of whose rows `ranks` have a share each.
    """
    forward, linears = module.forward, linears or [module]

    def tiled(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tiles = split(len(x) * ranks, sizes)
        # In the first micro-batch of a step, TransformerEngine's weight gradient replaces what main_grad holds. Only
        # the last tile counts as first, since backward begins with it.
        first = [linear for linear in linears if getattr(linear, "is_first_microbatch", False)]
        bias: list[Any] = []

        def run(number: int, part: torch.Tensor) -> torch.Tensor:
            for linear in first:
                linear.is_first_microbatch = True
            with (
                _set(first if number + 1 < len(tiles) else [], disable_parameter_transpose_cache=True),
                _set(linears if tiles[number] not in sizes else [], **_BY_NCCL),
            ):
                output, bias[:] = (result := forward(part, *args, **kwargs))[0], result[1:]
            return output

        weights = [weight for weight in module.parameters() if weight.requires_grad]
        output = _Tiles.apply(run, tiles, ranks, torch.is_grad_enabled(), x, *weights)
        return output, *bias

    module.forward = tiled


class _Tiles(torch.autograd.Function):
    """Runs a graph for each tile, so that autograd outside sees each weight once.

    Otherwise it would add the gradients of a weight by tile, which are empty where layers add to main_grad themselves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[int, torch.Tensor], torch.Tensor],
        tiles: list[int],
        ranks: int,
        recorded: bool,
        x: torch.Tensor,
        *weights: torch.nn.Parameter,
    ) -> torch.Tensor:
        """`run` a tile by its number and its rows of x; `ranks` have a share of them each."""
        outputs, ctx.graphs, ctx.weights = [], [], weights
        for number, part in enumerate(x.detach().split([rows // ranks for rows in tiles])):
            _use(tiles[number])
            with torch.set_grad_enabled(recorded):
                output = run(number, part.requires_grad_(x.requires_grad))
            outputs.append(output.detach())
            if recorded:
                ctx.graphs.append((tiles[number], part, len(output), get_gradient_edge(output)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = list(ctx.weights)
        of_weights: list[torch.Tensor | None] = [None] * len(wanted)
        of_x: torch.Tensor | None = None
        gradients = list(gradient.split([rows for _, _, rows, _ in ctx.graphs]))
        several, end = len(ctx.graphs) > 1, sum(len(part) for _, part, _, _ in ctx.graphs)
        while ctx.graphs:
            tile, part, _, output = ctx.graphs.pop()
            _use(tile)
            inputs = [part, *wanted] if part.requires_grad else wanted
            found = list(torch.autograd.grad(output, inputs, gradients.pop(), allow_unused=True))
            if part.requires_grad:
                new = found.pop(0)
                if several:  # copied at once: it may lie in a user buffer, which the next tile uses again
                    of_x = new.new_empty(end, *new.shape[1:]) if of_x is None else of_x
                    of_x[end - len(part) : end], end = new, end - len(part)
                else:
                    of_x = new
            for i, (weight, new) in enumerate(zip(wanted, found, strict=True)):
                before = None if getattr(weight, "grad_added_to_main_grad", False) else of_weights[i]
                if new is not None:
                    of_weights[i] = new if before is None else before + new
        return None, None, None, None, of_x, *of_weights


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


# User buffers --------------------------------------------------------------------------------------------------------


def _sized(sizes: Sequence[int]) -> Callable[[Any], Any]:
    """Make a wrapper of upstream's function that creates user buffers, for buffers of all `sizes`."""

    def wrapped(original: Any) -> Any:
        def initialize() -> None:
            args, base = get_args(), sys.modules.get(_TE_MODULE)  # None: without a GPU (`cpu`)
            compiled = [base.tex] if base is not None else []  # type: ignore[attr-defined]
            made: dict[Any, Any] = {}
            classes = {name: partial(_once, made, getattr(tex, name)) for tex in compiled for name in _CLASSES}
            for size in sizes:
                rows = _set([args], seq_length=size * args.context_parallel_size, decoder_tp_comm_overlap=False)
                with rows, _set(compiled, **classes):
                    original()
                if base is not None:
                    _made[size], base._ub_communicators = base._ub_communicators, None  # type: ignore[attr-defined]
            if len(made) - 1 > (most := 31 if is_te_min_version("2.8.0") else 15):
                raise RuntimeError(
                    f"--tp-comm-overlap-cfg asks for {len(made) - 1} user buffers, and TransformerEngine has {most}; "
                    "give matrices of one method the same options"
                )

        return initialize

    return wrapped


def _once(made: dict[Any, Any], cls: Any, *args: Any, **options: Any) -> Any:
    """Return an object of a class for these arguments, the one in `made` if it has been made.

    TransformerEngine would make 12 buffers for every size, more than one process can have. Layers run one after the
    other, so layers of one kind share a buffer. All buffers exchange addresses through the helper of the first one,
    which TransformerEngine would not keep.
    """
    key = cls.__name__, *(() if "Helper" in cls.__name__ else (*map(str, args), *options.items()))
    if key not in made:
        made[key] = cls(*args, **options)
    return made[key]


def _use(size: int) -> None:
    """Make TransformerEngine's layers take the user buffers of `size` rows, if there are any."""
    if size in _made:
        sys.modules[_TE_MODULE]._ub_communicators = _made[size]  # type: ignore[attr-defined]
