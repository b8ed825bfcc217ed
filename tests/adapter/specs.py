"""Specs of layers for `--spec`."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


def halved_layer(config):
    """A layer whose attention counts half."""
    layer = get_gpt_layer_local_spec(normalization=config.transformer.normalization)
    layer.submodules.self_attn_bda = lambda training, fused: lambda added, residual, dropout: residual + added[0] / 2
    return layer
