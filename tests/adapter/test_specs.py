"""Specs of layers as they are adapted: attention, norms, sinks; and which are not Megatron's."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_wlb.adapter import layers, model
from megatron_wlb.adapter.layers import attention, latent
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend
from tests.adapter.specs import DOUBTFUL, SharpAttention

OPTIONS = AttentionOptions(backend=get_backend("cpu", "cpu"))
LOCAL = {"transformer_impl": "local", "multi_latent_attention": False, "qk_layernorm": False}
LOCAL |= {"experimental_attention_variant": None, "normalization": "RMSNorm"}


def config(**changes):
    return SimpleNamespace(**LOCAL | changes)


@pytest.mark.parametrize(
    ("core", "name"),
    [
        (DotProductAttention, ""),
        (ModuleSpec(module=DotProductAttention), ""),
        (partial(attention.WlbCoreAttention, options=OPTIONS), ""),
        (type("TEDotProductAttention", (), {"__module__": "megatron.core.extensions"}), ""),
        (type("TEDotProductAttention", (), {"__module__": "unittest.mock"}), ""),  # without TransformerEngine
        (type("FlexAttention", (), {"__module__": "megatron.core.extensions"}), "FlexAttention"),
        (type("DotProductAttention", (), {"__module__": "mine.megatron"}), "DotProductAttention"),
    ],
)
def test_a_core_attention_that_is_not_megatrons_is_named(core, name):
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = core
    assert attention.foreign_core(layer) == name


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("module", [SelfAttention, SharpAttention])
def test_attention_is_replaced_once_and_local_norms(module, norms, impl):
    """Also of a class of its own, and again for layers that share a spec."""
    layer = get_gpt_layer_local_spec()
    spec, before = layer.submodules.self_attention, copy.copy(layer.submodules)
    spec.module, norm_of_q = module, spec.submodules.q_layernorm
    for _ in range(2):
        layers.adapt(layer, config(transformer_impl=impl, qk_layernorm=norms), OPTIONS)
    assert spec.module.__mro__[1:3] == (attention.WlbSelfAttention, module)
    assert spec.submodules.core_attention.func is attention.WlbCoreAttention
    assert spec.submodules.core_attention.keywords == {"options": OPTIONS}
    local = impl == "local"
    of_q = {spec.submodules.q_layernorm, spec.submodules.k_layernorm}
    assert of_q == {TorchNorm if local and norms else norm_of_q}
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        assert getattr(layer.submodules, name) is (TorchNorm if local else getattr(before, name))


@pytest.mark.parametrize("travel", [False, True])
def test_latent_attention_has_cores_and_norms_of_its_own(travel):
    layer = get_gpt_layer_local_spec(multi_latent_attention=True)
    options = AttentionOptions(backend=OPTIONS.backend, exchanged_before=travel)
    layers.adapt(layer, config(multi_latent_attention=True, qk_layernorm=True), options)
    spec = layer.submodules.self_attention
    core = spec.submodules.core_attention
    expected = (
        (latent.WlbLatentExchange, latent.WlbLatentCore)
        if travel
        else (latent.WlbLatentAttention, attention.WlbCoreAttention)
    )
    assert (spec.module, core.module) == expected and core.params == {"options": options}
    assert spec.submodules.q_layernorm is spec.submodules.kv_layernorm is TorchNorm


def test_the_stack_of_hybrid_models_is_copied():
    given = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    before = {name: repr(part) for name, part in vars(given.submodules).items()}
    made = layers.adapt_stack(given, config(transformer_impl="transformer_engine"), OPTIONS)
    assert {name: repr(part) for name, part in vars(given.submodules).items()} == before
    changed = {name for name, part in vars(made.submodules).items() if repr(part) != before[name]}
    assert (
        changed == {kind.stack_layer for kind in layers.KINDS if kind.stack_layer} == {"attention_layer", "gdn_layer"}
    )
    assert issubclass(made.submodules.attention_layer.submodules.self_attention.module, attention.WlbSelfAttention)


def with_stage(config, vp_stage):
    layer = get_gpt_layer_local_spec()
    layer.submodules.stage = vp_stage
    return layer


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("given", [get_gpt_layer_local_spec(), lambda config: get_gpt_layer_local_spec(), with_stage])
def test_a_spec_is_made_for_the_stage_and_not_changed(given, impl, monkeypatch):
    """Local layers are a block, whose final norm is replaced, too."""
    monkeypatch.setattr(model, "get_num_layers_to_build", lambda config, vp_stage: 2 + vp_stage)
    spec = model._layer_spec(config(transformer_impl=impl), 1, given=given, options=OPTIONS)
    layer = spec.layer_specs[0] if impl == "local" else spec
    assert issubclass(layer.submodules.self_attention.module, attention.WlbSelfAttention)
    assert getattr(layer.submodules, "stage", None) == (1 if given is with_stage else None)
    if impl == "local":
        assert len(spec.layer_specs) == 3 and spec.layer_norm is TorchNorm
    if isinstance(given, ModuleSpec):
        assert given.submodules.self_attention.module is SelfAttention


def test_a_block_and_a_layer_that_is_not_megatrons(capsys):
    """Each of its layers; a function's is found when it is called."""
    block = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec(), get_gpt_layer_local_spec()])
    spec = model._layer_spec(config(), given=block, options=OPTIONS)
    assert all(
        issubclass(each.submodules.self_attention.module, attention.WlbSelfAttention) for each in spec.layer_specs
    )
    block.layer_specs[1] = DOUBTFUL
    with pytest.raises(SystemExit, match="2"):
        model._layer_spec(config(transformer_impl="transformer_engine"), given=lambda config: block, options=OPTIONS)
    assert "the layer's is DoubtfulAttention" in capsys.readouterr().err


