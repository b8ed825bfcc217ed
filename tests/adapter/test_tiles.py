"""Layers in tiles: equal to a single process without, and what TransformerEngine's layers see of it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_wlb.adapter import tiles
from megatron_wlb.describe import tiles as settings
from tests.adapter.training import BY_DOCUMENT, CP2, EP2, FULL, MOE, MTP, PP2, SELECTIVE, SHARED, TP2, VPP2, full, train
from tests.upstream.test_parity import ALL, compare

TP4 = "--tensor-model-parallel-size 4 --sequence-parallel --make-vocab-size-divisible-by 64"


@pytest.mark.parametrize(
    ("size", "layout", "model", "tile"),
    [
        (2, TP2, "--num-layers 2", 34),  # tiles of 32, 16, 8 and 4 rows
        full(2, TP2, "", 1000),  # a window of 256 is the largest tile
        full(4, TP4, "", 100),
        full(2, f"{TP2} {FULL}", "", 64),
        full(2, f"{TP2} {SELECTIVE} mlp", "", 64),
        (4, f"{TP2} {PP2}", "--position-embedding-type learned_absolute --num-layers 2", 64),
        (4, f"{TP2} {CP2} {BY_DOCUMENT}", f"{MTP} --num-layers 2", 34),
        full(8, f"{ALL} {BY_DOCUMENT}", MTP, 34),
        full(8, f"{TP2} {VPP2} {EP2} --expert-tensor-parallel-size 1", f"{MOE} {SHARED}", 50),
    ],
)
def test_equal_to_a_single_process(size, layout, model, tile, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "TILE_ROWS", tile)
    given = model.split()
    run = train(size, dataset, *layout.split(), *given, "--tp-comm-overlap", log=tmp_path / "log.jsonl")
    assert run["log"][0]["job"]["tp_tile_rows"] in range(tile // 2, tile + 1) or tile > 256
    compare(run, train(1, dataset, *given, log=tmp_path / "alone.jsonl"))


SIZES = (16, 8, 4)


@pytest.mark.parametrize(("rows", "ranks"), [(0, 2), (2, 2), (8, 2), (26, 2), (50, 2), (96, 4)])
def test_gathering_tile_by_tile_restores_the_order(rows, ranks):
    parts = tiles.split(rows, SIZES)
    assert sum(parts) == rows and parts.count(16) == rows // 16 and parts == sorted(parts, reverse=True)
    held = tiles.Tiles(SIZES, ranks).order(rows).view(ranks, -1)
    gathered = torch.cat([part.flatten() for part in held.split([part // ranks for part in parts], dim=1)])
    assert gathered.tolist() == list(range(rows))


COMPILED = {name: type(name, (), {"__init__": lambda *args, **options: None}) for name in tiles._CLASSES}
BASE = SimpleNamespace(_ub_communicators=None, tex=SimpleNamespace(**COMPILED))
"""TransformerEngine's module that has the user buffers, and what it makes them of."""


