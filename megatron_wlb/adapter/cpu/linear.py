"""Linear layers on the CPU: kernels in torch, which run document by document, and layers without TransformerEngine."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

STANDS_FOR = (
    *("fla.modules.convolution", "fla.modules.l2norm", "fla.ops.gated_delta_rule"),
    *("mamba_ssm", "mamba_ssm.ops.triton.layernorm_gated", "mamba_ssm.ops.triton.ssd_combined"),
)
"""Modules for GPUs from which upstream imports kernels; this one takes their place in `sys.modules`."""
__version__ = "2.0.0"  # of mamba_ssm
mamba_chunk_scan_combined = None  # upstream imports it, and does not call it in training


def by_document(run: Callable[..., Tensor], begins: list[int], *given: Tensor) -> Tensor:
    """Apply `run` to the rows of each document of tensors [1, s, ...]; `begins` [documents + 1]."""
    sizes = [stop - start for start, stop in itertools.pairwise(begins)]
    return torch.cat([run(*rows) for rows in zip(*(x.split(sizes, dim=1) for x in given), strict=True)], dim=1)


def _begins(x: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    found: list[int] = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    return found


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal convolution of x [1, s, channels] by weight [channels, taps], and SiLU."""
    before = pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return silu(conv1d(before, weight[:, None], bias, groups=len(weight))).transpose(1, 2)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Any = None, cu_seqlens: Any = None, **unused: Any) -> Any:
    """fla.modules.convolution.causal_conv1d."""
    return by_document(partial(_convolved, weight=weight, bias=bias), _begins(x, cu_seqlens), x), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """fla.modules.l2norm.l2norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def chunk_gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any = None, **unused: Any) -> Any:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule, by upstream's in torch."""
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule as rule

    return by_document(lambda *given: rule(*given)[0], _begins(q, cu_seqlens), q, k, v, g, beta), None


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    *,
    headdim: int,
    ngroups: int,
    **unused: Any,
) -> Tensor:
    """mamba_ssm's kernel: z, x, B, C and dt [1, s, ...] -> [1, s, heads * headdim].

    A state h of a head follows h = exp(dt A) h + dt x B and gives C h + D x, gated by z. Here, in quadratic form.
    """
    heads = len(A)
    state = (zxbcdt.shape[-1] - 2 * heads * headdim - heads) // (2 * ngroups)
    sizes = (heads * headdim, heads * headdim + 2 * ngroups * state, heads)

    def run(rows: Tensor) -> Tensor:
        z, xbc, dt = rows.split(sizes, dim=-1)
        mixed = _convolved(xbc, conv1d_weight, conv1d_bias)[0]
        x, b, c = mixed.split((sizes[0], ngroups * state, ngroups * state), dim=-1)
        x, dt = x.unflatten(-1, (heads, headdim)), softplus(dt[0] + dt_bias)
        b, c = (each.unflatten(-1, (ngroups, state)) for each in (b, c))
        passed = (dt * A).cumsum(0)
        later = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        decay = (passed[:, None] - passed).masked_fill(~later[:, :, None], -torch.inf).exp()
        seen = torch.einsum("tgn,sgn->tsg", c, b).repeat_interleave(heads // ngroups, dim=-1)
        out = torch.einsum("tsh,shp->thp", decay * seen, dt[:, :, None] * x) + D[:, None] * x
        return out.flatten(1)[None] * silu(z)

    ends = [] if seq_idx is None else (1 + torch.nonzero(seq_idx[0].diff())[:, 0]).tolist()
    return by_document(run, [0, *ends, zxbcdt.shape[1]], zxbcdt)


class RMSNorm(torch.nn.Module):
    """mamba_ssm's norm, without a gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=unused.get("dtype")))
        self._eps, self._group = eps, group_size or hidden_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self._group))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self._eps)).flatten(-2) * self.weight


def install() -> None:
    """Give upstream's models linear layers without TransformerEngine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
    from megatron.core.ssm import mamba_mixer

    from megatron_wlb.adapter.layers.norm import TorchNorm

    mamba_mixer._check_mamba_sequence_packing_support = lambda **asked: (True, None)
    specs._get_backend_spec_provider = lambda config: LocalSpecProvider()
    specs.get_transformer_layer_with_experimental_attention_variant_spec = _local_layers
    hybrid_block.TENorm = TorchNorm
    _localize(hybrid_layer_specs.hybrid_stack_spec.submodules, TorchNorm)


def _local_layers(config: Any, backend: Any = None) -> list[Any]:
    """Return specs of local layers, where upstream has only TransformerEngine's."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    net = hybrid_stack_spec.submodules.gdn_layer.submodules.self_attention
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    options = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
    layers: list[Any] = get_gpt_decoder_layer_specs(plain, use_transformer_engine=False, **options)
    for i in (i for i, linear in enumerate(get_linear_attention_pattern(config)) if linear):
        layers[i] = copy.deepcopy(layers[i])
        layers[i].submodules.self_attention = copy.deepcopy(net)
    return layers


def _localize(stack: Any, norm: Any) -> None:
    """Put local layers into the spec of upstream's hybrid stack, in place."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    ends = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    mamba, net, attention, mlp, moe = (
        getattr(stack, f"{name}_layer").submodules for name in ("mamba", "gdn", "attention", "mlp", "moe")
    )
    mamba.norm = net.input_layernorm = attention.input_layernorm = mlp.pre_mlp_layernorm = moe.pre_mlp_layernorm = norm
    vars(mamba.mixer.submodules).update(ends)
    vars(net.self_attention.submodules).update(ends, out_norm=norm)
    vars(attention.self_attention.submodules).update(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp.mlp = partial(MLP.as_mlp_submodule, submodules=linears)
    moe.mlp = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
