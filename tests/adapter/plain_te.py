"""What TransformerEngine's layers call of its compiled part, in plain torch: for values on a machine without a GPU."""

import sys
from unittest import mock

import torch


def generic_gemm(
    A, transa, B, transb, out, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad, *rest, **options
):
    """Column-major, as cuBLAS: rows of B times A."""
    _, _, accumulate, *_ = rest
    rows = B.reshape(-1, B.shape[-1])
    assert quantizer is None and not gelu and options.get("comm_overlap") is None
    found = (rows.t() if transb else rows) @ (A.t() if transa else A).reshape(-1, A.shape[0] if transa else A.shape[-1])
    of_bias = rows.sum(0) if grad and bias is not None else None
    if bias is not None and not grad:
        found += bias
    if out is None:
        out = found.to(A.dtype if out_dtype is None else _dtype(out_dtype))
        out = out if transb else out.view(*B.shape[:-1], -1)
    else:
        out.view(found.shape).add_(found) if accumulate else out.view(found.shape).copy_(found)
    return out, of_bias, None, options.get("extra_output")


def _dtype(of):
    names = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16}
    return of if isinstance(of, torch.dtype) else names[of.name]


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, sm_margin, zero_centered):
    """Output, no mean, and 1 / sigma of each row."""
    assert quantizer is None and not zero_centered
    sigma = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = (x.float() * sigma[..., None] * weight.float()).to(x.dtype)
    return (y if out is None else out.copy_(y)), None, sigma


def rmsnorm_bwd(dz, x, sigma, weight, *unused):
    """Gradients of the input and of the weight."""
    unit, scaled = x.float() * sigma[..., None], dz.float().view(x.shape) * weight.float()
    dx = sigma[..., None] * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz.float().view(x.shape) * unit).sum(0).to(weight.dtype)


def multi_tensor_sgd(chunk, noop, lists, decay, momentum, dampening, lr, *unused):
    """Without momentum."""
    for gradient, parameter, *_ in zip(*lists, strict=False):
        parameter.add_(gradient + decay * parameter, alpha=-lr)


def multi_tensor_l2norm(chunk, noop, lists, per_tensor=False):
    """Of all tensors together, and of each."""
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm()[None], norms


def multi_tensor_scale(chunk, noop, lists, scale):
    """From the first tensors to the second."""
    for given, out in zip(*lists, strict=True):
        out.copy_(given * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def install(monkeypatch):
    """Call these instead, in processes that are forked from now on, too."""
    from transformer_engine.pytorch.module import base

    compiled = sys.modules["transformer_engine_torch"]
    plain = {id(getattr(compiled, name)): value for name, value in globals().items() if hasattr(compiled, name)}
    for module in [m for name, m in sys.modules.items() if name.startswith(("transformer_engine", "megatron"))]:
        for name, value in list(vars(module).items()):
            if id(value) in plain and callable(value):
                monkeypatch.setattr(module, name, plain[id(value)])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # it asks, for its users' sake
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    make = base.TransformerEngineBaseModule.__init__

    def init(*args, **kwargs):
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            make(*args, **kwargs)

    monkeypatch.setattr(base.TransformerEngineBaseModule, "__init__", init)
