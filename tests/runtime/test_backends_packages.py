"""The backends on FlashAttention-3 and TransformerEngine, without these packages and without a GPU.

Stand-ins have the packages' interfaces and compute on the CPU, in float64, from the arguments alone, so the tests show
that calls bind and say what is meant. Only tests/gpu can show that the packages themselves agree.
"""

import importlib.util
import sys
import types

import pytest
import torch

from megatron_wlb.runtime.backends.flash import FlashAttn3Backend
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.reference import expected, kernel_args
from tests.covering import covering
from tests.runtime.calls import ALL, CALLS, WINDOWS, check, tensors

# Interfaces of FlashAttention-3 (without paged and rotary arguments), which differ in what backward returns from tags
# 2.8.0 to 2.8.3.post1 to the head of August 2026, and of TransformerEngine 2.12 and 2.18, to which 2.20 is equal.
FLASH_ATTN_3 = {
    "fwd": "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = "
    "None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? "
    "cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? "
    "max_seqlen_k = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int "
    "window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, int num_splits = 0, bool? pack_gqa = None, "
    "int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? "
    "seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, float? "
    "softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, float "
    "softcap = 0.0, bool deterministic = False, int sm_margin = 0)",
}
FLASH_ATTN_3_GRADIENTS = {
    "2.8.0": (3, "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"),
    "2026": (0, "(Tensor, Tensor, Tensor, Tensor, Tensor)"),
}
"""How many of the returned tensors are gradients, and the results."""
TE_QKV = "max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v"
TE_PADDED = "cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None"
TE_KINDS = "attn_bias_type='no_bias', attn_mask_type='padding', softmax_type='vanilla', window_size=(-1, -1)"
TE_SCALE = "attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout='sbh3d'"
TE = {
    "2.12": (
        f"is_training, {TE_QKV}, fake_dtype, fused_attention_backend, attn_bias=None, {TE_PADDED}, page_table_k=None, "
        f"page_table_v=None, s_quantizer=None, o_quantizer=None, {TE_SCALE}, {TE_KINDS}, bottom_right_diagonal=None, "
        "rng_gen=None, softmax_offset=None, return_max_logit=False, cuda_graph=False",
        f"{TE_QKV}, o, d_o, fake_dtype, dqkv_dtype, aux_ctx_tensors, fused_attention_backend, {TE_PADDED}, "
        f"s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, {TE_SCALE}, {TE_KINDS}, "
        "bottom_right_diagonal=None, deterministic=False, cuda_graph=False",
    ),
    "2.18": (
        f"is_training, {TE_QKV}, fake_dtype, fused_attention_backend, attn_bias=None, {TE_PADDED}, page_table_k=None, "
        f"page_table_v=None, s_quantizer=None, o_quantizer=None, {TE_SCALE}, o_format='sbhd', "
        f"qkv_scale_inv_format=None, {TE_KINDS}, bottom_right_diagonal=None, rng_gen=None, softmax_offset=None, "
        "return_max_logit=False, cuda_graph=False",
        f"{TE_QKV}, o, d_o, fake_dtype, aux_ctx_tensors, fused_attention_backend, {TE_PADDED}, s_quantizer=None, "
        f"dp_quantizer=None, dqkv_quantizer=None, {TE_SCALE}, o_format='sbhd', do_format='sbhd', dqkv_layout='sbh3d', "
        f"qkv_scale_inv_format=None, do_scale_inv_format=None, {TE_KINDS}, bottom_right_diagonal=None, "
        "deterministic=False, cuda_graph=False",
    ),
}


def varlen(q, k, v, cu, scale, left, causal, dout=None, out=None, lse=None):
    """out and log-sum-exps of entries in float64: bottom right if causal, at most `left` keys back (-1: all).

    `cu` is cu_q, cu_k and, where they are not cu_k, the begins of keys. With dout the gradients, for which kernels need
    out and log-sum-exps.
    """
    queries, keys, begins = cu[0].diff(), cu[1].diff(), cu[-1][:-1]
    used = queries > 0
    entries = list(zip(queries[used].tolist(), keys[used].tolist(), strict=True))
    rows = torch.cat([torch.arange(n) + begin for begin, (_, n) in zip(begins[used], entries, strict=True)])
    no_gradient = q.new_zeros(*q.shape[:2], v.shape[-1])
    given = q, k[rows], v[rows], no_gradient if dout is None else dout
    exact = expected(entries, *given, scale, None if left < 0 else left, causal)
    results = exact[0].to(q.dtype), exact[1].float()
    if dout is None:
        return results
    assert torch.equal(out, results[0]) and torch.equal(lse, results[1])
    totals = (
        torch.zeros_like(x, dtype=torch.float64).index_add_(0, rows, g) for x, g in zip((k, v), exact[3:], strict=True)
    )
    return [x.to(q.dtype) for x in (exact[2], *totals)]


