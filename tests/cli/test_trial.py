"""`megatron-wlb trial` with a run that has known times, losses and digests; `tests/adapter/test_trial.py` trains."""

import json
import os
import re
import shlex
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_wlb.cli.main import main
from megatron_wlb.cli.pictures import BLUE, ORANGE
from megatron_wlb.cli.trial import command, page, report, turns
from tests.cli.analyses import JOB, analyse
from tests.cli.commands import ROOT, refusal
from tests.cli.stand_in import pretrain_gpt as stand_in
from tests.cli.trials import NUM_GPUS, SCRIPT, SKIP, STEPS, alive, environment, started, stopped, words


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the stand-in finds what it is to do."""
    for name, value in environment(tmp_path / "told").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "told"


def trial(folder, data, own="", flags="", status=0):
    """The numbers of a trial, and what its pages say."""
    html, numbers = (folder.parent / name for name in ("trial.html", "trial.json"))
    assert main(words(folder, data, f"--html {html} --json {numbers} {own}", flags)) == status
    return json.loads(numbers.read_text()), html.read_text()


def test_a_report(folder, data, tmp_path, capsys):
    saves = f"--save {tmp_path}/save --save-interval 5 --tensorboard-dir {tmp_path} --exit-duration-in-mins 9 --lr 1e-4"
    of_wlb = "--wlb-packing megatron --wlb-log elsewhere --no-load-wlb"
    found, page = trial(folder, data, "--wlb-max-tokens 8192", f"{saves} {of_wlb}")
    said, shown = capsys.readouterr()
    first, second = started(folder)[:2]
    assert started(folder) == [first, second] * 2
    common = ["--lr", "1e-4", "--log-interval", "1", "--log-memory-interval", "12", "--eval-iters", "0"]
    common += ["--exit-interval", "12", "--wlb-digest"]
    assert first == [*shlex.split(JOB), "--data-path", data, "--bf16", *common]
    given = ["--wlb-packing", "megatron", "--wlb-log", "elsewhere", "--no-load-wlb", "--wlb-max-tokens=8192"]
    ours = ["--wlb", "--wlb-log", str(tmp_path / "out" / "with.jsonl")]
    assert second == [*shlex.split(JOB), "--data-path", data, "--bf16", *common[:2], *given, *common[2:], *ours]

    times = [[stand_in.seconds(t, step, t % 2 == 0) for step in range(SKIP + 1, STEPS + 1)] for t in (1, 2, 3, 4)]
    sums = np.sum(times, axis=1)
    ratios = sums[[0, 2]] / sums[[1, 3]]
    assert found["ratio"] == pytest.approx(ratios.mean())
    assert found["error_by_turns"] == pytest.approx(ratios.std(ddof=1) / np.sqrt(2))
    assert [pair["turns"] for pair in found["pairs"]] == [[1, 2], [3, 4]]
    within = np.linalg.norm([pair["error"] for pair in found["pairs"]]) / 2
    assert found["error_within_turns"] == pytest.approx(within)
    assert 0 < within < found["error"] == found["error_by_turns"]
    assert found["digests"] == {"steps": STEPS, "equal": STEPS, "first_other": None}
    assert found["loss_difference"] == pytest.approx(1.1e-5, rel=1e-2)
    assert found["loss_difference_without"] == pytest.approx(2e-6, rel=1e-2)
    assert [turn["peak_gib"] for turn in found["turns"]] == [68, 78, 68, 78]
    assert found["versions"] == {"megatron-wlb": "1.2.3", "torch": "4.5.6"} and found["gpus"] == 4
    second_turn = found["turns"][1]
    ms, tokens = [1e3 * each for each in times[1]], 4 * 4096.0
    assert second_turn.pop("seconds") > 0
    assert second_turn == {
        **{"turn": 2, "wlb": True, "crashed": False, "peak_gib": 78, "step_ms": pytest.approx(np.mean(ms))},
        "tokens_per_second_per_gpu": pytest.approx(8 * tokens / sums[1] / 4),
        "steps": [[step, pytest.approx(each), tokens] for step, each in zip(range(5, 13), ms, strict=True)],
    }
    predicted = analyse(
        tmp_path, f"--wlb-max-tokens 8192 {NUM_GPUS} --gpu h100 --wlb-packing megatron", JOB, data_of(data)
    )
    scheme = predicted["schemes"][predicted["scheme_of_run"]]
    assert found["predicted_ratio"] == pytest.approx(
        scheme["us_per_token"] / predicted["schemes"]["ours"]["us_per_token"], rel=0.03
    )

    lines = [re.sub(" +", " ", line).strip() for line in said.splitlines()]
    error = found["error"]
    assert lines[0] == (
        f"--wlb is faster: {found['ratio']:.3f} ± {error:.3f} times as many tokens per second as without it, "
        "measured in 2 pairs of turns (4 x NVIDIA H100 80GB HBM3)."
    )
    rate = np.mean([8 * 16384 / each / 4 for each in sums[[0, 2]]])
    assert any(line.startswith(f"tokens per second and GPU {rate:,.1f} ") for line in lines)
    assert "most memory of a rank, GiB 68.00 78.00 1.147" in lines
    assert f"time of a step, ms {np.mean(times[::2]) * 1e3:,.1f} {np.mean(times[1::2]) * 1e3:,.1f}" in lines
    assert [line.split(" ± ")[0].rpartition(" ")[2] for line in lines if line.startswith("turns ")] == [
        f"{ratio:.3f}" for ratio in ratios
    ]
    assert "exchange, % of a step 0.0 0.0" in lines and "waiting, % of a step 5.0 0.0" in lines
    equal = (
        "- Digests are equal at 12 of 12 steps, in all turns: the same tokens, positions, visible keys, targets and "
    )
    assert f"{equal}weights." in lines
    losses = (
        "- Losses with --wlb and without differ by up to 1.1e-05 of their value; between turns without it, by up to "
    )
    assert f"{losses}2.0e-06." in lines
    assert "- Every step trains the same as without --wlb." in lines
    assert "- 4 x NVIDIA H100 80GB HBM3; megatron-wlb 1.2.3, torch 4.5.6." in lines
    assert lines[-1].startswith(
        f"With --wlb: {os.path.basename(sys.executable)} pretrain_gpt.py {JOB} --data-path ... --bf16"
    )
    assert re.sub(r"\d+ s\n", "", shown).startswith("turn 1 of 4, without --wlb: turn 2 of 4, with --wlb: turn 3")
    for text in (said, page, json.dumps(found)):
        assert str(tmp_path) not in text and data not in text
    for sentence in found["words"]:
        assert sentence in said
    assert found["words"][0] in page.replace("&#39;", "'") and page.count("<img") == 1


def data_of(data):
    return f"--data-path {data}"


def test_paths_are_told_on_demand(folder, data, tmp_path):
    found, page = trial(folder, data, "--with-paths --turns 1")
    for text in (found["command"], page):
        assert data in text and SCRIPT in text
    assert found["error_by_turns"] is None and found["error"] == found["error_within_turns"]


def test_a_turn_that_crashes_is_named_and_the_trial_goes_on(folder, data, tmp_path, capsys):
    (folder / "fails").write_text("2")
    found, page = trial(folder, data)
    said, shown = capsys.readouterr()
    assert [turn["crashed"] for turn in found["turns"]] == [False, True, False, False]
    assert [pair["turns"] for pair in found["pairs"]] == [[1, 4]]
    why = "[rank1]: ValueError: no corpus in {} [exit status 3]"
    assert f"- Turn 2, with --wlb, crashed: {why.format('...')}\n" in said
    assert f"crashed: {why.format('/data/corpus/of/words')} (all of it: {tmp_path}/out/turn-2-with.log)\n" in shown
    assert "/data/corpus" not in page


@pytest.mark.parametrize(
    ("fails", "left"), [("2 4", "no turn with --wlb"), ("1 2 3 4", "without --wlb and with --wlb")]
)
def test_without_a_side_there_is_nothing_to_compare(fails, left, folder, data):
    (folder / "fails").write_text(fails)
    found, _ = trial(folder, data, status=1)
    assert len(started(folder)) == 4
    assert re.match(f"Nothing to compare: no turn .*{left.removeprefix('no turn ')} is left.", found["words"][0])


def test_turns_that_do_not_compare_are_told(folder, data, monkeypatch):
    def refused(one, other):
        raise ValueError("no step of both")

    monkeypatch.setattr(report.compare, "compared", refused)
    found, _ = trial(folder, data, "--turns 1", status=1)
    assert found["words"][0] == "Nothing to compare: no turn of both sides is left."
    assert "Turns 1 and 2 do not compare: no step of both." in found["words"] and found["pairs"] == []


def test_other_digests_are_told(folder, data, capsys):
    (folder / "other").write_text("4")
    found, _ = trial(folder, data)
    assert found["digests"] == {"steps": STEPS, "equal": 8, "first_other": 9}
    assert "Digests differ at 4 of 12 steps, first at step 9: there the turns did not train the same." in found["words"]


def test_without_digests_none_are_equal(folder, data):
    (folder / "silent").write_text("2")
    found, _ = trial(folder, data)
    assert "Digests are not compared: no step has one in all turns." in found["words"]


@pytest.mark.parametrize(("count", "said"), [(2, True), (4, False), (6, False)])
def test_fewer_micro_batches_are_told(count, said, folder, data, monkeypatch):
    monkeypatch.setenv("MICRO_BATCHES", str(count))
    monkeypatch.setenv("DEVICE", "one thread of an x86_64 CPU")
    found, _ = trial(folder, data, "--turns 1")
    assert found["micro_batches"] == [4, count]
    told = f"A step has 4 micro-batches without --wlb and {count} with it, over all data-parallel ranks. A larger"
    assert any(each.startswith(told) for each in found["words"]) == said


@pytest.mark.parametrize(
    ("data", "own", "flags", "said"), [("", "", "--mock-data", True), ("nowhere/corpus", "--mock-data", "", False)]
)
def test_mock_data_of_the_run_are_told(data, own, flags, said, folder):
    """And those that stand for data which are not visible here are only predicted with."""
    found, _ = trial(folder, data, f"--turns 1 {own}", flags)
    assert ("measured on mock data in 1 pair of turns" in found["words"][0]) == said
    assert found["predicted_ratio"] > 0
    assert ("--mock-data" in started(folder)[0]) == said


def test_a_profile_that_is_given_stands_for_any_device(folder, data, monkeypatch):
    monkeypatch.setenv("DEVICE", "one thread of an x86_64 CPU")
    found, _ = trial(folder, data, "--turns 1 --wlb-profile h100-fa2")
    said = f"Predicted for the profile by megatron-wlb analyze: {found['predicted_ratio']:.3f} times."
    assert said in found["words"] and found["predicted_ratio"] > 1


def test_without_a_profile_of_the_device_nothing_is_predicted(folder, data, monkeypatch):
    monkeypatch.setenv("DEVICE", "one thread of an x86_64 CPU")
    found, _ = trial(folder, data, "--turns 1")
    assert "predicted_ratio" not in found and "times" not in found
    said = " ".join(found["words"])
    assert "No speed-up is predicted: there is no profile of one thread of an x86_64 CPU; give the run" in said
    assert "ran on one thread of an x86_64 CPU, and profile h100-cudnn is of NVIDIA H100" in said


@pytest.mark.parametrize(
    ("latest", "flags", "first"),
    [
        ("20", "", 20),
        ("release", "", 0),
        ("20", "--finetune", 0),
        ("20", "--ckpt-step 10", 10),
        ("20", "--ckpt-step 10 --override-ckpt-iteration 8", 8),
        (None, "", 0),
    ],
)
def test_a_trial_begins_where_the_run_would(latest, flags, first, folder, data, tmp_path, monkeypatch):
    if latest is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{latest}\n")
    monkeypatch.setattr(turns, "run_all", lambda plan, turns: [])
    found, _ = trial(folder, data, flags=f"--load {tmp_path} {flags} --train-iters {first + STEPS}", status=1)
    assert found["first"] == first
    last = first + STEPS
    assert f"--log-memory-interval {last} --eval-iters 0 --exit-interval {last} " in found["command"]
    less = words(folder, data, flags=f"--load {tmp_path} {flags} --train-iters {first + STEPS - 1}")
    assert main(less) == 2


def test_a_checkpoint_is_gone_on_from(folder, data, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    found, _ = trial(folder, data, "--turns 1", f"--load {tmp_path}")
    assert [row[0] for row in found["turns"][0]["steps"]] == [*range(20 + SKIP + 1, 20 + STEPS + 1)]
    assert "All turns begin from the checkpoint of iteration 20." in found["words"]


@pytest.mark.parametrize(("steps", "skip"), [(4, 2), (12, 4), (29, 9), (30, 10), (90, 10)])
def test_a_third_of_a_turn_is_left_out_of_two_steps_to_ten(steps, skip, folder, data, monkeypatch):
    """The folder for logs may be there, if it is empty."""
    (folder.parent / "out").mkdir()
    monkeypatch.setattr(turns, "run_all", lambda plan, turns: [])
    found, _ = trial(folder, data, f"--steps {steps}", status=1)
    assert (found["steps"], found["skip"], found["gpus"]) == (steps, skip, None)


@pytest.mark.parametrize(
    ("flags", "out"),
    [
        (
            """save save-interval save-retain-interval persistent-save-interval non-persistent-save-interval
            non-persistent-ckpt-type async-save ckpt-convert-format tensorboard-dir wandb-project mlflow-project
            exit-interval exit-duration-in-mins log-progress profile profile-step-end use-pytorch-profiler
            pytorch-profiler-collect-shapes record-memory-history memory-snapshot-path config-logger-dir
            moe-routing-trace-path dump-param-to-param-group-map flight-recorder-dump-path enable-ft-package
            calc-ft-timeouts""",
            True,
        ),
        (
            """load log-interval exit-signal-handler no-save-optim ckpt-format data-path train-iters lr eval-iters wlb
            use-checkpoint-args moe-router-topk enable-experimental""",
            False,
        ),
    ],
)
def test_flags_that_write_or_end_a_run_are_taken_out(flags, out):
    for flag in flags.split():
        assert bool(command._TAKEN_OUT.match(f"--{flag}")) == out, flag


REMEDY = "In a Slurm script, put megatron-wlb trial -- before srun"


@pytest.mark.parametrize(
    ("own", "script", "flags", "message"),
    [
        ("", "bash run.sh", "", REMEDY),
        ("", "srun bash -c 'python pretrain_gpt.py --num-layers 2'", "", REMEDY),
        ("", "bash -c 'python pretrain_gpt.py'", "", REMEDY),
        ("", "nowhere/torchrun pretrain_gpt.py", "", "nowhere/torchrun is no program here; give the command from its"),
        ("", "A=1 python pretrain_gpt.py", "", "A=1 is no program here; .*set variables before"),
        ("", None, "--attention-dropout 0.1", "training with --wlb refuses this run: --attention-dropout is 0.1"),
        ("", None, "--qk-clip", "training with --wlb refuses this run: --qk-clip needs the largest logit"),
        ("", None, "--wlb-max-tokens 9", r"\(--wlb-max-tokens\) is 9; it must be from 4096"),
        ("", None, "--data-path nowhere/corpus", "nowhere/corpus.idx"),
        ("", None, "--train-iters 10", "--steps 12 from iteration 0 on is over the 10 iterations .*at most 10"),
        ("", None, "--train-samples 47", "--steps 12 from iteration 0 on is over the 11 iterations .*at most 11"),
        ("", None, "-- --wlb", "cannot be added behind --wlb; give all flags as words"),
        ("--out {here}", None, "", "is there, and not empty; name another folder"),
        (f"--out {SCRIPT}", None, "", "is there, and not empty; name another folder"),
        ("--html - --json -", None, "", "two outputs would be mixed"),
        ("--html {here}/no/page.html", None, "", "the folder .*no does not exist"),
        ("--steps 3", None, "", "'3' must be an integer from 4 to"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(own, script, flags, message, folder, data, capsys, tmp_path):
    own = own.format(here=tmp_path)
    said = refusal(capsys, *words(folder, data, own, flags, script or f"{sys.executable} {SCRIPT}"))
    assert re.search(message, said), said
    assert not started(folder) and not (tmp_path / "out").exists()


def test_a_trial_wants_a_command(capsys):
    assert "no command; give the run's command behind --" in refusal(capsys, "trial", "--steps", "4")


def test_a_load_that_says_no_iteration_is_refused(folder, data, capsys, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    said = refusal(capsys, *words(folder, data, flags=f"--load {tmp_path}"))
    assert "with soon, which is no iteration; give --finetune" in said


@pytest.mark.parametrize("launcher", ["", "-m torch.distributed.run --standalone --nproc-per-node 1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_process_is_left_behind(number, launcher, folder, data):
    """Those that torchrun starts are in sessions of their own."""
    (folder / "hangs").touch()
    script = f"{sys.executable} {launcher} {SCRIPT}"
    command = [sys.executable, "-m", "megatron_wlb", *words(folder, data, script=script)]
    stopped(command, number, folder, cwd=ROOT)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("starting\nValueError: one\nsrun: error: node: task 0: Exited\n", "ValueError: one"),
        ("[rank1]: KeyError: 'two'\n[rank0]: RuntimeError: closed\nValueError: three", "[rank1]: KeyError: 'two'"),
        ("pretrain_gpt.py: error: no --lr\nbye", "pretrain_gpt.py: error: no --lr"),
        ("srun: error: no node\nbye", "srun: error: no node"),
        ("srun: error: one\nslurmstepd: error: two\nbye", "slurmstepd: error: two"),
        ("ValueError: one\nslurmstepd: error: two\nprterun: error: three", "ValueError: one"),
        ("KeyError: 'one'\nValueError: two\n[rank0]: note\nbye", "ValueError: two"),
        ("starting\nKilled\n\n", "Killed"),
        ("", "it printed nothing"),
    ],
)
def test_the_error_of_a_log(lines, said):
    assert turns.error_of(lines) == said


SHOWN = {
    "srun -N 2 --ntasks=4 --account=us -A us --container-image /x/y.sqsh python -u a/pretrain_gpt.py --lr 1e-4": (
        "srun -N 2 --ntasks=4 --account=... -A ... --container-image ... python -u pretrain_gpt.py --lr 1e-4"
    ),
    "env KEY=secret torchrun --rdzv-endpoint=10.0.0.1:29500 pretrain_gpt.py --data-path 0.3 /a/b 0.7 c --split 9,1": (
        "env ... torchrun --rdzv-endpoint=... pretrain_gpt.py --data-path ... --split 9,1"
    ),
    "/bin/python3.12 -m torch.distributed.run pretrain_gpt.py --tokenizer-model x --fp8-format hybrid --load=x": (
        "python3.12 -m torch.distributed.run pretrain_gpt.py --tokenizer-model ... --fp8-format hybrid --load=..."
    ),
    "python pretrain_gpt.py --seed -1 --data-path -x --fp8-format a/b --wlb-packing c/d --kitchen-config-file -3": (
        "python pretrain_gpt.py --seed -1 --data-path ... --fp8-format ... --wlb-packing ... --kitchen-config-file -3"
    ),
    "python pretrain_gpt.py --wlb --wlb-packing paper:96,160 --wlb-profile mine.json --kitchen-config-file x": (
        "python pretrain_gpt.py --wlb --wlb-packing paper:96,160 --wlb-profile ... --kitchen-config-file ..."
    ),
}


@pytest.mark.parametrize(("words", "told"), SHOWN.items())
def test_what_is_told_of_a_command(words, told):
    assert command.shown(words.split()) == told


def test_names_of_data_and_places_are_not_told():
    names = """load data-path train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path
    data-cache-path tokenizer-model vocab-file merge-file wlb-log wlb-profile""".split()
    for name in names:
        assert command.shown(["python", "x.py", f"--{name}", "corpus"]) == f"python x.py --{name} ..."
        assert command.hidden("of corpus", ["python", "x.py", f"--{name}", "corpus"]) == "of ..."


def test_what_is_told_of_an_error():
    words = "python pretrain_gpt.py --data-path corpus set --lr 3 --load=ours --merge-file ab --seed tokens".split()
    text = "corpus.idx of ours, ~/x/y.bin, ../z, data/set.bin and /a/b: 3 tokens/s"
    assert command.hidden(f"{text} grab", words) == "....idx of ..., ..., ..., ... and ...: 3 tokens/s grab"


@pytest.mark.parametrize(("steps", "crash"), [(0, "no steps; bye"), (1, "no steps; bye"), (2, "")])
def test_a_turn_counts_from_two_steps_on(steps, crash, tmp_path, monkeypatch):
    (tmp_path / "log").write_text("bye")
    monkeypatch.setattr(turns.run_log, "read", lambda *_: SimpleNamespace(steps=np.ones((steps, 6))))
    turn = turns.Turn(number=1, side=0, log=tmp_path / "log", seconds=1.0)
    assert turns.read(turn, 0, 4).crash == crash
    assert turns.read(turn, 7, 4).crash == "bye [exit status 7]"


def test_a_turn_has_the_digests_and_the_most_memory_that_its_log_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(turns.run_log, "read", lambda *_: SimpleNamespace(steps=np.ones((2, 6))))
    turn, lines = turns.Turn(number=1, side=0, log=tmp_path / "log", seconds=1.0), []
    one, memory = {3: "00000000000000ff"}, "memory (MB) | allocated: 9999.0 | max allocated:"
    for line, digests, peak in (
        (" wlb step      3 | digest 00000000000000ff", one, None),
        (f"{memory} 2048.0 | max reserved: 9999.0", one, 2.0),
        (f"{memory} 1024.0", one, 2.0),
        (" wlb step      4 | digest 00000000000000fe", one | {4: "00000000000000fe"}, 2.0),
    ):
        lines.append(line)
        turn.log.write_text("\n".join(lines))
        found = turns.read(turn, 0, 4)
        assert (found.digests, found.peak_gib, found.crash) == (digests, peak, "")
    turn.log.write_text(f"ValueError: {'x' * 400}")
    assert len(turns.read(turn, 1, 4).crash) < 350


HANDSHAKES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("ended").touch())
def until(name):
    end = time.monotonic() + 60
    while not pathlib.Path(name).exists():
        if time.monotonic() > end: sys.exit(9)
        time.sleep(0.01)
print("wlb step 5 | digest 0123456789abcdef\\nwlb step 6 | dig", end="", flush=True)
until("seen 5")
print("est 0123456789abcdef", flush=True)
until("seen 6")
print("other", flush=True)
(pathlib.Path.cwd() / "seen 6").unlink()
until("seen 6")
print(repr(sys.stdin.read()), file=sys.stderr)
sys.exit(3)
"""


