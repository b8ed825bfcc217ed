"""The layer benchmark computes a layer, and runs, small, on the CPU. Times are not looked at."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import results
from benchmarks.gpu import layer
from benchmarks.gpu.cases import whole
from benchmarks.gpu.layer import PAPER, SMALL, Layer, crossover, rotation_of
from benchmarks.gpu.ranks import ranks
from megatron_wlb.plan.metrics import imbalance
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
POLICIES = {"original", *(f"fixed, {k} global batches" for k in (1, 2, 4, 8)), "ours"}
POLICIES |= {f"WLB-LLM, {k} queues" for k in (1, 2, 3)}


@pytest.mark.parametrize("tp", [1, 4])
def test_the_layer_is_that_of_llama(tp):
    """Against the published formulas, document by document, with rotary embedding as complex numbers."""
    layer = Layer(SMALL, tp, torch.float64, CPU)
    lengths, d = np.array([5, 12, 1, 30]), SMALL.kv_channels
    x = torch.randn(int(lengths.sum()), SMALL.hidden_size, dtype=torch.float64)
    options = AttentionOptions(backend=get_backend("cpu", CPU))
    (rank,) = ranks(whole(lengths), options.backend, CPU)
    out = layer.forward(x, rotation_of(lengths, d, torch.float64, CPU), rank, options)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight

    def rotate(x, positions):
        rates = 10_000.0 ** (-2 * torch.arange(d // 2) / d)
        turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(
            torch.ones(len(x), 1, d // 2, dtype=torch.float64), (positions[:, None] * rates)[:, None].double()
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    expected = []
    for document in x.split(lengths.tolist()):
        positions = torch.arange(len(document))
        q, k, v = (norm(document, layer.norms[0]) @ layer.qkv.T).view(len(document), 3, layer.heads, d).unbind(1)
        q, k = rotate(q, positions), rotate(k, positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        visible = torch.ones(len(document), len(document)).tril().bool()
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)
        h = document + attended.flatten(1) @ layer.projection.T
        gate, up = (norm(h, layer.norms[1]) @ layer.gate_up.T).chunk(2, dim=-1)
        expected.append(h + (gate * torch.sigmoid(gate) * up) @ layer.down.T)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert layer.qkv.shape == (3 * 8 // tp * d, SMALL.hidden_size)
    assert F.mse_loss(out, x) > 0.1


def test_a_rank_has_whole_heads():
    with pytest.raises(ValueError, match="8 heads do not divide over 3 ranks"):
        Layer(SMALL, 3, torch.float32, CPU)


def test_the_crossover_is_where_attention_takes_as_long():
    lengths = np.array([1000, 4000, 16000, 64000])
    for at in (20_000, 64_000, 500_000):
        ms = np.stack((lengths**2 / at, lengths), axis=1)
        assert crossover(lengths, ms) == pytest.approx(at, rel=1e-6)
    assert crossover(lengths, np.ones((4, 2)) * (1, 2)) <= 1 << 30


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("results")
    arguments = ["--device", "cpu", "--quick", "--commit", "here", "--output", str(folder)]
    run = [sys.executable, "-m", "benchmarks.gpu.layer", *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "layer.cpu.json").read_text())


def test_both_sections_write_their_rows(result):
    assert (result["benchmark"], result["commit"]) == ("layer", "here")
    assert result["date"] and result["versions"]["torch"] == torch.__version__.split("+")[0] and result["device"]
    seven = [row for row in result["rows"] if row["section"] == "7"]
    assert [row["document_length"] for row in seven] == [64, 128, 256, 512]
    for row in seven:
        assert all(row[f"{p}_{d}_ms"] > 0 for p in ("attention", "linear") for d in ("forward", "backward"))
    assert result["settings"]["crossover_tokens"] >= 1
    two = {row["policy"]: row for row in result["rows"] if row["section"] == "2"}
    assert two.keys() == POLICIES >= PAPER.keys()
    assert all(row["imbalance"] >= 1 and row["steps"] == 2 for row in two.values())
    assert [goal["goal"] for goal in result["goals"]] == [1.05]


def test_a_failing_step_keeps_those_before(monkeypatch, tmp_path, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    degrees: list[float] = []

    def failing(ms):
        if len(degrees) > len(POLICIES) + 2:
            raise torch.OutOfMemoryError("in the second step")
        degrees.append(imbalance(ms))
        return degrees[-1]

    monkeypatch.setattr(layer, "imbalance", failing)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "_commit", results._commit)
    arguments = ["--device", "cpu", "--quick", "--commit", "here", "--output", str(tmp_path), "--sections", "2"]
    monkeypatch.setattr(sys, "argv", ["layer", *arguments])
    with pytest.raises(SystemExit, match="1 cases have failed"):
        layer.main()
    *rows, failed = json.loads((tmp_path / "layer_2.cpu.json").read_text())["rows"]
    assert {row["policy"] for row in rows} == POLICIES
    assert [(row["steps"], row["imbalance"]) for row in rows] == [(1, degree) for degree in degrees[: len(POLICIES)]]
    assert failed == {"section": "2", "failed": "OutOfMemoryError('in the second step')"}
