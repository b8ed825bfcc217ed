"""Layers in tiles: equal to a single process without, and what TransformerEngine's layers see of it."""

from types import SimpleNamespace

import pytest
import torch

from megatron_wlb.adapter import tiles
from megatron_wlb.describe import megatron
from tests.adapter.test_parity import ALL, BY_DOCUMENT, compare
from tests.adapter.training import EP2, FULL, MOE, MTP, PP2, SELECTIVE, TP2, VPP2, full, train

SHARED = "--moe-shared-expert-intermediate-size 64"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel --make-vocab-size-divisible-by 64"


@pytest.mark.parametrize(
    ("size", "layout", "model", "tile"),
    [
        (2, TP2, "", 34),  # divides no length
        full(2, TP2, "", 1000),  # no micro-batch has a tile
        full(4, TP4, "", 100),
        full(2, f"{TP2} {FULL}", "", 64),
        full(2, f"{TP2} {SELECTIVE} mlp", "", 64),
        (4, f"{TP2} {PP2} --wlb-defer-weight-gradients on", "--position-embedding-type learned_absolute", 64),
        (8, f"{ALL} {BY_DOCUMENT}", MTP, 34),
        full(8, f"{TP2} {VPP2} {EP2} --expert-tensor-parallel-size 1", f"{MOE} {SHARED}", 50),
    ],
)
def test_equal_to_a_single_process(size, layout, model, tile, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "TILE_ROWS", tile)
    given = model.split()
    run = train(size, dataset, *layout.split(), *given, "--tp-comm-overlap", log=tmp_path / "log.jsonl")
    assert run["log"][0]["job"]["tp_tile_rows"] == tile or tile > 256
    compare(run, train(1, dataset, *given, log=tmp_path / "alone.jsonl"))


@pytest.mark.parametrize(("rows", "ranks", "tile"), [(0, 2, 4), (6, 2, 8), (8, 2, 4), (26, 2, 4), (96, 4, 32)])
def test_gathering_tile_by_tile_restores_the_order(rows, ranks, tile):
    held = tiles.order(rows, ranks=ranks, tile=tile).view(ranks, -1)
    gathered = torch.cat([part.flatten() for part in held.split(tile // ranks, dim=1)])
    assert gathered.tolist() == list(range(rows))


class Buffered(torch.nn.Module):
    """Behaves as TransformerEngine's row-parallel layer in one process: rows of a tile, or no user buffers.

    The gathered gradient lies in a buffer that all calls share, and the first micro-batch replaces main_grad.
    """

    def __init__(self, tile, delay):
        super().__init__()
        self.tile, self.weight = tile, torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.main_grad = torch.full((3, 3), torch.nan, dtype=torch.float64)
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self.ub_overlap_rs_fprop = self.ub_overlap_ag_dgrad = self.fuse_wgrad_accumulation = True
        self.buffer, self.queue = torch.zeros(tile, 3, dtype=torch.float64), []
        self.wgrad_store = SimpleNamespace(
            delay_wgrad_compute=lambda: delay, put=lambda tensors, product: self.queue.append((tensors, product))
        )

    def forward(self, x):
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        self.is_first_microbatch = False
        overlaps = self.ub_overlap_rs_fprop and self.ub_overlap_ag_dgrad
        assert overlaps == (len(x) == self.tile)
        return Product.apply(x, self.weight, self, first, self.wgrad_store, overlaps), None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module, first, store, overlaps):
        ctx.save_for_backward(x, weight)
        ctx.rest = module, first, store, overlaps
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), (module, first, store, overlaps) = ctx.saved_tensors, ctx.rest
        kept = module.buffer.copy_(gradient) if overlaps else gradient

        def product(x, gradient):
            module.main_grad = gradient.t() @ x + (0 if first else module.main_grad)
            return module.main_grad, None

        if store.delay_wgrad_compute():
            store.put([x, kept], product)
        else:
            product(x, kept)
        return gradient @ weight, None, None, None, None, None


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("rows", [8, 3, 19, 24])
def test_layers_with_user_buffers(rows, delay):
    module = Buffered(8, delay)
    tiles._tile(module, 8)
    wanted, store = torch.zeros(3, 3, dtype=torch.float64), module.wgrad_store
    for count in (rows, 11):  # the second micro-batch adds to the gradient of the first
        x, weights = torch.randn(2, count, 3, dtype=torch.float64)
        x.requires_grad_()
        out, _ = module(x)
        (out * weights).sum().backward()
        torch.testing.assert_close(x.grad, weights @ module.weight)
        wanted += weights.t() @ x.detach()
    assert module.wgrad_store is store and len(module.queue) == 2 * delay  # one of every micro-batch
    for tensors, product in module.queue:
        assert all(x.grad_fn is None for x in tensors[0])  # else it keeps the graph until it runs
        product(*tensors)
    torch.testing.assert_close(module.main_grad, wanted)
    assert module.ub_overlap_rs_fprop and not module.disable_parameter_transpose_cache
