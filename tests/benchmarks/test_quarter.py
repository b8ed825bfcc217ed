"""The quarter of an hour: its steps keep to their limits, go on where they stopped, and are judged as they should be.

`.ci/run` rehearses it end to end.
"""

import importlib
import json
import math
import shlex
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest

from benchmarks.gpu import composed, quarter, ranks, script
from benchmarks.gpu.quarter import DONE, FAILED, IN_VAIN, NO_TIME, OVER, Quarter, Step
from benchmarks.step_time import Case, job_of
from megatron_wlb.job import Parallel
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import pass_times
from megatron_wlb.simulate.step import simulate_step
from tests.jobs import job as small_job

KNOWN = {"out": "", "library": "", "script": ""}


def step(name, words, seconds=0.0, limit=60.0, after=""):
    return Step(name, seconds, limit, words, words, after)


def test_steps_keep_to_limits_and_go_on_where_they_stopped(tmp_path):
    (tmp_path / "work").mkdir()
    steps = (
        step("right", "platform"),
        step("wrong", "json.tool no/such/file"),
        step("long", "http.server 0", limit=2.0),
        step("in vain", "platform", after="wrong"),
        step("too long", "platform", seconds=3600.0),
    )
    first = Quarter(tmp_path, 1.0, KNOWN, rehearse=False, commit="abc")
    begin = time.monotonic()
    first.run(steps)
    assert time.monotonic() - begin < 50
    wanted = [DONE, FAILED, OVER, IN_VAIN, NO_TIME]
    assert [first.state[each.name]["state"] for each in steps] == wanted
    assert "Linux" in first.state["right"]["said"] and "no/such/file" in first.state["wrong"]["said"]
    assert all(state in first.table(steps) for state in wanted)
    with tarfile.open(tmp_path / "logs.tar.xz") as archive:
        assert set(archive.getnames()) >= {"logs/right.log", "logs/wrong.log", "logs/long.log"}
    # Again, after a step was cut by the machine.
    before = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(before | {"right": {"state": "begun", "seconds": 0, "said": ""}}))
    second = Quarter(tmp_path, 120.0, KNOWN, rehearse=False)
    second.run(steps)
    assert [second.state[each.name]["state"] for each in steps] == [DONE, FAILED, OVER, IN_VAIN, DONE]
    assert second.state["wrong"] == before["wrong"] and second.state["long"] == before["long"]


