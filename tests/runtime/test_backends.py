"""Every backend that runs without a GPU on hand-made calls, sliding windows, and the choice between backends."""

import re

import pytest
import torch

from megatron_wlb.runtime import backends
from megatron_wlb.runtime.backends import BACKENDS, Choice, choose_backend, cpu, get_backend, protocol
from megatron_wlb.runtime.backends.cpu import CpuBackend
from megatron_wlb.runtime.reference import HEAD_SIZES, kernel_args, try_backend
from tests.covering import covering
from tests.runtime.calls import ALL, CALLS, WINDOWS, Float64, check

ON_CPU = {"cpu": CpuBackend(), "float64": Float64()}
NUMBERS = {
    "float64,GQA": (torch.float64, (4, 2)),
    "float32,MHA": (torch.float32, (2, 2)),
    "bfloat16,MQA": (torch.bfloat16, (3, 1)),
    "float16,GQA": (torch.float16, (4, 2)),
}
"""dtype and (Hq, Hkv)."""


@covering(backend=ON_CPU, call=ALL, window=WINDOWS, numbers=NUMBERS, head_sizes=[16, (24, 16), (16, 24)])
def test_out_lse_and_gradients(backend, call, window, numbers, head_sizes):
    (entries, causal), (dtype, heads) = call, numbers
    check(backend, entries, heads, head_sizes, dtype, window=window, causal=causal)


@covering(entries=CALLS, rows=[1, 20, 1000], numbers=NUMBERS, window=[None, 20])
def test_cpu_in_blocks_of_any_length(monkeypatch, entries, rows, numbers, window):
    dtype, heads = numbers
    monkeypatch.setattr(cpu, "_ROWS", rows)
    first, second = (check(CpuBackend(), entries, heads, dtype=dtype, window=window) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("entries", CALLS.values(), ids=CALLS)
def test_long_gaps_are_cut_into_pieces(monkeypatch, entries):
    """A backward kernel starts max_k / 128 blocks for every entry, also for one without queries."""
    assert kernel_args(Float64(), [(0, 9000), *entries], "cpu", 0.3).max_k == 4096
    monkeypatch.setattr(protocol, "_GAP_ROWS", 4)
    args = kernel_args(Float64(), entries, "cpu", 0.3)
    queries, keys = args.table.diff()
    longest = max(4, *(keys for queries, keys in entries if queries))
    assert args.max_k == int(keys.max()) <= longest
    assert queries[queries > 0].tolist() == [queries for queries, _ in entries if queries]
    assert bool((keys > 0).all()) and int(keys.sum()) == sum(keys for _, keys in entries)
    check(Float64(), entries, dtype=torch.float64, window=20)


@covering(backend=ON_CPU, dtype=[torch.float64, torch.float32], window=[None, 20])
def test_scores_far_apart(backend, dtype, window):
    """Prefixes and squares that outweigh the other by e^1000, and keys that are all the same."""
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-3}[dtype]
    check(backend, CALLS["gaps"], dtype=dtype, scale=1000.0, window=window, tolerance=tolerance)
    check(backend, CALLS["gaps"], dtype=dtype, scale=1e-30, window=window, tolerance=tolerance)


class _Wrong(CpuBackend):
    """Does not see the window."""

    def forward(self, q, k, v, args):
        return super().forward(q, k, v, args._replace(window=None))


class _Broken(CpuBackend):
    def backward(self, *arguments):
        raise RuntimeError("no kernel image\nfor this device")


class _Missing(CpuBackend):
    def __init__(self):
        raise ValueError("not installed")


class _Nan(CpuBackend):
    def backward(self, *arguments):
        return super().backward(*arguments) * float("nan")


def off(name, by, where):
    """A backend whose result of this name is off by a share, in calls with such arguments."""

    class Off(CpuBackend):
        def forward(self, q, k, v, args):
            self._right = ON_CPU["cpu"].forward(q, k, v, args)
            scales = (1 + by * (name == of and where(args)) for of in ("out", "lse"))
            return [x * scale for x, scale in zip(self._right, scales, strict=True)]

        def backward(self, dout, q, k, v, out, lse, dkv, args):
            assert (
                q.shape[1] == 2 * k.shape[1]
                and dkv.dtype == torch.float32
                and dout.dtype == q.dtype == k.dtype == torch.bfloat16
            )
            results = [ON_CPU["cpu"].backward(dout, q, k, v, *self._right, dkv, args)]
            results += protocol.keys_and_values(dkv, q.shape[-1])
            for of, x in zip(("dq", "dk", "dv"), results, strict=True):
                x *= 1 + by * (name == of and where(args))
            return results[0]

    return Off()


