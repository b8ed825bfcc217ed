"""The GPU benchmark runs, small, on the CPU, and its parts do what they say. Times are not looked at."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import results
from benchmarks.gpu import cp_attention
from benchmarks.gpu.bench import FULL
from benchmarks.gpu.fit import fit
from benchmarks.gpu.ranks import CopyFree, PrefixCopies, Rows, both, ranks
from megatron_wlb.plan.sharding import per_document
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend

ROOT = Path(__file__).parent.parent.parent
PLAN = per_document(np.array([261, 18, 533, 1, 142, 424, 5], np.int64), 4)
COMMON = {"model", "window", "cp_size", "total_ms", "min_ms", "max_ms"}
KEYS = {
    "0": {"wrong", "error_out", "error_dq", "error_dk", "error_dv"},
    "a": {"model", "heads", "tokens", "query_length", "forward_ms", "forward_tflops", "backward_ms", "backward_tflops"},
    "b": COMMON | {"strategy", "micro_batches", "rounds", "speedup", "plans"},
    "c": COMMON | {"data", "method", "kept_mib", "peak_mib", "host_ms", "launches"},
    "d": COMMON | {"over_limit"},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    arguments = ["--device", "cpu", "--quick", "--commit", "here", "--output", str(folder)]
    run = [sys.executable, "-m", "benchmarks.gpu.cp_attention", *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "cp_attention.cpu.json"


def test_every_section_writes_its_rows(result):
    data = json.loads(result.read_text())
    assert (data["benchmark"], data["commit"]) == ("cp_attention", "here")
    assert data["settings"]["fitted_profile"]["kernel"].keys() == {"tile_rows", "forward", "backward"}
    assert {row["section"] for row in data["rows"]} == KEYS.keys()
    for row in data["rows"]:
        assert row.keys() >= KEYS[row["section"]]
        assert all(value > 0 for name, value in row.items() if name.endswith("_ms") and value is not None)
    assert [row["wrong"] for row in data["rows"] if row["section"] == "0"] == [0]


def test_shardings_are_compared_on_the_same_micro_batches(result):
    rows = [row for row in json.loads(result.read_text())["rows"] if row["section"] == "b" and row["cp_size"] == 4]
    by_case = {(row["model"], row["window"]): {} for row in rows}
    for row in rows:
        by_case[row["model"], row["window"]][row["strategy"]] = row
    for case in by_case.values():
        assert case.keys() >= {"per-sequence", "per-document", "paper", "hybrid", "adaptive", "oracle"}
        assert case["per-sequence"]["speedup"] == 1
        assert min(row["total_ms"] for row in case.values()) == case["oracle"]["total_ms"]
        assert all(sum(row["plans"].values()) == row["micro_batches"] for row in case.values())


def test_every_goal_has_a_value(result):
    goals = json.loads(result.read_text())["goals"]
    assert {goal["name"][0] for goal in goals} == set("bcd")
    assert all(np.isfinite(goal["value"]) for goal in goals)
    assert all(goal["holds"] for goal in goals if "difference" in goal["name"])


def test_a_result_can_be_drawn(result):
    from benchmarks.gpu.picture import draw

    assert draw(result, result.parent).stat().st_size > 10_000


def test_models_that_are_not_there_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cp_attention", "--device", "cpu", "--models", "7B,8B"])
    with pytest.raises(SystemExit):
        cp_attention.main()
    assert "--models 8B: choose from 7B TP8, 70B TP8, 7B, 70B" in capsys.readouterr().err


def test_models_that_section_a_leaves_out_give_no_profile():
    bench = SimpleNamespace(models={"70B": (64, 8)}, scale=FULL, profiles={}, settings={})
    cp_attention.kernels(bench)
    assert not bench.profiles and not bench.settings


def test_lengths_of_section_a():
    """All of them for a tensor-parallel rank; 2 ** 31 numbers are too many for the sum of dQ."""
    assert cp_attention.query_lengths(131_072, 4, 128) == [1 << i for i in range(4, 18)]
    assert cp_attention.query_lengths(131_072, 32, 128) == [1 << i for i in range(6, 18)]


def test_a_machine_without_git_writes_results(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(results, "FOLDER", tmp_path / "new" / "results")
    assert json.loads(results.write("here", settings={}, rows=[]).read_text())["commit"] == "unknown"


def test_torch_and_numpy_suffice():
    blocked = "rich matplotlib scipy jsonschema megatron pyarrow pytest".split()
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport benchmarks.gpu.cp_attention"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ranks_see_the_keys_of_their_documents():
    begins = np.concatenate(([0], np.cumsum(PLAN.lengths)))
    for rank, shard in zip(ranks(PLAN, torch.device("cpu")), PLAN.shards, strict=True):
        held = [range(begins[d] + start, begins[d] + stop) for c in shard.colours for d, start, stop in c]
        assert rank.rows.tolist() == [row for rows in held for row in rows]
        ends: dict[int, int] = {}
        for document, _, stop in np.concatenate(shard.colours).tolist():
            ends[document] = max(stop, ends.get(document, 0))
        assert rank.keys.tolist() == [begins[d] + i for d in sorted(ends) for i in range(ends[d])]


@pytest.mark.parametrize("make", [CopyFree, PrefixCopies, partial(PrefixCopies, dtype=torch.float32)])
def test_gpu_operators_take_the_arguments(make):
    """Their shape functions run without a GPU."""
    options = AttentionOptions(backend=get_backend("aten", "cuda"))
    shapes = ((1384, 8, 64), (1384, 2, 2, 64), (1384, 8, 64))
    rows = Rows(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes))
    for rank in ranks(PLAN, torch.device("cpu")):
        there = replace(rank, metadata=rank.metadata.to("meta"), rows=rank.rows.to("meta"), keys=rank.keys.to("meta"))
        out, dq, dkv = both(make(there, options), there.local(rows))
        assert out.shape == dq.shape == (346, 8, 64)
        assert dkv.shape == (len(rank.keys), 2, 2, 64)


def test_a_profile_is_found_again():
    rng = np.random.default_rng(0)
    counts = rng.random((40, 3)) * (2, 1e4, 1e3)
    true = np.array([[20.0, 0.03, 0.1], [50.0, 0.08, 0.0]])
    profile, entries = fit(counts, counts @ true.T)
    for times, constants in zip((profile.forward, profile.backward), true, strict=True):
        np.testing.assert_allclose((times.launch, times.tile, times.query_tile), constants, rtol=1e-9, atol=1e-9)
    assert max(entries["median_error_of_fit"].values()) < 1e-9
