"""Layers are of the kinds that upstream makes them of."""

from types import SimpleNamespace

import pytest
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_moe_layer_pattern,
)
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.shape import model_of

SIZES = {"num_layers": 7, "hidden_size": 64, "num_attention_heads": 8}


@pytest.mark.parametrize("frequency", [1, 2, 3, 9, [0, 0, 1, 1, 0, 1, 1]])
def test_kinds_of_layers(frequency):
    def kinds(**stated):
        return model_of(MegatronArguments.of(SIZES | stated)).layer_kinds

    upstreams = SimpleNamespace(moe_layer_freq=frequency, linear_attention_freq=frequency, num_layers=7)
    experts = get_moe_layer_pattern(upstreams)
    assert kinds(num_experts=4, moe_layer_freq=frequency) == ["*" if each else "*-" for each in experts]
    linear = get_linear_attention_pattern(upstreams)
    found = kinds(experimental_attention_variant="gated_delta_net", linear_attention_freq=frequency)
    assert found == ["G" if each else "*" for each in linear]
    windows = [is_layer_window_attention((4, 0), frequency, 1 + i) for i in range(7)]
    assert kinds(window_size=(4, 0), window_attn_skip_freq=frequency) == ["W" if each else "*" for each in windows]