@pytest.fixture
def buffers(monkeypatch):
    """Creates user buffers of SIZES as upstream does, once each; each is its rows."""
    args, helpers, kinds = SimpleNamespace(seq_length=99, context_parallel_size=2), [], []

    def create():
        assert BASE._ub_communicators is None  # else TransformerEngine refuses
        BASE._ub_communicators = torch.zeros(rows := args.seq_length // 2, 3, dtype=torch.float64)
        # Of 12 buffers, those of one kind are one, and one helper makes all: TransformerEngine takes 31, or 15.
        helpers.append(BASE.tex.CommOverlapHelper("groups"))
        ring = [BASE.tex.CommOverlapP2P([rows, 3], helpers[-1], cga_size=1) for _ in range(4)]
        bulk = [BASE.tex.CommOverlap([rows, 3], helpers[-1], cga_size=2) for _ in range(8)]
        kinds.extend({*ring, *bulk})

    monkeypatch.setitem(sys.modules, tiles._TE_MODULE, BASE)
    monkeypatch.setattr(tiles, "get_args", lambda: args)
    monkeypatch.setattr(tiles, "_made", {})
    BASE._ub_communicators = None
    tiles._sized(SIZES)(create)()
    assert len({*helpers}) == 1 and len({*kinds}) == len(kinds) == 2 * len(SIZES)
    assert BASE.tex.CommOverlap is COMPILED["CommOverlap"]
    assert args.seq_length == 99 and [len(each) for each in tiles._made.values()] == list(SIZES)


class Buffered(torch.nn.Module):
    """Behaves as TransformerEngine's row-parallel layer in one process: rows of the buffer, or no user buffers.

    The gathered gradient lies in a buffer that all calls share, and the first micro-batch replaces main_grad.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.main_grad = torch.full((3, 3), torch.nan, dtype=torch.float64)
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        self.ub_overlap_rs_fprop = self.ub_overlap_ag_dgrad = True

    def forward(self, x):
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        self.is_first_microbatch = False
        overlaps = self.ub_overlap_rs_fprop and self.ub_overlap_ag_dgrad
        assert overlaps == (len(x) in SIZES) and (not overlaps or len(x) == len(BASE._ub_communicators))
        return Product.apply(x, self.weight, self, first, overlaps), None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module, first, overlaps):
        ctx.save_for_backward(x, weight)
        ctx.rest = module, first, overlaps
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), (module, first, overlaps) = ctx.saved_tensors, ctx.rest
        kept = BASE._ub_communicators.copy_(gradient) if overlaps else gradient
        module.main_grad = kept.t() @ x + (0 if first else module.main_grad)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.ones_like(weight), None, None, None  # means nothing


@pytest.mark.parametrize("rows", [16, 3, 35, 60])
def test_layers_with_user_buffers(rows, buffers):
    module = Buffered()
    tiles._tile(module, SIZES)
    wanted = torch.zeros(3, 3, dtype=torch.float64)
    for count in (rows, 27):  # the second micro-batch adds to the gradient of the first
        x, weights = torch.randn(2, count, 3, dtype=torch.float64)
        x.requires_grad_()
        out, _ = module(x)
        BASE._ub_communicators = None  # other layers have run
        module.weight.grad = None
        (out * weights).sum().backward()
        torch.testing.assert_close(x.grad, weights @ module.weight)
        assert torch.equal(module.weight.grad, torch.ones_like(module.weight))  # one, not the sum of tiles
        wanted += weights.t() @ x.detach()
    torch.testing.assert_close(module.main_grad, wanted)
    assert module.ub_overlap_rs_fprop and not module.disable_parameter_transpose_cache


@pytest.mark.parametrize(
    ("mlp", "tiled"),
    [
        ("dense", [("mlp", 2, ["fc1", "fc2"])]),
        ("experts", []),
        ("shared", [("shared fc1", 2, None), ("shared fc2", 1, None)]),
        ("shared, beside the dispatch", []),
    ],
)
def test_what_knows_no_documents_runs_in_tiles(mlp, tiled, monkeypatch):
    """Of every layer: QKV and projection, an MLP as a whole, and shared experts that upstream does not overlap."""

    class Layer(TransformerLayer):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.self_attention = SimpleNamespace(linear_qkv="qkv", linear_proj="projection")
            self.mlp = SimpleNamespace()
            if mlp == "dense":
                self.mlp = MLP.__new__(MLP)
                torch.nn.Module.__init__(self.mlp)
                self.mlp.linear_fc1, self.mlp.linear_fc2 = "fc1", "fc2"
            elif mlp.startswith("shared"):
                how = SimpleNamespace(moe_shared_expert_overlap=mlp != "shared")
                self.mlp.shared_experts = SimpleNamespace(config=how, linear_fc1="shared fc1", linear_fc2="shared fc2")

    found, layers = [], [Layer(), Layer()]
    monkeypatch.setattr(
        tiles, "_tile", lambda part, sizes, ranks=1, linears=None: found.append((part, sizes, ranks, linears))
    )
    chunks = [torch.nn.ModuleList(layers[:1]), torch.nn.ModuleList(layers[1:])]
    assert tiles.Tiles(SIZES, 2).tile_layers(chunks) is chunks
    for layer, of in zip(layers, (found[: len(found) // 2], found[len(found) // 2 :]), strict=True):
        expected = [(layer.mlp if part == "mlp" else part, SIZES, *rest) for part, *rest in tiled]
        assert of == [("qkv", SIZES, 2, None), ("projection", SIZES, 1, None), *expected]


@pytest.mark.parametrize(("new", "most"), [(True, 31), (False, 15)])
def test_more_user_buffers_than_transformer_engine_has_are_refused(new, most, monkeypatch):
    """Its helper is none of them."""
    monkeypatch.setitem(sys.modules, tiles._TE_MODULE, SimpleNamespace(_ub_communicators=None, tex=BASE.tex))
    monkeypatch.setattr(tiles, "get_args", lambda: SimpleNamespace(seq_length=99, context_parallel_size=2))
    monkeypatch.setattr(tiles, "is_te_min_version", lambda version: new)
    tex = sys.modules[tiles._TE_MODULE].tex

    def create(count):
        monkeypatch.setattr(tiles, "_made", {})
        tiles._sized((16,))(lambda: [tex.CommOverlapHelper(), *map(tex.CommOverlap, range(count))])()

    create(most)
    with pytest.raises(RuntimeError, match=f"asks for {most + 1} user buffers, and TransformerEngine has {most}; give"):
        create(most + 1)
