"""The layer that is measured, and how its times are taken; `test_attention` compares attention with what runs."""

import contextlib
import itertools
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_wlb.model import latent_sizes, shape
from megatron_wlb.runtime import measure
from megatron_wlb.runtime.backends.cpu import CpuBackend

LATENT = {"kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
MODELS = {
    "gated": shape(3, 64, 96, 8, 2, 640, kv_channels=24, gated_linear_unit=True),
    "plain": shape(3, 64, 96, 8, 2, 640, kv_channels=24, gated_linear_unit=False),
    "latents": shape(3, 64, 96, 4, 4, 640, **latent_sizes(**LATENT, q_lora_rank=40)),
    "latents of keys alone": shape(3, 64, 96, 4, 4, 640, **latent_sizes(**LATENT, q_lora_rank=None)),
}
QKV = {
    "gated": (8 + 2 * 2) * 24 * 64 + 64 * 8 * 24,
    "plain": (8 + 2 * 2) * 24 * 64 + 64 * 8 * 24,
    "latents": (40 + 24 + 8) * 64 + 4 * (16 + 8) * 40 + 4 * (16 + 12) * 24 + 64 * 4 * 12,
    "latents of keys alone": (24 + 8) * 64 + 4 * (16 + 8) * 64 + 4 * (16 + 12) * 24 + 64 * 4 * 12,
}
"""Weights around attention, by hand."""


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_the_products_of_its_model(name):
    """Forward; backward has two for each, of its input and of its weights."""

    def flops(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    target = measure.target_of(MODELS[name], "cpu", "auto", None)
    weights = QKV[name] + (2 if name == "plain" else 3) * 64 * 96
    assert measure.linear_times(target, 5, flops) == (2 * weights, 4 * weights)


def test_a_layer_is_measured_on_a_gpu_in_bf16_and_else_on_a_cpu_in_fp32(monkeypatch):
    target = measure.target_of(MODELS["gated"], None, "auto", None)
    assert target[1:2] + target[3:] == ("cpu", "fp32", {"device": "cpu", "dtype": torch.float32})
    assert (target.model.num_layers, target.model.padded_vocab_size, target.model.kv_channels) == (1, 0, 24)
    assert measure.target_of(MODELS["gated"], None, "auto", "bf16").tensors["dtype"] == torch.bfloat16
    with pytest.raises(ValueError, match="--device cuda, but torch .* finds none; install a driver or choose cpu"):
        measure.target_of(MODELS["gated"], "cuda", "auto", None)
    asked, only = [], type("Bf16", (CpuBackend,), {"dtypes": (torch.bfloat16,)})()
    monkeypatch.setattr(measure, "get_backend", lambda *given: asked.append(given) or only)
    with pytest.raises(ValueError, match="attention backend cpu does not run fp32; choose another --dtype"):
        measure.target_of(MODELS["latents"], None, "auto", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert measure.target_of(MODELS["latents"], None, "te", None)[1:] == (
        *("cuda", only, "bf16"),
        {"device": "cuda", "dtype": torch.bfloat16},
    )
    assert asked == [("auto", "cpu", (24, 12)), ("te", "cuda", (24, 12))]


def test_what_was_measured_is_told_with_its_device_and_versions(monkeypatch):
    assert measure.device_name("cpu").startswith("one thread of an ") and measure.device_name("cpu").endswith(" CPU")
    assert measure.versions("cpu") == {"torch": str(torch.__version__)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(metadata, "version", {"flash_attn_3": "3.0"}.get)
    assert measure.device_name("cuda") == "NVIDIA H100"
    found = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "cudnn": "91900"}
    assert measure.versions("cuda") == found | {"transformer_engine": None, "flash_attn_3": "3.0"}


@pytest.fixture
def taken(monkeypatch):
    """What a stopwatch says of calls that take these seconds, in us, and how many it made."""

    def taken(device, seconds, times):
        clock, left, calls = [0.0], iter(times), []

        def passes(duration):
            clock[0] += duration

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at, self.seen = clock[0], False

            def synchronize(self):
                self.seen = True

            def elapsed_time(self, end):
                assert end.seen
                return 1e3 * (end.at - self.at)

        def call():
            calls.append(clock[0])
            passes(next(left))

        flush = {(1 << 30, torch.uint8, device): SimpleNamespace(zero_=lambda: passes(1000))}
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "empty", lambda size, dtype, device: flush[size, dtype, device])
        monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
        found = measure.stopwatch_of(device, seconds)(call) / 1e6
        behind = [end - begin for begin, end in zip([0.0, *calls], calls, strict=False)]
        assert (min(behind) >= 1000) == (device == "cuda")
        return found, len(calls)

    return taken


def test_of_a_cpu_the_shortest_time_counts(taken):
    """After two calls to warm up, of three samples at least, and of 20 at most in the given time."""
    assert taken("cpu", 0.0, [1, 2, 5, 3, 4]) == (pytest.approx(3), 5)
    assert taken("cpu", 21.0, [1, 2, 9, 8, 3, 6]) == (pytest.approx(3), 6)
    assert taken("cpu", 1e9, itertools.count(30, -1)) == (pytest.approx(9), 22)


def test_of_a_gpu_the_median_counts_of_kernels_behind_a_flush_of_its_caches(taken):
    assert taken("cuda", 0.0, [1, 2, 5, 3, 4]) == (pytest.approx(4), 5)
    assert taken("cuda", 3021.0, [1, 2, 9, 3, 8, 1, 1]) == (pytest.approx(5.5), 6)


def test_one_thread_computes_until_the_end():
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with contextlib.suppress(KeyError), measure.one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
