"""What `megatron-wlb profile` fits, writes and refuses."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_wlb.cli import profile as calibration
from megatron_wlb.cli.main import main
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import KernelTimes, load_profile
from megatron_wlb.model import MODELS, ModelShape
from tests.cli.analyses import described
from tests.cli.commands import process, refusal

MODEL = "--hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16".split()
SMALL = ["--device", "cpu", "--quick"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a run on the CPU."""
    path = tmp_path_factory.mktemp("profile") / "mine.json"
    assert main(["profile", *MODEL, "--swiglu", *SMALL, "--output", str(path)]) == 0
    return path


@pytest.mark.parametrize("rows", [64, 128])
def test_the_fit_recovers_constants_from_noisy_times(rows):
    heads, noise = 8, np.random.default_rng(1)
    forward = KernelTimes(launch=20.0, tile=0.03, query_tile=0.1)
    backward = KernelTimes(launch=50.0, tile=0.08, query_tile=0.0, hidden=0.06)
    shards = [plan.shards[rank] for plan, rank in calibration.shapes(131072)]
    counts = np.array([calibration.count(s, heads, rows) for s in shards])
    us = np.stack([calibration.predict(times, counts) for times in (forward, backward)], axis=1)
    us *= noise.lognormal(0, 0.05, us.shape)
    kernel, error = calibration.fit_directions(shards, us, heads, (1, 64, 128))
    assert kernel["tile_rows"] == rows
    for true, name in ((forward, "forward"), (backward, "backward")):
        fitted = kernel[name]
        assert fitted.launch == pytest.approx(true.launch, rel=0.05)
        assert fitted.tile == pytest.approx(true.tile, rel=0.05)
        assert fitted.query_tile == pytest.approx(true.query_tile, rel=0.25, abs=0.02)
        assert fitted.hidden == pytest.approx(true.hidden, rel=0.25, abs=0.008)
        assert 0.02 < error[name]["held_out_median"] < 0.06
        assert error[name]["held_out_median"] < error[name]["held_out_p90"] < 0.15
        assert error[name]["shapes_fitted"] + error[name]["shapes_held_out"] == len(shards)


def test_the_error_is_of_shapes_that_were_not_fitted():
    """All others take the times of the model, these half as long again."""
    shards = [plan.shards[rank] for plan, rank in calibration.shapes(4096)]
    times = KernelTimes(launch=20.0, tile=0.03, query_tile=0.1, hidden=0.01)
    us = calibration.predict(times, np.array([calibration.count(s, 8, 64) for s in shards]))
    held_out = np.random.default_rng(0).permutation(len(shards)) % 3 == 2
    _, error = calibration.fit_directions(shards, np.stack([us * (1 + held_out / 2)] * 2, axis=1), 8, (64,))
    for each in error.values():
        assert each["held_out_median"] == each["held_out_p90"] == pytest.approx(1 / 3, abs=1e-3)
        assert each["shapes_held_out"] == held_out.sum()


def test_times_that_do_not_grow_are_refused():
    shards = [plan.shards[rank] for plan, rank in calibration.shapes(512)]
    launches = np.array([calibration.count(s, 1, 128)[:1] * 2 for s in shards], float)
    with pytest.raises(ValueError, match="attention took no longer for more tiles"):
        calibration.fit_directions(shards, launches, 1, (128,))


def test_shapes_are_those_of_training():
    shapes = calibration.shapes(4096)
    assert all(plan.shards[rank].tokens for plan, rank in shapes)
    for held_out in (True, False):
        chosen = zip(shapes, (np.random.default_rng(0).permutation(len(shapes)) % 3 == 2) == held_out, strict=True)
        strategies = {plan.strategy for (plan, _), is_chosen in chosen if is_chosen}
        assert strategies == {"whole", "per-sequence", "per-document", "hybrid"}


