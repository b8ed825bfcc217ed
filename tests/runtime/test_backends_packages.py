"""The backends of GPUs without a GPU, and without the packages of FlashAttention-3 and TransformerEngine.

Stand-ins take what the packages' and torch's functions take, and compute in float64 from that alone. Only tests/gpu can
show that these agree.
"""

import importlib.util
import sys
from inspect import Parameter, Signature
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_wlb.runtime.backends.flash import AtenBackend, FlashAttn3Backend
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.reference import expected, kernel_args
from tests.covering import covering
from tests.runtime.calls import ALL, CALLS, WINDOWS, check
from tests.runtime.oracle import inputs

PACKAGES = ("flash_attn_interface", "transformer_engine")
TE = "transformer_engine.pytorch"
# Parameters of forward and backward, with = where they have defaults. FlashAttention-3 is that of tags 2.8.0 to
# 2.8.3.post1 and of the head of August 2026. TransformerEngine 2.20 is as 2.18.
ENTRIES = "cu_seqlens_q= cu_seqlens_k="
LENGTHS = (
    "seqused_q= seqused_k= max_seqlen_q= max_seqlen_k= softmax_scale= is_causal= window_size_left= window_size_right="
)
QKV = "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v"
PADDED = "cu_seqlens_q_padded= cu_seqlens_kv_padded="
SCALE = "attn_scale= dropout= fast_zero_fill= qkv_layout="
KINDS = "attn_bias_type= attn_mask_type= softmax_type= window_size= bottom_right_diagonal="
CACHE = f"attn_bias= {PADDED} page_table_k= page_table_v= s_quantizer= o_quantizer="
LAST = "rng_gen= softmax_offset= return_max_logit= cuda_graph="
GRADIENTS = f"aux_ctx_tensors fused_attention_backend {PADDED} s_quantizer= dp_quantizer= dqkv_quantizer= {SCALE}"
PARAMETERS = {
    "flash_attn_3": (
        f"q k v k_new= v_new= q_v= out= {ENTRIES} cu_seqlens_k_new= {LENGTHS} attention_chunk= softcap= num_splits= "
        "pack_gqa= sm_margin=",
        f"dout q k v out softmax_lse dq= dk= dv= {ENTRIES} {LENGTHS} softcap= deterministic= sm_margin=",
    ),
    "te 2.12": (
        f"is_training {QKV} fake_dtype fused_attention_backend {CACHE} {SCALE} {KINDS} {LAST}",
        f"{QKV} o d_o fake_dtype dqkv_dtype {GRADIENTS} {KINDS} deterministic= cuda_graph=",
    ),
    "te 2.18": (
        f"is_training {QKV} fake_dtype fused_attention_backend {CACHE} {SCALE} o_format= qkv_scale_inv_format= {KINDS} "
        f"{LAST}",
        f"{QKV} o d_o fake_dtype {GRADIENTS} o_format= do_format= dqkv_layout= qkv_scale_inv_format= "
        f"do_scale_inv_format= {KINDS} deterministic= cuda_graph=",
    ),
    "aten": tuple(
        " ".join(f"{a.name}{'=' * a.has_default_value()}" for a in operator.default._schema.arguments)
        for operator in (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    ),
}


class Function:
    """Hands its arguments on by name, if they are its parameters."""

    def __init__(self, parameters, computes):
        kinds = {name: Parameter.empty if name[-1] != "=" else None for name in parameters.split()}
        either = Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = Signature([Parameter(n.rstrip("="), either, default=d) for n, d in kinds.items()])
        self._computes = computes

    def __call__(self, *arguments, **named):
        bound = self.__signature__.bind(*arguments, **named)
        bound.apply_defaults()
        return self._computes(bound.arguments)


def computed(a, cu_q, cu_k, begins, scale, left, causal, gradient=()):
    """Out and log-sum-exps of entries with keys from `begins` on; with `gradient` (dout, and these) dq, dk and dv."""
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_q, cu_k, begins))
    queries, keys = cu_q.diff(), cu_k.diff()
    assert int(queries.max()) <= a["max_seqlen_q"] and int(begins[-1]) == a["k"].shape[0] == a["v"].shape[0]
    assert cu_q[0] == cu_k[0] == 0 <= begins[0]
    if gradient and "deterministic" in a:
        assert a["deterministic"] is torch.are_deterministic_algorithms_enabled()
    used = queries > 0
    entries = list(zip(queries[used].tolist(), keys[used].tolist(), strict=True))
    rows = torch.cat([torch.arange(n) + begin for begin, (_, n) in zip(begins[:-1][used], entries, strict=True)])
    q, k, v = a["q"], a["k"], a["v"]
    dout = gradient[0] if gradient else q.new_zeros(*q.shape[:2], v.shape[-1])
    exact = expected(entries, q, k[rows], v[rows], dout, scale, None if left < 0 else left, causal)
    results = exact[0].to(q.dtype), exact[1].float()
    if not gradient:
        return results
    assert all(torch.equal(given, result) for given, result in zip(gradient[1:], results, strict=True))
    dk, dv = (
        torch.zeros_like(x).double().index_add_(0, rows, g).to(q.dtype) for x, g in zip((k, v), exact[3:], strict=True)
    )
    return exact[2].to(q.dtype), dk, dv