def test_the_last_step_of_a_turn_is_shown_while_it_runs(tmp_path, monkeypatch):
    """Also of a line that was read in two parts; what it prints and says of errors is in its log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(turns, "POLL", 0.01)
    shown = []

    def show(step):
        shown.append(step)
        (tmp_path / f"seen {step}").touch()

    assert turns.run_turn([sys.executable, "-c", HANDSHAKES], tmp_path / "log", show) == 3
    assert shown == sorted(shown) and {5, 6} <= {*shown} <= {0, 5, 6}
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["wlb step 6 | digest 0123456789abcdef", "other", "''"]


def test_a_turn_that_does_not_end_is_killed(tmp_path, monkeypatch):
    """With its process group, once its launcher has had time to end it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(turns, "POLL", 0.01)
    monkeypatch.setattr(turns, "PATIENCE", 0.5)
    code = "import os, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '600']).pid, flush=True)"

    def show(step):
        if step == 5:
            raise KeyError

    with pytest.raises(KeyError):
        turns.run_turn([sys.executable, "-c", f"{code}\n{HANDSHAKES}"], tmp_path / "log", show)
    processes, deadline = (tmp_path / "log").read_text().split()[:2], time.monotonic() + 60
    while any(map(alive, map(int, processes))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, map(int, processes))) and (tmp_path / "ended").exists()


