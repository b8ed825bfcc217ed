"""Memory that upstream's self attention keeps for backward with WLB's core attention in it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.worlds import run_world

TOKENS, HEAD_SIZE = 96, 16
KEEPS = ("_ContextParallelAttentionBackward", "CheckpointFunctionBackward")
"""Names of the autograd functions whose saved tensors are looked at."""


def _saved(tp: int, heads: tuple[int, int], rope: bool, recompute: bool) -> list[tuple[tuple[int, ...], int, int]]:
    """Shape, bytes and bytes of its memory of every tensor that attention keeps, on the last of `tp` ranks."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megatron_wlb.adapter import compat, model
    from megatron_wlb.runtime.attention import AttentionOptions
    from megatron_wlb.runtime.backends import get_backend
    from megatron_wlb.runtime.metadata import ShardMetadata
    from megatron_wlb.sharding import per_document

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=tp - 1, world_size=tp, store=FakeStore())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads[0] * HEAD_SIZE,
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        kv_channels=HEAD_SIZE,
        tensor_model_parallel_size=tp,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        recompute_granularity="selective" if recompute else None,
        recompute_modules=["core_attn"] if recompute else None,
    )
    made = SimpleNamespace(transformer=config, transformer_impl="local", normalization="RMSNorm", qk_l2_norm=False)
    backend = get_backend("cpu", "cpu")
    compat.default_layer_spec = _layers
    spec = model._layer_spec(made, given=None, options=AttentionOptions(backend=backend))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    attention = build_module(
        spec.layer_specs[0].submodules.self_attention,
        config=config,
        layer_number=1,
        pg_collection=groups,
    )
    metadata = ShardMetadata.build(per_document(np.array([TOKENS - 1, 1]), 1), 0, backend.encode)
    hidden = torch.randn(TOKENS, 1, config.hidden_size, requires_grad=True)
    angles = torch.randn(TOKENS, 1, 1, HEAD_SIZE) if rope else None
    out, _ = attention(
        hidden,
        attention_mask=None,
        rotary_pos_emb=(angles, angles) if rope else None,
        packed_seq_params=model.WlbPackedSeqParams(wlb=metadata),
    )
    kept, todo, seen = [], [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if node.name() in KEEPS:
            kept += [x for x in node.saved_tensors if x is not None and x.is_floating_point()]
    return [(tuple(x.shape), x.nbytes, x.untyped_storage().nbytes()) for x in kept]


def _layers(config, vp_stage=None):
    """Of the whole model only this is looked at."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec()


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize(
    ("tp", "heads"), [(1, (4, 4)), (1, (8, 2)), (2, (8, 2)), (16, (64, 8))], ids=["MHA", "GQA", "TP2", "TP16 of 64/8"]
)
def test_attention_keeps_no_memory_of_others(tp, heads, rope, recompute):
    (kept,) = run_world(_saved, 1, tp, heads, rope, recompute)
    local, keys = heads[0] // tp, max(1, heads[1] // tp)
    q, k = (TOKENS, local, HEAD_SIZE), (TOKENS, keys, HEAD_SIZE)
    expected = [(n, 1, *rest) for n, *rest in (q, k, k)] if recompute else [q, (TOKENS, 2, *k[1:]), q]
    shapes = [shape for shape, _, _ in kept]
    assert shapes[: len(expected)] == expected
    assert all(shape[0] == local for shape in shapes[len(expected) :])  # log-sum-exps
    assert all(memory == size for _, size, memory in kept), kept