def flash_attn_3():
    """The operators of FlashAttention-3, of arguments by name."""

    def entries(a):
        assert a["window_size_right"] == (0 if a["is_causal"] else -1) and a["max_seqlen_q"] > 1  # 1 means decoding
        assert int(a["cu_seqlens_k"].diff().max()) <= a["max_seqlen_k"] and a.get("num_splits", 1) == 1
        cu_q, cu_k = a["cu_seqlens_q"], a["cu_seqlens_k"]
        return a, cu_q, cu_k, cu_k, a["softmax_scale"], a["window_size_left"], a["is_causal"]

    def backward(a):
        gradients = computed(*entries(a), (a["dout"], a["out"], a["softmax_lse"]))
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert a[name].is_contiguous()
            a[name].copy_(gradient)

    return {"fwd": lambda a: (*computed(*entries(a)), None, None), "bwd": backward}


def aten():
    """Torch's operators of FlashAttention-2, of arguments by name."""

    def entries(a):
        given = {"q": a["query"], "k": a["key"], "v": a["value"], "max_seqlen_q": a["max_q"]}
        left, causal = a["window_size_left"], a["is_causal"]
        assert a["window_size_right"] == (None if left is None else 0) and (causal or left is None)
        assert a["dropout_p"] == 0.0 and a["max_q"] > 1 and int(a["cum_seq_k"].diff().max()) <= a["max_k"]
        cu_q, cu_k = a["cum_seq_q"], a["cum_seq_k"]
        return given, cu_q, cu_k, cu_k, a["scale"], -1 if left is None else left, causal

    def forward(a):
        assert a["return_debug_mask"] is False
        return (*computed(*entries(a)), None, None, None)

    def backward(a):
        assert (a["rng_state"].dtype, a["rng_state"].shape, a["unused"].shape) == (torch.uint64, (2,), ())
        return computed(*entries(a), (a["grad_out"], a["out"], a["logsumexp"]))

    return {"_forward": forward, "_backward": backward}


def te(version):
    """The functions of a version of TransformerEngine, of arguments by name."""

    def entries(a):
        q, k, v, (left, right) = a["q"], a["k"], a["v"], a["window_size"]
        together = k.shape == v.shape
        layout, mask = "thd_t2hd" if together else "thd_thd_thd", a["attn_mask_type"]
        causal = mask != "padding"
        assert q.is_contiguous() and (together or (k.is_contiguous() and v.is_contiguous()))
        if together:  # halves of one tensor
            assert k.stride() == v.stride() == (2 * k[0].numel(), k.shape[2], 1)
            assert v.data_ptr() - k.data_ptr() == k[0].numel() * k.itemsize
        assert {a["qkv_layout"], a.get("dqkv_layout", layout)} == {layout}
        assert {a.get("o_format", "thd"), a.get("do_format", "thd")} == {"thd"}
        assert right == (0 if causal else -1)
        if causal:  # backward of the second is slow
            square = torch.equal(a["cu_seqlens_q"], a["cu_seqlens_kv"])
            assert mask == ("padding_causal" if square else "padding_causal_bottom_right")
        assert (a["fused_attention_backend"], a["fake_dtype"], a["dropout"]) == ("cuDNN", q.dtype, 0.0)
        cu_q, cu_k, begins = (a[f"cu_seqlens_{name}"] for name in ("q", "kv", "kv_padded"))
        keys = cu_k.diff()
        assert torch.equal(cu_q, a["cu_seqlens_q_padded"]) and torch.equal(cu_q.diff() > 0, keys > 0)
        assert len(keys) == 32 and int(keys.max()) <= a["max_seqlen_kv"], "not rounded up by empty entries"
        assert ((keys > 0).int().diff() <= 0).all(), "empty entries stand before others"
        assert bool((begins[:-1] + keys <= begins[1:]).all()), "keys of entries overlap"
        return a, cu_q, cu_k, begins, a["attn_scale"], left, causal

    def forward(a):
        assert a["is_training"] is True
        torch.rand(1, generator=a["rng_gen"])  # as the package does, dropout or not
        out, lse = computed(*entries(a))
        stats = lse.T.contiguous()[:, :, None]
        if version == "te 2.12":
            stats = torch.nn.functional.pad(stats, (0, 0, 0, 0, 0, 5), value=float("nan"))
        return out, [stats, torch.zeros(2, dtype=torch.int64)]

    def backward(a):
        stats, rng_state = a["aux_ctx_tensors"]
        assert stats.is_contiguous() and stats.shape == (*a["q"].shape[:2], 1) and rng_state.numel() == 2
        assert a["o"].is_contiguous() and a["d_o"].is_contiguous() and a.get("dqkv_dtype", "bf16") == "bf16"
        return [*computed(*entries(a), (a["d_o"], a["o"], stats[:, :, 0].T)), None, None]

    return {"fused_attn_fwd": forward, "fused_attn_bwd": backward}