def _squares(args):
    q_start, q_stop, k_start, k_stop = args.table.T
    return torch.equal(q_stop - q_start, k_stop - k_start)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize(
    "where",
    [_squares, lambda args: not _squares(args), lambda args: args.window is None, lambda args: args.window is not None],
    ids=["squares", "prefixes", "no window", "windows"],
)
def test_a_backend_is_tried_in_every_way_of_a_run(name, where):
    with pytest.raises(ValueError, match=f"{name} with window .* differs from float64 by .*; choose another backend"):
        try_backend(off(name, 0.02, where), torch.device("cpu"), (24, 16))
    try_backend(off(name, 0.005, where), torch.device("cpu"), (24, 16))


@pytest.fixture
def choose(monkeypatch):
    """choose_backend on a machine where "auto" may take these."""

    def choose(head_sizes=HEAD_SIZES, asked="auto", **classes):
        monkeypatch.setattr(backends, "BACKENDS", classes)
        monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": tuple(classes)})
        choose_backend.cache_clear()
        return choose_backend("cpu", head_sizes, asked)

    yield choose
    choose_backend.cache_clear()


def test_auto_takes_the_first_that_works_and_says_why_not_the_others(choose):
    assert str(choose(good=CpuBackend, wrong=_Wrong)) == "good"
    chosen = choose(missing=_Missing, broken=_Broken, wrong=_Wrong, nan=_Nan, good=CpuBackend, last=_Wrong)
    wrong, nan = chosen.refused[2][1], chosen.refused[3][1]
    refused = ("missing", "not installed"), ("broken", "no kernel image"), ("wrong", wrong), ("nan", nan)
    assert chosen == Choice(name="good", refused=refused)
    assert wrong.startswith("out with window 50 differs from float64 by ")
    assert nan.startswith("dq with window None differs from float64 by nan, where 1.6e-02 is ")
    assert str(chosen).startswith("good (missing: not installed; broken: no kernel image; wrong: out with")
    with pytest.raises(ValueError, match="no attention backend works on device 'cpu' .missing: not installed."):
        choose(missing=_Missing)


def test_auto_is_of_the_head_sizes_that_run(choose):
    """Of kernels of GPUs alone Megatron chooses; an error without words has its name."""

    class Narrow(CpuBackend):
        def forward(self, q, k, v, args):
            if q.shape[-1] != v.shape[-1]:
                raise NotImplementedError
            return super().forward(q, k, v, args)

    equal = type("Equal", (CpuBackend,), {"any_value_size": False, "name": "equal"})
    assert choose((24, 24), "flash", narrow=Narrow, good=CpuBackend) == Choice(name="narrow", refused=())
    chosen = choose((24, 16), equal=equal, narrow=Narrow, good=CpuBackend)
    assert chosen.refused[0][1].startswith("attention backend 'equal' needs value heads of the size of key heads, 24")
    assert chosen.name == "good" and chosen.refused[1] == ("narrow", "NotImplementedError")
    assert isinstance(get_backend("auto", "cpu", (24, 16)), CpuBackend)
    with pytest.raises(ValueError, match="no attention backend works"):
        choose((24, 16), narrow=Narrow)
    with pytest.raises(ValueError, match="no attention backend works"):
        get_backend("auto", "cpu", (24, 16))


@pytest.mark.parametrize(
    ("capability", "deterministic", "asked", "order"),
    [
        ((8, 0), False, "auto", ["aten", "te"]),
        ((9, 0), False, "auto", ["flash_attn_3", "te", "aten"]),
        ((10, 0), False, "auto", ["flash_attn_3", "te", "aten"]),
        ((9, 0), True, "auto", ["flash_attn_3", "aten", "te"]),
        ((8, 0), False, "flash", ["aten"]),
        ((9, 0), False, "flash", ["flash_attn_3", "aten"]),
        ((9, 0), True, "fused", ["te"]),
    ],
)
def test_backends_are_preferred_by_device_among_those_that_megatron_asks_for(
    monkeypatch, capability, deterministic, asked, order
):
    monkeypatch.setattr(backends, "BACKENDS", dict.fromkeys(BACKENDS, _Missing))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with pytest.raises(ValueError, match=re.escape(f"({'; '.join(f'{name}: not installed' for name in order)});")):
        choose_backend.__wrapped__("cuda", HEAD_SIZES, asked)


@pytest.mark.parametrize(
    ("name", "device", "head_sizes", "message"),
    [
        ("fa9", "cpu", HEAD_SIZES, "unknown attention backend 'fa9'; choose one of auto, aten, flash_attn_3, "),
        ("aten", "cpu", HEAD_SIZES, "'aten' is not available on device 'cpu': it runs on cuda; choose one of"),
        ("cpu", "cuda:1", HEAD_SIZES, "'cpu' is not available on device 'cuda:1'"),
        ("auto", "meta", HEAD_SIZES, "no attention backend works on device 'meta' .none is made for it."),
        ("aten", "cuda", (192, 128), "'aten' needs value heads of the size of key heads, 192, .* flash_attn_3 or te"),
    ],
)
def test_backends_that_are_not_there_are_refused(name, device, head_sizes, message):
    with pytest.raises(ValueError, match=message):
        get_backend(name, device, head_sizes)
