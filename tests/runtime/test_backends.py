"""Every backend that runs without a GPU on hand-made colours, sliding windows, and the choice between backends."""

import pytest
import torch

from megatron_wlb.config import ATTENTION_BACKENDS
from megatron_wlb.runtime import backends
from megatron_wlb.runtime.backends import BACKENDS, Call, Choice, choose_backend, cpu, get_backend
from megatron_wlb.runtime.backends.aten import AtenBackend
from megatron_wlb.runtime.backends.cpu import CpuBackend
from megatron_wlb.runtime.backends.reference import ReferenceBackend
from megatron_wlb.runtime.backends.trial import colour_of, try_backend
from tests.runtime.colours import COLOURS, WINDOWS, assert_close, expected, run, tensors

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=[CpuBackend, ReferenceBackend], ids=lambda cls: cls.name)
def backend(request):
    torch.set_num_threads(1)
    return request.param()


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(torch.float64, (4, 2)), (torch.float32, (2, 2)), (torch.bfloat16, (3, 1)), (torch.float16, (4, 2))],
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("entries", COLOURS.values(), ids=COLOURS)
def test_out_lse_and_gradients(backend, entries, window, heads, dtype):
    colour = colour_of(entries, "cpu")
    given = (*tensors(colour, heads, 16, dtype), Call(colour, 0.3, window))
    assert_close(run(backend, *given), expected(*given), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.float64, (4, 2)), (torch.float32, (2, 2)), (torch.bfloat16, (3, 1))]
)
@pytest.mark.parametrize("long", [1, 20, 1000])
@pytest.mark.parametrize("entries", COLOURS.values(), ids=COLOURS)
def test_cpu_in_one_call_or_two(monkeypatch, entries, long, heads, dtype):
    monkeypatch.setattr(cpu, "_LONG", long)
    colour = colour_of(entries, "cpu")
    given = (*tensors(colour, heads, 16, dtype), Call(colour, 0.3))
    got = run(CpuBackend(), *given)
    assert_close(got, expected(*given), TOLERANCE[dtype])
    assert all(torch.equal(x, y) for x, y in zip(got, run(CpuBackend(), *given), strict=True))


@pytest.mark.parametrize("window", [0, 1, 255, 256, 300, 599, 600])
@pytest.mark.parametrize("entries", [[(600, 601)], [(0, 9), (257, 900), (512, 512)]])
def test_windows_over_several_blocks(backend, entries, window):
    colour = colour_of(entries, "cpu")
    given = (*tensors(colour, (2, 1), 8, torch.float64), Call(colour, 0.3, window))
    assert_close(run(backend, *given), expected(*given), 1e-14)


def test_windows_of_random_colours(backend):
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        keys = torch.randint(1, 90, (6,), generator=generator).tolist()
        entries = [(int(torch.randint(0, n + 1, (1,), generator=generator)), n) for n in keys]
        entries.append((1, 1))
        colour, window = colour_of(entries, "cpu"), int(torch.randint(0, 60, (1,), generator=generator))
        given = (*tensors(colour, (4, 2), 8, torch.float64), Call(colour, 0.7, window))
        assert_close(run(backend, *given), expected(*given), 1e-14)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scores_far_apart(backend, dtype, window):
    """Prefixes and squares that outweigh the other by e^1000, and keys that are all the same."""
    for scale, size in ((1000.0, 1.0), (0.3, 0.0)):
        colour = colour_of(COLOURS["gaps"], "cpu")
        q, k, v, dout = tensors(colour, (4, 2), 16, dtype)
        given = (q, k * size, v, dout, Call(colour, scale, window))
        assert_close(run(backend, *given), expected(*given), 1e-3 if dtype == torch.float32 else 1e-11)


def test_a_window_costs_no_more_than_it_sees(monkeypatch):
    pairs = []
    forward = cpu._forward

    def counted(q, k, *rest, **named):
        pairs.append(q.shape[-2] * k.shape[-2])
        return forward(q, k, *rest, **named)

    monkeypatch.setattr(cpu, "_forward", counted)
    colour = colour_of([(4000, 9000)], "cpu")
    q, k, v, _ = tensors(colour, (1, 1), 8, torch.float32)
    CpuBackend().forward(q, k, v, Call(colour, 0.3, 100))
    assert sum(pairs) <= 4000 * (100 + 256)


