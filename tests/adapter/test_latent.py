"""Multi-latent attention of packed rows against upstream's of every document by itself.

Not against upstream's training: without TransformerEngine it has no core attention for it.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
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


def _both(rope_type: str, q_lora_rank: int | None):
    """Output and gradients of the hidden states, ours of all rows and upstream's document by document."""
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

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = MLATransformerConfig(
        **SIZES,
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        q_lora_rank=q_lora_rank,
        rope_type=rope_type,
        rotary_scaling_factor=4,
        original_max_position_embeddings=8,
        mscale_all_dim=1.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        transformer_impl="local",
    )

    def built(core_attention):
        layer = get_gpt_layer_local_spec(multi_latent_attention=True)
        if core_attention is None:
            layers.adapt(layer, config, options)
        else:
            layer.submodules.self_attention.submodules.core_attention = core_attention
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return build_module(layer.submodules.self_attention, config=config, layer_number=1, pg_collection=groups)

    options = AttentionOptions(backend=get_backend("cpu", "cpu"))
    ours, upstreams = built(None), built(_Dense)
    ours.load_state_dict(upstreams.state_dict())
    model._follow_positions([SimpleNamespace(modules=ours.modules)], max_positions=max(LENGTHS))
    hidden = torch.randn(sum(LENGTHS), 1, config.hidden_size, requires_grad=True)
    metadata = ShardMetadata.build(per_sequence(np.array(LENGTHS), 1), 0, options.backend.encode)
    packed = model.WlbPackedSeqParams(wlb=metadata)
    out, _ = ours(hidden, attention_mask=None, packed_seq_params=packed)
    documents = [upstreams(x, attention_mask=None)[0] for x in hidden.split(LENGTHS)]
    results = []
    for module, found in ((ours, out), (upstreams, torch.cat(documents))):
        weights = [weight for _, weight in sorted(module.named_parameters())]
        found_gradients = torch.autograd.grad(found.square().sum(), [hidden, *weights])
        results.append([found.detach(), *found_gradients])
    return results


@pytest.mark.parametrize(("rope_type", "q_lora_rank"), [("rope", None), ("yarn", 20)])
def test_packed_rows_are_documents_by_themselves(rope_type, q_lora_rank):
    ((ours, upstreams),) = run_world(_both, 1, rope_type, q_lora_rank)
    for got, want in zip(ours, upstreams, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