@pytest.mark.parametrize("of", quarter.STEPS, ids=lambda of: of.name)
def test_the_words_of_a_step_are_understood(of, monkeypatch, capsys):
    assert 0 < of.seconds < of.limit < 180
    known = {"out": "out", "library": "--library libnccl.so.2", "script": "pretrain_gpt.py"}
    module, *words = shlex.split(of.words.format(**known))
    if module == "pytest":
        return
    main = importlib.import_module("megatron_wlb.cli.main" if module == "megatron_wlb" else module).main
    commit = ["--commit", "abc"] if module.startswith("benchmarks.") else []
    monkeypatch.setattr(sys, "argv", [module, *words, *commit, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err


def test_the_steps_fit_the_time():
    assert sum(of.seconds for of in quarter.STEPS[:-1]) < 9.2 * 60 + 10
    assert {of.after for of in quarter.STEPS} - {""} <= {of.name for of in quarter.STEPS}


def test_results_of_a_gpu_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(quarter.results, "FOLDER", tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    for name, content in {
        "probes_h200.json": {"device": "NVIDIA H200"},
        "profile.json": {"device": "NVIDIA H200"},
        "probes_cpu.json": {"device": "AMD EPYC, 2 cores"},
        "state.json": {"smoke": {"state": "done"}},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert [path.name for path in quarter.keep(tmp_path)] == ["probes_h200.json", "profile_h200.json"]
    assert json.loads((tmp_path / "kept" / "profile_h200.json").read_text()) == {"device": "NVIDIA H200"}


JOB = job_of(Case("7B PP4", 16384, 16, 1), num_micro_batches=24)


@pytest.mark.parametrize("ring", [False, True])
def test_composed_of_predicted_passes_is_what_was_predicted(ring):
    """Passes without communication, in the order in which they run, as single ranks measure them."""
    job = without_wlb(JOB) if ring else JOB
    rng, count = np.random.default_rng(0), 16 if ring else 24
    documents = [[rng.integers(8, 2000) // 8 * 8 for _ in range(9)] for _ in range(count)]
    documents = [[*map(int, each), -sum(map(int, each)) % job.unit_tokens or job.unit_tokens] for each in documents]
    shards = [shard(np.array(each), job) for each in documents]
    alone = pass_times(composed.without_communication(job), shards)
    order = job.of_step(count, sum(map(sum, documents))).schedule(count).table()

    def measured(stage):
        times = {name: getattr(alone, name)[stage] / 1e3 for name in ("forward", "backward")}
        return {
            "forward": [times["forward"][chunk, m] for m, chunk in order],
            "backward": [times["backward"][-1 - chunk, m] for m, chunk in order],
        }

    # Rank 1 of tensor parallelism, and the other context-parallel rank, which is faster.
    side = {16 * stage + 1: [measured(stage)] for stage in (0, 1, 3)}
    side |= {24: [{name: [0.5 * each for each in of] for name, of in measured(1).items()}]}
    got, predicted = composed.composed(job, side, [documents])
    assert predicted == pytest.approx(simulate_step(job.of_step(count, 1), [shards]).time / 1e3)
    assert got == pytest.approx(predicted, rel=1e-9)
    side[17][0]["forward"][3] += 10.0
    assert composed.composed(job, side, [documents])[0] > got + 1.0


def test_a_stage_that_was_not_measured_takes_the_passes_of_one_like_it():
    job = small_job(parallel=Parallel(pp=4), num_micro_batches=4)
    assert [composed._stand_in(stage, [1, 3], job) for stage in range(4)] == [1, 1, 1, 3]
    assert [composed._stand_in(stage, [3], job) for stage in range(4)] == [3] * 4
    assert [composed._stand_in(stage, [0, 2], job) for stage in range(4)] == [0, 0, 2, 2]


def test_what_cannot_be_composed_is_refused(monkeypatch):
    for words, why in (
        (["mine"], "give --world-size, --ranks, and"),
        (["mine", "--world-size", "2", "--ranks", "0", "--", "--num-experts", "4"], "compose a dense model"),
    ):
        monkeypatch.setattr(sys, "argv", ["composed", *words])
        with pytest.raises(SystemExit, match=why):
            composed.main()
    with pytest.raises(ValueError, match=r"^3 passes were measured of 4 micro-batches in 1 chunks; measure"):
        composed.placed([1.0] * 3, small_job(num_micro_batches=4), 4, backward=False)
    job = job_of(Case("8B CP8", 16384, 1, 2))
    with pytest.raises(ValueError, match="no rank of data-parallel rank 1 was measured; give one"):
        composed.composed(job, {0: [{"forward": [1.0], "backward": [2.0]}]}, [[[job.context_length]]] * 2)


class Sleeping(script.Run):
    """Ranks that sleep instead of training, once they may; `flags` are seconds and the status of each rank."""

    def start(self):
        self.folder.mkdir(exist_ok=True)
        code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        code += "time.sleep(float(sys.argv[2])); sys.exit(int(sys.argv[3]))"
        for seconds, status in self.flags:
            words = [sys.executable, "-c", code, str(self._go), str(seconds), str(status)]
            self.processes.append(subprocess.Popen(words))


def test_runs_train_in_turn_and_end_with_the_first_rank_that_fails(tmp_path):
    def of(name, *flags):
        return Sleeping(name=name, folder=tmp_path, script=tmp_path, flags=flags, watcher="")

    runs = [of("a", (0.1, 0)), of("b", (0.1, 0), (60, 7), (0, 3)), of("c", (0.1, 0)), of("d", (60, 0))]
    ended = []
    turns = script.trained(runs, at_once=1, ahead=1)
    for run in turns:
        ended.append(run.name)
        started = [each.name for each in runs if each.processes]
        assert started == ["a", "b", "c", "d"][: 1 + len(ended)]
        assert all(process.returncode is not None for process in run.processes)
        if run.name == "c":
            break
    assert ended == ["a", "b", "c"] and [run.failed for run in runs[:3]] == [False, True, False]
    assert runs[0].began < runs[1].began < runs[2].began
    turns.close()
    assert all(process.returncode for process in runs[3].processes)


def run_of(folder, name, losses, digests, sums, status=0):
    """A run that has ended, by what it wrote."""
    run = script.Run(name=name, folder=folder, script=folder, flags=(), watcher="ranks")
    lines = [f"lm loss: {loss} |\nwlb step | digest {digest}" for loss, digest in zip(losses, digests, strict=True)]
    run.log(0).write_text("\n".join(["Channel 0 before", "training ...", *lines, " Channel 1 of NCCL"]))
    run.file(0).write_text("\n".join(sums))
    run.processes.append(type("Ended", (), {"returncode": status})())
    return run


def test_a_run_of_several_ranks_is_judged(tmp_path):
    base = run_of(tmp_path, "base", (5.0, 4.0), "ab", "x")
    still = run_of(tmp_path, "still", (5.0, 4.001), "ab", "12")
    good = ranks.judged("CP2", run_of(tmp_path, "good, delays 1", (5.0, 4.001), "ab", "12"), base, still)
    assert good["same_digests"] == good["steps"] == 2 and good["finite"] and good["same_sums"]
    assert good["loss_difference"] == pytest.approx(0.00025) and good["channels_in_steps"] == 1
    assert all(goal["holds"] for goal in ranks.goals([good], 2))
    for changes, missed in (
        ({"digests": "ac"}, "digest"),
        ({"losses": (5.0, math.nan)}, "nothing but numbers"),
        ({"losses": (5.0, 4.1)}, "relative difference"),
        ({"sums": "13"}, "to the bit"),
        ({"status": 1}, "nothing but numbers"),
    ):
        given = {"losses": (5.0, 4.0), "digests": "ab", "sums": "12"} | changes
        row = ranks.judged("CP2", run_of(tmp_path, "bad, delays 1", **given), base, still)
        assert any(missed in goal["name"] and not goal["holds"] for goal in ranks.goals([row], 2)), changes


def test_every_layout_has_a_run_of_one_rank_to_be_held_against(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    args = type("Args", (), {"rehearse": False, "layouts": [*ranks.LAYOUTS], "library": None, "output": None})
    monkeypatch.setattr(ranks, "write_dataset", lambda folder, lengths: "data")
    args.script = tmp_path
    found = ranks.runs_of(args, tmp_path, 6)
    names = [run.name for _, run, *_ in found]
    assert len(set(names)) == len(names)
    by_name = {run.name: run for _, run, *_ in found}
    for _, run, base, still in found:
        assert ("--wlb" in run.flags) == bool(base)
        if base:
            assert by_name[base].world == 1 and names.index(base) < names.index(run.name)
            assert (
                by_name[base].flags[: by_name[base].flags.index("--position-embedding-type")]
                == run.flags[: len(ranks.LAYOUTS["CP2"].model.split())]
                or "--num-layers" in run.flags
            )
            assert ("delays" in run.name) == (run.name != still and "NOISE" in run.env)
    (tmp_path / "smoke_h200.json").write_text(
        json.dumps(
            {"settings": {"works": {"A": "1"}}, "rows": [{"ranks": 2, "failed": ""}, {"ranks": 4, "failed": "hangs"}]}
        )
    )
    args.output = tmp_path
    fewer = ranks.runs_of(args, tmp_path, 6)
    assert {run.world for _, run, *_ in fewer} == {1, 2} and all(run.env["A"] == "1" for _, run, *_ in fewer)
    assert {name for name, *_ in fewer} == {name for name, layout in ranks.LAYOUTS.items() if layout.ranks == 2}
