"""K and V of backward travel while what comes before attention computes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.worlds import run_world


def _events(recompute: bool) -> list[str]:
    """What a forward and backward of two layers does, in order: collectives, and the MLP's backward."""
    from megatron_wlb.adapter import model
    from megatron_wlb.adapter.layers.attention import WlbCoreAttention
    from megatron_wlb.runtime import all_to_all, attention
    from megatron_wlb.runtime.backends import get_backend
    from megatron_wlb.runtime.metadata import ShardMetadata
    from tests.reference.chunks import per_document

    events, collective, backend = [], all_to_all._all_to_all, get_backend("cpu", "cpu")
    metadata = ShardMetadata.build(per_document(np.array([32]), 2), dist.get_rank(), backend.encode)
    packed = model.WlbPackedSeqParams(wlb=metadata)

    def counted(*tensors, **rest):
        events.append("exchange")
        return collective(*tensors, **rest)

    all_to_all._all_to_all = counted

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            config = SimpleNamespace(window_size=None, window_attn_skip_freq=None, softmax_type="vanilla")
            options = attention.AttentionOptions(backend=backend)
            groups = SimpleNamespace(cp=dist.group.WORLD, tp=None)
            core = WlbCoreAttention(config, 1, None, "self", options, pg_collection=groups)
            self.self_attention = torch.nn.Module()
            self.self_attention.core_attention = core

        def forward(self, hidden):
            core = self.self_attention.core_attention
            heads = hidden.view(16, 1, 2, 16)
            if recompute:
                attended = checkpoint(lambda x: core(x, x, x, None, None, None, packed), heads, use_reentrant=True)
            else:
                attended = core(heads, heads, heads, None, packed_seq_params=packed)
            attended.register_hook(lambda gradient: events.append("MLP"))
            return hidden + torch.tanh(attended), None

    layers = torch.nn.ModuleList([Layer(), Layer()])
    model._send_ahead([SimpleNamespace(decoder=SimpleNamespace(layers=layers))])
    hidden = torch.randn(16, 1, 32, requires_grad=True)
    out = hidden
    for layer in layers:
        out, _ = layer(out)
    events.append("backward")
    out.sum().backward()
    return events


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_keys_of_backward_travel_while_the_mlp_computes(recompute):
    """Where attention is recomputed, its K and V travel for forward once more, and then for backward."""
    layer = ["MLP", "exchange", "exchange", "exchange"] if recompute else ["exchange", "MLP", "exchange"]
    for events in run_world(_events, 2, recompute):
        assert events == ["exchange", "exchange", "backward", *layer, *layer]