def test_changes_are_told_once_and_micro_batches_if_they_are_fewer(tmp_path):
    (tmp_path / "log").write_text(
        "> wlb is on: all is the same\n> wlb: differs: one\n> wlb: differs: one\n> wlb: sets two\n> wlb: other: no\n"
        "> wlb: without a mask: three\n"
    )
    of = SimpleNamespace(arguments={"global_batch_size": 8, "micro_batch_size": 2})
    turn, entries = turns.Turn(number=2, side=1, log=tmp_path / "log", seconds=1.0, run=of), {}
    assert [*report._changes([turn])] == ["All is the same.", "Differs: one.", "Sets two.", "Without a mask: three."]
    (said,) = report._fewer(turn, SimpleNamespace(num_micro_batches=3), entries)
    assert said.startswith("A step has 4 micro-batches without --wlb and 3 with it")
    assert entries["micro_batches"] == [4, 3]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([1e-5, None, 3e-5], "Losses with --wlb and without differ by up to 3.0e-05 of their value."),
        ([0.0], "Losses with --wlb and without differ by up to 0.0e+00 of their value."),
        ([None], "Losses are not compared: no step has a finite one on both sides."),
    ],
)
def test_the_largest_difference_of_losses_is_told(losses, said):
    assert report._losses([], [report._Pair((), 1.0, 0.0, each) for each in losses], {}) == said