def test_a_run_on_the_cpu(written):
    data = json.loads(written.read_text())
    assert data.items() >= {"head_size": 16, "dtype": "fp32", "backend": "cpu", "name": "mine"}.items()
    assert data["error"]["forward"].keys() == data["error"]["backward"].keys()
    assert data["error"]["forward"]["held_out_median"] <= data["error"]["forward"]["held_out_p90"]
    assert data["linear"]["ffn_hidden_size"] == 128
    assert data["linear"]["gated_linear_unit"] is True
    # 4 * 64 * 16 query and output, 4 * 64 * 16 of two key heads, a gated MLP of 128.
    weights = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 128
    for i, (direction, flops) in enumerate((("forward", 2 * weights), ("backward", 4 * weights))):
        us = data["linear"][f"{direction}_us_per_token"]
        assert data["linear_tflops"][i] == pytest.approx(flops / us / 1e6, rel=1e-3)
    assert data["command"].startswith("megatron-wlb profile --hidden-size 64 ")
    assert data["versions"]["torch"] and data["date"] and data["device"].startswith("one thread of ")


def test_what_it_writes_is_a_profile(written):
    """By which training and `analyze` find the crossover that it states."""
    loaded = load_profile(str(written))
    assert loaded.name == "mine"
    assert loaded.forward.tile + loaded.backward.tile > 0
    sizes = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "padded_vocab_size": 0}
    model = ModelShape(**sizes, num_attention_heads=4, num_query_groups=2, kv_channels=16)
    sizes = {"context_length": 4096, "global_batch_size": 1, "profile": loaded}
    stated = json.loads(written.read_text())["crossover_tokens"]
    assert make_job(model=model, **sizes).crossover_tokens == stated
    flags = f"--global-batch-size 1 --seq-length 4096 --wlb-profile {written} --model 550m"
    assert described(flags).job == make_job(model=MODELS["550m"], hidden_dropout=True, **sizes)


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = ["--hidden-size", "4096", "--num-attention-heads", "32", "--ffn-hidden-size", "11008", "--swiglu"]
    assert main(["profile", *model, "--quick", "--device", "cuda", "--output", str(tmp_path / "gpu.json")]) == 0
    loaded = load_profile(str(tmp_path / "gpu.json"))
    assert (loaded.tile_rows, loaded.dtype) == (128, "bf16")
    assert loaded.backward.tile > loaded.forward.tile > 0


def full(*args):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


MEASURE = "megatron_wlb.runtime.measure."


@pytest.mark.parametrize(
    ("flags", "message", "patches"),
    [
        ("SMALL --backend fa9", "unknown attention backend 'fa9'; choose one of auto, ", {}),
        ("SMALL --backend aten", "attention backend 'aten' is not available on device 'cpu'", {}),
        ("SMALL --dtype fp8", "--dtype: invalid choice: 'fp8'", {}),
        ("SMALL --num-query-groups 3", "is 3, which does not divide 4 attention heads; change one", {}),
        ("SMALL --hybrid-layer-pattern M* --mamba-num-groups 1", "Mamba layers are not measured", {}),
        ("SMALL --hidden-size 0", "--hidden-size is 0; it must be int >= 1; give another value", {}),
        ("SMALL --output /proc/x.json", "/proc/.*x.json", {}),
        ("", "^no --hidden-size, --num-attention-heads: give the sizes of the model$", {}),
        ("MODEL --device cuda", "^--device cuda, but torch .* finds none; install a driver or choose cpu$",
         {"torch.cuda.is_available": lambda: False}),
        ("SMALL", "attention backend te does not run fp32; choose another --dtype",
         {MEASURE + "get_backend": lambda name, device, head_sizes: SimpleNamespace(name="te", dtypes=())}),
        ("SMALL", "^out of device memory; give --quick, or a smaller model$", {MEASURE + "linear_times": full}),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before(flags, message, patches, tmp_path, capsys, monkeypatch):
    """And leaves no file."""
    for name, value in ({MEASURE + "linear_times": None} | patches).items():
        monkeypatch.setattr(name, value)
    words = flags.replace("SMALL", f"MODEL {' '.join(SMALL)}").replace("MODEL", " ".join(MODEL))
    words = ["--output", f"{tmp_path}/x.json", *words.split()]
    assert re.search(message, refusal(capsys, "profile", *words))
    assert list(tmp_path.iterdir()) == []


def test_without_torch(tmp_path):
    done = process("profile", *MODEL, "--output", tmp_path / "x.json", without=("torch",))
    message = "megatron-wlb profile: error: torch is not installed; pip install '.[train]' in a clone\n"
    assert (done.returncode, done.stderr) == (2, message)