def bound(operator, arguments, named):
    """Arguments by name, with the defaults of the schema."""
    parameters = operator._schema.arguments
    values = {p.name: p.default_value for p in parameters if p.has_default_value()}
    return values | dict(zip((p.name for p in parameters), arguments, strict=False)) | named


def check_varlen(a):
    assert a["is_causal"] or (a["window_size_left"], a["window_size_right"]) == (-1, -1)
    assert a["window_size_right"] in (-1, 0)
    assert a["max_seqlen_q"] >= max(2, int(a["cu_seqlens_q"].diff().max()))
    assert a["max_seqlen_k"] >= int(a["cu_seqlens_k"].diff().max())
    assert int(a["cu_seqlens_k"][-1]) == a["k"].shape[0]
    cu = a["cu_seqlens_q"], a["cu_seqlens_k"]
    return cu, a["softmax_scale"], a["window_size_left"], a["is_causal"]


def library(version):
    """The operators of FlashAttention-3, on the CPU."""
    made = torch.library.Library("flash_attn_3", "DEF")
    gradients, results = FLASH_ATTN_3_GRADIENTS[version]
    made.define(f"fwd{FLASH_ATTN_3['fwd']}")
    made.define(f"bwd{FLASH_ATTN_3['bwd']} -> {results}")
    operators = torch.ops.flash_attn_3

    def forward(*arguments, **named):
        a = bound(operators.fwd.default, arguments, named)
        out, lse = varlen(a["q"], a["k"], a["v"], *check_varlen(a))
        return out, lse, torch.empty(0), torch.empty(0)

    def backward(*arguments, **named):
        a = bound(operators.bwd.default, arguments, named)
        found = varlen(a["q"], a["k"], a["v"], *check_varlen(a), a["dout"], a["out"], a["softmax_lse"])
        for name, x in zip(("dq", "dk", "dv"), found, strict=True):
            assert a[name].is_contiguous()
            a[name].copy_(x)
        return (*(a[name] for name in ("dq", "dk", "dv")[:gradients]), *(torch.empty(0) for _ in range(5)))

    made.impl("fwd", forward, "CPU")
    made.impl("bwd", backward, "CPU")
    return made


def te_module(version):
    """`transformer_engine.pytorch.cpp_extensions.fused_attn` of a version."""
    module = types.ModuleType("fused_attn")
    module.FusedAttnBackend = {"F16_arbitrary_seqlen": "cuDNN"}

    def checked(a):
        heads, size, storage = *a["k"].shape[1:], a["k"].untyped_storage().data_ptr()
        layout = "thd_t2hd" if a["k"].shape == a["v"].shape else "thd_thd_thd"
        assert a["q"].is_contiguous() and a["qkv_layout"] == layout
        if layout == "thd_t2hd":
            assert a["k"].stride() == a["v"].stride() == (2 * heads * size, size, 1)
            assert storage == a["v"].untyped_storage().data_ptr()
            assert a["v"].storage_offset() == a["k"].storage_offset() + heads * size
        else:
            assert a["k"].is_contiguous() and a["v"].is_contiguous()
        assert (a["fused_attention_backend"], a["fake_dtype"], a["dropout"]) == ("cuDNN", a["q"].dtype, 0.0)
        causal = a["attn_mask_type"] == "padding_causal_bottom_right"
        assert causal or a["attn_mask_type"] == "padding"
        assert (a.get("o_format", "thd"), a.get("do_format", "thd")) == ("thd", "thd")
        assert a.get("dqkv_layout", layout) in (layout, "sbh3d")  # forward has only the default
        assert a["window_size"][1] == 0 if causal else a["window_size"] == (-1, -1)
        lengths, used = a["cu_seqlens_q"].diff(), a["cu_seqlens_kv"].diff() > 0
        assert torch.equal(lengths > 0, used), "an entry without queries"
        assert bool((used.int().diff() <= 0).all()) and len(used) == 32, "not rounded up by empty entries at the end"
        begins, stops = a["cu_seqlens_kv_padded"][:-1], a["cu_seqlens_kv_padded"][:-1] + a["cu_seqlens_kv"].diff()
        assert bool((stops <= a["cu_seqlens_kv_padded"][1:]).all()), "keys of entries overlap"
        assert int(begins[0]) >= 0 and int(a["cu_seqlens_kv_padded"][-1]) == a["k"].shape[0]
        assert all(x.dtype == torch.int32 and x.is_contiguous() for n, x in a.items() if n.startswith("cu_seqlens"))
        assert int(lengths.max()) <= a["max_seqlen_q"] and int(a["cu_seqlens_kv"].diff().max()) <= a["max_seqlen_kv"]
        assert torch.equal(a["cu_seqlens_q"], a["cu_seqlens_q_padded"])
        assert a["attn_scale"] is not None
        cu = a["cu_seqlens_q"], a["cu_seqlens_kv"], a["cu_seqlens_kv_padded"]
        return cu, a["attn_scale"], a["window_size"][0], causal

    def forward(a):
        assert a["is_training"] is True
        torch.rand(1, generator=a["rng_gen"])  # as the package does, dropout or not
        out, lse = varlen(a["q"], a["k"], a["v"], *checked(a))
        stats = lse.T.contiguous()[:, :, None]
        if version == "2.12":
            stats = torch.nn.functional.pad(stats, (0, 0, 0, 0, 0, 5), value=float("nan"))
        return out, [stats, torch.zeros(2, dtype=torch.int64)]

    def backward(a):
        stats, rng_state = a["aux_ctx_tensors"]
        assert stats.is_contiguous() and stats.shape == (*a["q"].shape[:2], 1) and rng_state.numel() == 2
        assert a["o"].is_contiguous() and a["d_o"].is_contiguous()
        assert a.get("dqkv_dtype", "bf16") == "bf16"
        return [*varlen(a["q"], a["k"], a["v"], *checked(a), a["d_o"], a["o"], stats[:, :, 0].T), None, None]

    for name, implementation, parameters in zip(
        ("fused_attn_fwd", "fused_attn_bwd"), (forward, backward), TE[version], strict=True
    ):
        scope = {"implementation": implementation}
        exec(f"def {name}({parameters}): return implementation(dict(locals()))", scope)
        setattr(module, name, scope[name])
    return module