def test_every_turn_that_ended_is_a_line_of_its_side():
    turn = {"wlb": False, "steps": [[3, 800.0, 1], [4, 900.0, 1]]}
    ran = [turn, {"wlb": True, "steps": [[3, 700.0, 1], [4, 600.0, 1]]}, {"wlb": False}, turn | {"wlb": True}]
    figure = Figure()
    page._draw(SimpleNamespace(entries={"turns": ran}), figure)
    (axes,) = figure.axes
    lines = [(line.get_color(), line.get_ydata().tolist()) for line in axes.lines]
    assert lines == [(BLUE, [800, 900]), (ORANGE, [700, 600]), (ORANGE, [800, 900])]
    assert [text.get_text() for text in figure.legends[0].texts] == ["without --wlb", "with --wlb"]
    assert axes.lines[0].get_xdata().tolist() == [3, 4] and axes.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("ratios", "errors", "tone", "said"),
    [
        ([1.1], [0.04], "gain", "--wlb is faster: 1.100 ± 0.040 times"),
        ([1.1], [0.06], "close", "Within noise: 1.100 ± 0.060 times"),
        ([0.9], [0.04], "loss", "--wlb is slower: 0.900 ± 0.040 times"),
        ([1.0, 1.2], [0.01, 0.01], "close", "Within noise: 1.100 ± 0.100 times"),
        ([1.0], [0.0], "close", "Within noise: 1.000 ± 0.000 times"),
    ],
)
def test_nothing_within_two_standard_errors_is_called_faster(ratios, errors, tone, said):
    pairs = [report._Pair((), *each, None) for each in zip(ratios, errors, strict=True)]
    found = report._verdict(SimpleNamespace(mock=False), report._speed(pairs), len(pairs), "4 x H100")
    assert found[0] == tone and found[1].startswith(said)
