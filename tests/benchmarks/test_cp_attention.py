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
from benchmarks.gpu.cases import FULL
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.cp_attention import AttentionBench, total_ms
from benchmarks.gpu.ranks import CopyFree, PrefixCopies, Rows, both, ranks
from megatron_wlb.job import STRATEGIES
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.sharding import per_document

ROOT = Path(__file__).parent.parent.parent
BLOCKED = "rich matplotlib megatron pyarrow".split()
PLAN = per_document(np.array([261, 18, 533, 1, 142, 424, 5], np.int64), 4)
COMMON = {"model", "window", "cp", "total_ms", "min_ms", "max_ms", "ms"}
KEYS = {
    "0": {"wrong", "error_out", "error_dq", "error_dk", "error_dv"},
    "a": {"model", "heads", "query_length", "keys", "entries"}
    | {f"{direction}_{unit}" for direction in ("forward", "backward") for unit in ("ms", "tflops")},
    "b": COMMON | {"strategy", "micro_batches", "speedup", "plans"},
    "c": COMMON | {"data", "method", "kept_mib", "peak_mib", "host_ms"},
    "d": COMMON | {"over_limit"},
}


def run(folder: Path, *arguments: str) -> dict:
    """In this process; what it wrote in the end, whether or not it got there."""
    threads = torch.get_num_threads()
    given = ["cp_attention", "--device", "cpu", "--quick", "--commit", "here", "--output", str(folder), *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", given)
        patch.setattr(results, "FOLDER", folder)
        patch.setattr(results, "_commit", results._commit)
        try:
            cp_attention.main()
            status = 0
        except SystemExit as end:
            status = end.code
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            torch.set_num_threads(threads)
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text()) | {"status": status, "file": file.name}


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    arguments = ["--device", "cpu", "--quick", "--commit", "here", "--output", str(folder)]
    command = [sys.executable, "-m", "benchmarks.gpu.cp_attention", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "cp_attention.cpu.json"


def test_every_section_writes_its_rows(result):
    data = json.loads(result.read_text())
    assert (data["benchmark"], data["commit"]) == ("cp_attention", "here")
    assert data["settings"]["fitted_profile"].keys() == {"forward", "backward"}
    assert {row["section"] for row in data["rows"]} == KEYS.keys()
    for row in data["rows"]:
        assert row.keys() >= KEYS[row["section"]]
        assert all(value > 0 for name, value in row.items() if name.endswith("_ms") and value is not None)
    assert [row["wrong"] for row in data["rows"] if row["section"] == "0"] == [0]
    assert {goal["name"][0] for goal in data["goals"]} == set("bcd")
    assert all(np.isfinite(goal["value"]) for goal in data["goals"])
    assert all(goal["holds"] for goal in data["goals"] if "difference" in goal["name"])


def test_shardings_are_compared_on_the_same_micro_batches(result):
    rows = [row for row in json.loads(result.read_text())["rows"] if row["section"] == "b" and row["cp"] == 4]
    by_case = {(row["model"], row["window"]): {} for row in rows}
    for row in rows:
        by_case[row["model"], row["window"]][row["strategy"]] = row
    for case in by_case.values():
        assert case.keys() >= {*STRATEGIES, "oracle", "auto, fitted profile"}
        assert case["per-sequence"]["speedup"] == 1
        assert min(row["total_ms"] for row in case.values()) == case["oracle"]["total_ms"]
        for row in case.values():
            assert sum(row["plans"].values()) == row["micro_batches"] == len(row["ms"])
            assert sum(map(max, row["ms"])) == pytest.approx(row["total_ms"], abs=1e-3)
            assert np.isfinite(row["regret"])


def test_short_queries_meet_long_keys(result):
    rows = [row for row in json.loads(result.read_text())["rows"] if row["section"] == "a" and row["model"] == "GQA"]
    assert [row["query_length"] for row in rows if row["query_length"] < row["keys"]] == [16, 32]
    by_shape = {(row["query_length"], row["keys"], row["entries"]): row for row in rows}
    few, whole = by_shape[16, 512, 2], by_shape[512, 512, 1]
    for row, pairs in ((few, 2 * (16 * 496 + 16 * 17 // 2)), (whole, 512 * 513 // 2)):  # QK^T and PV, 4 heads
        assert row["forward_tflops"] * row["forward_ms"] * 1e9 == pytest.approx(4 * 64 * 4 * pairs)
        assert row["backward_tflops"] * row["backward_ms"] * 1e9 == pytest.approx(10 * 64 * 4 * pairs)


def test_a_case_that_fails_is_a_row_and_all_else_runs(monkeypatch, tmp_path, capsys):
    play = AttentionBench.play

    def full(self, cases, rows, *rest):
        if rows.q.shape[1] == 4:
            raise torch.OutOfMemoryError("out of memory, just now")
        return play(self, cases, rows, *rest)

    monkeypatch.setattr(AttentionBench, "play", full)
    found = run(tmp_path, "--sections", "dc")
    failed = [row for row in found["rows"] if "failed" in row]
    assert found["status"] == "5 cases have failed" and found["file"] == "cp_attention_dc.cpu.json"
    assert [(row["section"], row["model"]) for row in failed] == [("d", "GQA")] + 4 * [("c", "GQA")]
    assert all("just now" in row["failed"] for row in failed) and "in full" in capsys.readouterr().out
    methods = [(row["section"], row["model"]) for row in found["rows"] if "ms" in row]
    assert methods == 3 * [("d", "MHA")] + 16 * [("c", "MHA")]
    assert {goal["name"][:6] for goal in found["goals"]} == {"d: MHA", "c: MHA"}


def test_an_interrupted_run_keeps_what_it_has(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(AttentionBench, "goal", interrupted)  # of the first case, after its rows
    found = run(tmp_path, "--sections", "c", "--models", "MHA")
    assert found["status"] == "interrupted" and len(found["rows"]) == 4


def test_what_there_is_no_time_for_is_left_out(tmp_path):
    found = run(tmp_path, "--sections", "b", "--minutes", "0")
    assert found["status"] == 0 and not found["goals"]
    assert [(row["cp"], row["left_out"]) for row in found["rows"]] == 4 * [(4, "no time is left")] + 4 * [
        (2, "no time is left")
    ]


def test_a_case_ends_with_its_time(monkeypatch, tmp_path):
    monkeypatch.setattr(cp_attention, "QUICK", replace(cp_attention.QUICK, case_seconds=1e-9))
    found = run(tmp_path, "--sections", "b", "--models", "MHA")
    assert {row["micro_batches"] for row in found["rows"]} == {1}


def test_plans_take_turns_and_the_first_call_does_not_count():
    called: list[int] = []

    def make(which):
        return lambda *_: SimpleNamespace(
            forward=lambda _: called.append(which) or (which,), backward=lambda *_: (which, which)
        )

    cpu = torch.device("cpu")
    bench = SimpleNamespace(options=None, backend=get_backend("cpu", cpu), device=cpu, clock=Clock(cpu))
    rows = Rows(*(torch.zeros(1384, *shape, 4) for shape in ((2,), (2, 1), (2,))))
    whole = per_document(PLAN.lengths, 1)
    cases = [(whole, make(i)) for i in range(3)]
    ms = AttentionBench.play(bench, cases, rows, 0)
    assert called == [0, 1, 2, *(0, 1, 2), *(1, 2, 0), *(2, 0, 1)]
    assert [of_plan.shape for of_plan in ms] == 3 * [(3, 1)]
    called.clear()
    AttentionBench.play(bench, cases, rows, 2)
    assert called == [0, *(2, 0, 1), *(0, 1, 2), *(1, 2, 0)]


def test_an_oracle_is_not_chosen_by_what_measures_it():
    """Of plans that are equally fast but for noise, one that is chosen and measured by the same rounds looks faster."""
    rng = np.random.default_rng(0)
    played = [{bytes([i]): 1 + 0.01 * rng.standard_normal((5, 4)) for i in range(8)} for _ in range(300)]
    chosen = total_ms([ms[b"\0"][half] for ms in played for half in cp_attention.HALVES])
    best = total_ms([half for ms in played for half in cp_attention.crossed(ms)])
    naive = total_ms([min(ms.values(), key=lambda x: total_ms([x])) for ms in played])
    assert abs(chosen / best - 1) < 1e-3
    assert total_ms([ms[b"\0"] for ms in played]) / naive - 1 > 4e-3
    fast = {b"slow": np.full((3, 2), 2.0), b"fast": np.ones((3, 2))}
    assert [x.tolist() for x in cp_attention.crossed(fast)] == [[[1, 1], [1, 1]], [[1, 1]]]


@pytest.mark.parametrize(("late", "leads", "behind"), [(0, [3], 0), (2, [3, 6, 12], 0), (9, [3, 6, 12, 24, 48, 96], 1)])
def test_a_measurement_that_waits_for_the_host_is_repeated(monkeypatch, late, leads, behind):
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    clock = Clock(torch.device("cpu"))
    clock._on_gpu, clock._flushed = True, torch.empty(1)
    clock._begin = SimpleNamespace(
        record=lambda: None, query=lambda: len(slept) <= late, elapsed_time=lambda _: len(slept)
    )
    clock._end = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    assert clock.ms(lambda: None) == len(leads)
    assert slept == [lead * 1_000_000 for lead in leads] and clock.behind == behind


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


@pytest.mark.parametrize("module", ["cp_attention", "layer"])
def test_torch_numpy_and_scipy_suffice(module):
    code = f"import sys\nfor name in {BLOCKED}: sys.modules[name] = None\nimport benchmarks.gpu.{module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ranks_see_the_keys_of_their_documents():
    begins = np.concatenate(([0], np.cumsum(PLAN.lengths)))
    for rank, shard in zip(ranks(PLAN, get_backend("cpu", "cpu"), torch.device("cpu")), PLAN.shards, strict=True):
        held = np.concatenate(shard.calls).tolist()
        assert rank.rows.tolist() == [begins[d] + i for d, start, stop in held for i in range(start, stop)]
        for segment, (document, start, stop) in zip(rank.segments, held, strict=True):
            packed = begins[document] + np.arange(stop)
            assert rank.rows[segment.q_start : segment.q_stop].tolist() == packed[start:].tolist()
            assert rank.keys[segment.k_start : segment.k_stop].tolist() == packed.tolist()


@pytest.mark.parametrize("make", [CopyFree, PrefixCopies, partial(PrefixCopies, dtype=torch.float32)])
def test_gpu_operators_take_the_arguments(make):
    """Their shape functions run without a GPU."""
    options = AttentionOptions(backend=get_backend("aten", "cuda"))
    shapes = ((1384, 8, 64), (1384, 2, 2, 64), (1384, 8, 64))
    rows = Rows(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes))
    for rank in ranks(PLAN, options.backend, torch.device("cpu")):
        there = replace(rank, metadata=rank.metadata.to("meta"), rows=rank.rows.to("meta"), keys=rank.keys.to("meta"))
        out, dq, dkv = both(make(there, options), there.local(rows))
        assert out.shape == dq.shape == (346, 8, 64)
        assert dkv.shape == (len(rank.keys), 2, 2, 64)
