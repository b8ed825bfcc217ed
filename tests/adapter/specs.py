"""Specs of layers for `--spec`."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention


class SharpAttention(SelfAttention):
    """Attention that makes its queries twice as long."""

    def get_query_key_value_tensors(self, *args, **kwargs):
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return 2 * query, key, value


class DoubtfulAttention(DotProductAttention):
    """A core attention that is not Megatron's."""


def doubtful_layer(config=None):
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = DoubtfulAttention
    return layer


DOUBTFUL = doubtful_layer()


def halved_layer(config):
    """A layer whose attention is sharp, and counts half."""
    layer = get_gpt_layer_local_spec(normalization=config.transformer.normalization)
    layer.submodules.self_attention.module = SharpAttention
    layer.submodules.self_attn_bda = lambda training, fused: lambda added, residual, dropout: residual + added[0] / 2
    return layer