PACKAGES = ("flash_attn_3 2.8.0", "flash_attn_3 2026", "te 2.12", "te 2.18")


@pytest.fixture(params=PACKAGES)
def backend(request, monkeypatch):
    """A backend on its stand-in."""
    packages = ("flash_attn_interface", "transformer_engine")
    if installed := [name for name in packages if importlib.util.find_spec(name)]:
        pytest.skip(f"{installed} are installed: tests/gpu has the real ones")
    package, version = request.param.split()
    if package == "te":
        path = "transformer_engine.pytorch.cpp_extensions.fused_attn"
        constants = types.ModuleType("constants")
        constants.TE_DType = {torch.bfloat16: "bf16"}
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.constants", constants)
        monkeypatch.setitem(sys.modules, path, te_module(version))
        for end in range(1, path.count(".") + 1):
            name = ".".join(path.split(".")[:end])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        yield TeBackend()
        return
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    made = library(version)
    yield FlashAttn3Backend()
    made._destroy()


@covering(
    indirect=("backend",),
    backend=PACKAGES,
    call=ALL,
    window=WINDOWS,
    heads={"GQA": (4, 2), "MHA": (2, 2)},
    head_sizes=[16, (24, 16)],
)
def test_calls_say_what_is_meant(backend, call, window, heads, head_sizes):
    entries, causal = call
    check(backend, entries, heads, head_sizes, torch.bfloat16, window=window, causal=causal)


def test_head_sizes_that_no_kernel_has_are_refused(backend):
    for head_size in (12, 264):
        with pytest.raises(ValueError, match=f"{backend.name!r} cannot run head size {head_size}: .* multiple of 8"):
            check(backend, CALLS["square"], head_size=head_size, dtype=torch.bfloat16)


def test_flash_attention_3_has_no_deterministic_gradients_of_large_heads(backend):
    torch.use_deterministic_algorithms(True)
    try:
        check(backend, CALLS["square"], head_size=16, dtype=torch.bfloat16)
        if backend.name == "flash_attn_3":
            with pytest.raises(ValueError, match="no deterministic gradients for head size 200, only up to 192"):
                check(backend, CALLS["square"], head_size=200, dtype=torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_flash_attention_3_is_for_hopper_alone(capability, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match=rf"for compute capability 9.0, not {capability[0]}\.0; choose another"):
        FlashAttn3Backend()


@pytest.mark.parametrize(
    ("cls", "package"), [(FlashAttn3Backend, "FlashAttention-3"), (TeBackend, "transformer-engine")]
)
def test_missing_packages_are_named(cls, package, monkeypatch):
    for name in ("flash_attn_interface", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("transformer_engine.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=f"attention backend '{cls.name}' needs {package}.*cannot be imported"):
        cls()


def test_random_numbers_are_left_alone(backend):
    before = torch.get_rng_state()
    given = tensors(CALLS["square"], (2, 2), 16, torch.bfloat16)[:3]
    backend.forward(*given, kernel_args(backend, CALLS["square"], "cpu", 0.3))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["te 2.18"], indirect=True)
def test_te_refuses_padded_log_sum_exps(backend, monkeypatch):
    monkeypatch.setattr(backend, "_forward", lambda q, **rest: (q, [torch.zeros(2, 4, 40, 1)]))
    with pytest.raises(ValueError, match="packed ones .rows, heads, 1. were expected: cuDNN is older than 9.6"):
        check(backend, CALLS["square"], dtype=torch.bfloat16)