def core(softmax_type, **changes):
    """The core attention of the second of two tensor-parallel ranks, in the first of three layers."""
    given = {
        "softmax_type": softmax_type,
        "num_attention_heads": 6,
        "params_dtype": torch.float64,
        "window_size": (5, 0),
    }
    given |= {
        "use_cpu_initialization": True,
        "perform_initialization": True,
        "window_attn_skip_freq": 2,
        "num_layers": 3,
    }
    given["init_method"] = lambda weight: weight.data.fill_(0.5)
    groups = SimpleNamespace(cp="cp", tp=SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    how = {"softmax_scale": 0.3, "pg_collection": groups}
    return attention.WlbCoreAttention(SimpleNamespace(**given | changes), 1, None, "self", OPTIONS, **how)


def test_sinks_are_of_the_heads_of_a_rank():
    learned = core("learnable")
    sinks = learned.softmax_offset
    assert sinks.tolist() == [0.5] * 3 and sinks.dtype == torch.float64
    assert (sinks.tensor_model_parallel, sinks.partition_dim, sinks.partition_stride) == (True, 0, 1)
    assert (learned.options.scale, learned.options.window) == (0.3, attention.keys_before(learned.config)[0])
    assert attention.keys_before(learned.config) == [5, None, 5]
    assert attention.keys_before(SimpleNamespace(**vars(learned.config) | {"window_size": (-1, 0)})) == [None] * 3


@pytest.mark.parametrize(("kind", "expected"), [("vanilla", None), ("off-by-one", [0] * 3), ("learnable", [0.5] * 3)])
def test_a_sink_joins_the_softmax(kind, expected, monkeypatch):
    made, query, seen = core(kind), torch.rand(4, 1, 3, 8), []
    monkeypatch.setattr(attention, "context_parallel_attention", lambda q, *given: seen.append((q.shape, given)) or q)
    packed = SimpleNamespace(wlb="shard")
    out = made(query, query[:, :, :1], query[:, :, :1], None, packed_seq_params=packed)
    ((shape, (k, v, metadata, group, options, sink)),) = seen
    assert (shape, k.shape, v.shape, out.shape) == ((4, 3, 8), (4, 1, 8), (4, 1, 8), (4, 1, 24))
    assert (metadata, group, options) == ("shard", "cp", made.options) and made.last is None
    assert (None if sink is None else sink.tolist()) == expected


@pytest.mark.parametrize(("kind", "made"), [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)])
def test_norms_are_torchs(kind, made):
    norm = TorchNorm(SimpleNamespace(normalization=kind, sequence_parallel="sp"), 6, eps=0.25)
    assert (type(norm), norm.weight.shape, norm.eps) == (made, (6,), 0.25)
    assert {weight.sequence_parallel for weight in norm.parameters()} == {"sp"}
