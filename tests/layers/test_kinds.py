"""A kind of layers that nobody else knows: its file, its letter and its field are enough to plan with it."""

from dataclasses import make_dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from megatron_wlb import layers
from megatron_wlb.cost.host import launches
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.shape import model_of
from megatron_wlb.layers.delta_net import gated_delta_net
from megatron_wlb.layers.linear import LinearLayer
from megatron_wlb.layers.mamba import mamba
from megatron_wlb.layers.part import layer_input_bytes
from megatron_wlb.model import MIXERS, Mixer, ModelShape
from megatron_wlb.simulate.memory import layer_bytes
from megatron_wlb.simulate.passes import pass_times
from tests.features import STAND_IN, files_that_name
from tests.simulate.shards import job, shards_of

RETENTION = Mixer(projected=8192, inner=4096, scan=1 << 20, kept=12288)


class Retention(LinearLayer):
    letters = "R"
    title = "retention"
    modules: ClassVar = {"attn": 850.0}
    variants = ("retention",)

    def sizes(self, a, sizes):
        return {"retention": RETENTION} if "R" in sizes["pattern"] else {}


@pytest.fixture
def retention(monkeypatch):
    """The kind entered, and a shape with its field."""
    kind = Retention()
    monkeypatch.setitem(MIXERS, "R", "retention")
    monkeypatch.setattr(layers, "KINDS", (kind, *layers.KINDS))
    monkeypatch.setitem(layers._PARTS, "R", kind)
    monkeypatch.setitem(layers.VARIANTS, "retention", kind)
    shape = make_dataclass("Shape", [("retention", Mixer | None, None)], bases=(ModelShape,), frozen=True, kw_only=True)
    monkeypatch.setattr("megatron_wlb.describe.shape.ModelShape", shape)


@pytest.mark.usefixtures("retention")
def test_a_made_up_kind_is_planned_by_its_file_alone():
    sizes = {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 11008, "swiglu": True}
    flags = {"experimental_attention_variant": "retention", "linear_attention_freq": 2}
    model = model_of(MegatronArguments.of(sizes | flags))
    assert model.layer_kinds == list("R*R*") and model.mixer_of("R") == RETENTION
    assert model.token_weights == model.layer_weights + RETENTION.scan // 2 + model.vocabulary_weights // 4
    given = job(model=model, cp=2, tp=2)
    assert layer_bytes(given, "R") > 2 * layer_input_bytes(given) + 2 * (RETENTION.kept + RETENTION.inner) / 2
    assert launches(replace(given, cuda_graphs=()), "R") == launches(replace(given, cuda_graphs=()), "*")
    lengths = [[1 << 16, 1 << 16]]
    times = pass_times(given, shards_of(given, lengths))
    longer = pass_times(given, shards_of(given, [[1 << 17]]))
    alone = replace(given, model=replace(model, pattern="R"))
    linear = pass_times(alone, shards_of(alone, lengths))
    assert (linear.layers[0].attention == 0).all() and (linear.layers[0].exchange > 0).all()
    assert (linear.forward < times.forward).all() and (times.forward < longer.forward).all()
    np.testing.assert_array_equal(pass_times(alone, shards_of(alone, [[1 << 17]])).forward, linear.forward)


def test_sizes_of_mixers_by_hand():
    """Mamba: z and x, B and C of 2 groups, and a step for each of 8 heads of 64, whose state has 16 values a channel.

    A delta net: 4 heads of Q and K of 32, 8 of V and a gate of 48, of which each has a decay and a rate.
    """
    found = mamba(heads=8, head_dim=64, groups=2, state_dim=16)
    assert (found.projected, found.inner, found.scan) == (2 * 512 + 2 * 2 * 16 + 8, 512, 2 * 512 * 16)
    assert found.kept == found.projected + 2 * 512
    net = gated_delta_net(key_heads=4, value_heads=8, key_dim=32, value_dim=48)
    assert (net.projected, net.inner, net.scan) == (2 * 128 + 2 * 384 + 2 * 8, 384, 3 * 8 * 32 * 48)
    assert net.kept == net.projected + 2 * 128 + 2 * 8 * 32 + 64 * 8 + 7 * 384
    alike = gated_delta_net(key_heads=8, value_heads=8, key_dim=32, value_dim=48)
    assert alike.kept == alike.projected + 2 * 256 + 64 * 8 + 7 * 384  # nothing is repeated


@pytest.mark.parametrize("kind", ["mamba", "delta_net"])
def test_few_files_name_a_kind(kind):
    """Those that a new one adds or changes: its two files, their list, its letter and field, and its arguments."""
    found = files_that_name("|".join((kind, kind.upper(), kind.title().replace("_", "")))) - {STAND_IN}
    files = {f"layers/{kind}.py", f"adapter/layers/{kind}.py", "layers/__init__.py", "model.py"}
    assert found | {"describe/arguments.py"} == files | {"describe/arguments.py"}