@pytest.mark.parametrize("window", [None, 0, 7])
def test_aten_takes_windows(window):
    """The operators' shape functions run without a GPU; tests/gpu has the numbers."""
    colour = colour_of(COLOURS["many"], "meta")
    q, dout = (torch.empty(colour.q_stop, 8, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    k, v = (torch.empty(420, 2, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    dkv, call = torch.empty(420, 2, 2, 64, device="meta"), Call(colour, 0.3, window)
    out, lse = AtenBackend().forward(q, k, v, call)
    dq = AtenBackend().backward(dout, q, k, v, out, lse, dkv, call)
    assert (out.shape, lse.shape, dq.shape) == (q.shape, (8, colour.q_stop), q.shape)


def test_the_flag_offers_every_backend():
    assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS, "megatron"}


class _Wrong(CpuBackend):
    """Does not see the window."""

    def forward(self, q, k, v, call):
        return super().forward(q, k, v, call._replace(window=None))


class _Broken(CpuBackend):
    def backward(self, *arguments):
        raise RuntimeError("no kernel image\nfor this device")


class _Missing(CpuBackend):
    def __init__(self):
        raise ValueError("not installed")


class _Nan(CpuBackend):
    def backward(self, *arguments):
        return super().backward(*arguments) * float("nan")


@pytest.fixture
def choose(monkeypatch):
    """choose_backend on a machine where "auto" may take these."""

    def choose(**classes):
        monkeypatch.setattr(backends, "BACKENDS", classes)
        monkeypatch.setattr(backends, "_PREFERENCE", {"cpu": tuple(classes)})
        choose_backend.cache_clear()
        return choose_backend("cpu")

    yield choose
    choose_backend.cache_clear()


def test_auto_takes_the_first_that_works_and_says_why_not_the_others(choose):
    assert str(choose(good=CpuBackend, wrong=_Wrong)) == "good"
    chosen = choose(missing=_Missing, broken=_Broken, wrong=_Wrong, nan=_Nan, good=CpuBackend, last=_Wrong)
    assert chosen == Choice(
        name="good",
        refused=(
            ("missing", "not installed"),
            ("broken", "no kernel image"),
            ("wrong", chosen.refused[2][1]),
            ("nan", chosen.refused[3][1]),
        ),
    )
    assert chosen.refused[2][1].startswith("out with window 50 differs from the reference by ")
    assert chosen.refused[3][1].startswith("dq with window None differs from the reference by nan, where 1.6e-02 is ")
    assert str(chosen).startswith("good (missing: not installed; broken: no kernel image; wrong: out with")
    with pytest.raises(ValueError, match="no attention backend works on device 'cpu' .missing: not installed."):
        choose(missing=_Missing)


def test_auto_tries_once_per_process(choose, monkeypatch):
    choose(good=CpuBackend)
    monkeypatch.setattr(backends, "try_backend", None)
    assert choose_backend("cpu").name == "good"
    assert isinstance(get_backend("auto", "cpu"), CpuBackend)


def test_auto_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    try_backend(CpuBackend(), torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())


def test_backends_are_chosen_by_name_and_device():
    assert get_backend("auto", "cpu").name == "cpu"
    for name in ("aten", "cpu", "reference"):
        assert get_backend(name, BACKENDS[name].device_types[0]).name == name
    with pytest.raises(ValueError, match="unknown attention backend 'fa9'; choose one of auto, aten, flash_attn, "):
        get_backend("fa9", "cpu")
    with pytest.raises(ValueError, match="'aten' is not available on device 'cpu': it runs on cuda; choose one of"):
        get_backend("aten", "cpu")
    with pytest.raises(ValueError, match="'cpu' is not available on device 'cuda:1'"):
        get_backend("cpu", "cuda:1")


def test_auto_where_nothing_is_made_for_the_device():
    with pytest.raises(ValueError, match="no attention backend works on device 'meta' .none is made for it."):
        get_backend("auto", "meta")
