"""Multi-latent attention of packed rows against upstream's of every document by itself.

Not against upstream's training: without TransformerEngine it has no core attention for it.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.worlds import run_world

LENGTHS = [37, 5, 22]
SIZES = {"kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}


class _Dense(torch.nn.Module):
    """Core attention of one document, [s, 1, heads, D]."""

    def __init__(self, config, softmax_scale, **unused):
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query, key, value, *unused, **options):
        q, k, v = (x.squeeze(1).transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale)
        return out.transpose(0, 1).reshape(len(query), 1, -1)


def _gradients(ours: bool, travels: bool, rope_type: str, q_lora_rank: int | None, recompute: dict):
    """Output, and gradients of the hidden states and the weights: a rank's, and how ranks have parts of them.

    `ours` of all rows, with latents that travel or without; upstream's document by document.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_wlb.adapter import layers, model
    from megatron_wlb.runtime.attention import AttentionOptions
    from megatron_wlb.runtime.backends import get_backend
    from megatron_wlb.runtime.metadata import ShardMetadata
    from tests.reference.chunks import per_sequence

    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    torch.manual_seed(0)
    config = MLATransformerConfig(
        **SIZES,
        **recompute,
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        q_lora_rank=q_lora_rank,
        qk_layernorm=q_lora_rank is not None,
        rope_type=rope_type,
        rotary_scaling_factor=4,
        original_max_position_embeddings=8,
        mscale_all_dim=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        transformer_impl="local",
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
    )
    layer = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=config.qk_layernorm)
    if ours:
        options = AttentionOptions(backend=get_backend("cpu", "cpu"), exchanged_before=travels)
        layers.adapt(layer, config, options)
    else:
        layer.submodules.self_attention.submodules.core_attention = _Dense
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = build_module(layer.submodules.self_attention, config=config, layer_number=1, pg_collection=groups)
    hidden = torch.randn(sum(LENGTHS), 1, config.hidden_size).chunk(ranks)[rank].requires_grad_()
    if ours:
        model._follow_positions([SimpleNamespace(modules=module.modules)], max_positions=max(LENGTHS))
        metadata = ShardMetadata.build(per_sequence(np.array(LENGTHS), 1), 0, options.backend.encode)
        out, _ = module(hidden, attention_mask=None, packed_seq_params=model.WlbPackedSeqParams(wlb=metadata))
    else:
        out = torch.cat([module(x, attention_mask=None)[0] for x in hidden.split(LENGTHS)])
    out.square().sum().backward()
    found = {"output": (out.detach(), 0), "hidden": (hidden.grad, 0)}
    for name, weight in module.named_parameters():
        dim = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None
        found[name] = weight.grad, "sum" if getattr(weight, "sequence_parallel", False) else dim
    return found


def merged(parts):
    tensors, (how, *_) = zip(*parts, strict=True)
    whole = sum(tensors) if how == "sum" else tensors[0] if how is None else torch.cat(tensors, how)
    assert how is not None or all(torch.allclose(each, whole) for each in tensors)
    return whole


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
UP_PROJECTION = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


@pytest.mark.parametrize(
    ("size", "travels", "rope_type", "q_lora_rank", "recompute"),
    [
        (1, False, "rope", None, {}),
        (1, False, "yarn", 20, {}),
        (2, False, "rope", 20, {}),
        (2, True, "rope", None, FULL),
        (2, True, "yarn", 20, UP_PROJECTION),
        (2, True, "rope", 20, {}),
    ],
)
def test_packed_rows_are_documents_by_themselves(size, travels, rope_type, q_lora_rank, recompute):
    """On one rank and on two, which have a share of the rows and of the heads each."""
    ours = run_world(_gradients, size, True, travels, rope_type, q_lora_rank, recompute)
    (theirs,) = run_world(_gradients, 1, False, False, rope_type, q_lora_rank, {})
    assert ours[0].keys() == theirs.keys()
    for name, (want, _) in theirs.items():
        got = merged([of_rank[name] for of_rank in ours])
        assert (got - want).norm() <= 1e-5 * want.norm(), name