@pytest.fixture(params=PARAMETERS)
def backend(request, monkeypatch):
    """A backend on its stand-in."""
    if installed := [name for name in PACKAGES if importlib.util.find_spec(name)]:
        pytest.skip(f"{installed} are installed: tests/gpu has the real ones")
    package = request.param
    computing = {"flash_attn_3": flash_attn_3, "aten": aten}.get(package, lambda: te(package))()
    functions = {
        n: Function(*each) for n, *each in zip(computing, PARAMETERS[package], computing.values(), strict=True)
    }
    if package == "aten":
        found = AtenBackend()
        vars(found).update(functions)
        return found
    operators = SimpleNamespace(**{name: SimpleNamespace(default=each) for name, each in functions.items()})
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    modules = {f"{TE}.cpp_extensions.fused_attn": {"FusedAttnBackend": {"F16_arbitrary_seqlen": "cuDNN"}} | functions}
    modules[f"{TE}.constants"] = {"TE_DType": {torch.bfloat16: "bf16"}}
    for name in (*PACKAGES, TE, f"{TE}.cpp_extensions", *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return FlashAttn3Backend() if package == "flash_attn_3" else TeBackend()


@covering(
    indirect=("backend",),
    backend=tuple(PARAMETERS),
    call=ALL,
    window=WINDOWS,
    heads={"GQA": (4, 2), "MHA": (2, 2)},
    head_sizes=[16, (24, 16)],
)
def test_calls_say_what_is_meant(backend, call, window, heads, head_sizes):
    entries, causal = call
    head_sizes = head_sizes if backend.any_value_size else 24
    check(backend, entries, heads, head_sizes, torch.bfloat16, window=window, causal=causal)


def test_what_no_kernel_has_is_refused(backend, monkeypatch):
    if backend.name == "te":
        with pytest.raises(ValueError, match="NaN in gradients of head size 192 of values, and allows at most 128"):
            check(backend, CALLS["square"], head_size=192, dtype=torch.bfloat16)
    for head_size in (12, 264, *([(24, 12)] if backend.any_value_size else [])):
        with pytest.raises(ValueError, match=f"{backend.name!r} cannot run head size (12|264): .* multiple of 8"):
            check(backend, CALLS["square"], head_size=head_size, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(backend, CALLS["square"], head_size=16, dtype=torch.bfloat16)
    if backend.name == "flash_attn_3":
        with pytest.raises(ValueError, match="no deterministic gradients for head size 200, only up to 192"):
            check(backend, CALLS["square"], head_size=200, dtype=torch.bfloat16)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_flash_attention_3_is_for_hopper_alone(capability, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match=rf"for compute capability 9.0, not {capability[0]}\.0; choose another"):
        FlashAttn3Backend()


@pytest.mark.parametrize(
    ("cls", "package"), [(FlashAttn3Backend, "FlashAttention-3"), (TeBackend, "transformer-engine")]
)
def test_missing_packages_are_named(cls, package, monkeypatch):
    for name in {*PACKAGES, *(name for name in sys.modules if name.startswith("transformer_engine."))}:
        monkeypatch.setitem(sys.modules, name, None)
    message = f"attention backend '{cls.name}' needs {package}.*cannot be imported"
    with pytest.raises(ValueError, match=message):
        cls()

    def broken(name):
        raise OSError("no libcudnn.so")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ValueError, match=f"{message} .no libcudnn.so."):
        cls()


def test_random_numbers_are_left_alone(backend):
    before = torch.get_rng_state()
    backend.forward(*inputs(40, (2, 2), 16, torch.bfloat16)[:3], kernel_args(backend, CALLS["square"], "cpu", 0.3))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["te 2.18"], indirect=True)
def test_te_is_given_keys_and_values_side_by_side_which_are_copied_only_if_they_are_not(backend):
    args = kernel_args(backend, CALLS["prefix"], "cpu", 0.3)
    q, k, v, _ = inputs(24, (4, 2), 16, torch.bfloat16, num_keys=90)
    wide = torch.stack((k, v, v), dim=1)
    for keys, values, same in (
        *((k, v, True), (k, v.clone(), False), (k.clone(), v.clone(), False)),
        *((wide[:, 0], wide[:, 1], False), (v, k, False), (k[:, :1], v[:, :1], False)),
    ):
        given = backend._arguments(q, keys, values, args)
        assert (given["k"].data_ptr() == keys.data_ptr()) == (given["v"].data_ptr() == values.data_ptr()) == same
        assert torch.equal(given["k"], keys) and torch.equal(given["v"], values)
        backend.forward(q, keys, values, args)


@pytest.mark.parametrize("backend", ["te 2.18"], indirect=True)
def test_te_refuses_padded_log_sum_exps(backend, monkeypatch):
    monkeypatch.setattr(backend, "_forward", lambda q, **rest: (q, [torch.zeros(2, 4, 40, 1)]))
    with pytest.raises(ValueError, match="packed ones .rows, heads, 1. were expected: cuDNN is older than 9.6"):
        check(backend, CALLS["square"], dtype=torch.bfloat16)
