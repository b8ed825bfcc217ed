"""Logs of runs whose times, tokens and losses are known, compared with each other and with predictions; broken logs are
refused."""

import json
import re

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_wlb.cli import run_log
from megatron_wlb.cli.main import main
from tests.cli.analyses import printed
from tests.cli.commands import refusal
from tests.jobs import job

STEPS, GPUS, WINDOWS, WINDOW = 70, 4, 8, 128
TOKENS = WINDOWS * WINDOW
RNG = np.random.default_rng(3)
SLOW = RNG.uniform(0.9, 1.1, STEPS)
FAST = SLOW / 1.25 * RNG.uniform(0.98, 1.02, STEPS)
LOSSES = np.linspace(9, 5, STEPS)
JOB = job(dp=2, pp=2, context_length=WINDOW).to_json()
DEVICE = "NVIDIA H100 80GB HBM3"


def entry(number=1, seconds=1.0, loss=2.5, **more):
    """A line as a run writes it, as far as it is read."""
    return {"step": number, "step_ms": 1e3 * float(seconds), "tokens": TOKENS, "loss": float(loss), "job": JOB} | more


def step_log(path, seconds, losses=LOSSES, first=1, **more):
    pairs = enumerate(zip(seconds, losses, strict=False), start=first)
    return write(path, [entry(number, *each, **more) for number, each in pairs])


def write(path, entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def text_log(path, seconds, interval=1, prefix="", **more):
    """A log as Megatron 0.19 prints it: its first line of a start is cleared only with the second."""
    lines = printed(
        {"num_layers": JOB["model"]["num_layers"], "world_size": GPUS, "seq_length": WINDOW, "log_interval": interval}
        | more
    ).splitlines()
    for last in sorted({1, *range(interval, len(seconds) + 1, interval)}):
        begin = max(0, last - interval) if last > max(2, interval) else 0
        ms, loss = 1e3 * np.mean(seconds[begin:last]), np.mean(LOSSES[begin:last])
        lines.append(
            f"{prefix} [2026-11-20 10:00:00.000000] iteration {last:8d}/{STEPS:8d} | "
            f"consumed samples: {WINDOWS * last:12d} | elapsed time per iteration (ms): {ms:.1f} | "
            f"learning rate: 1.0E-04 | global batch size: {WINDOWS:5d} | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | number of skipped iterations:   0 |"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def board(path, seconds, losses=LOSSES, first=1, **more):
    """What Megatron writes with --log-timers-to-tensorboard and a step log of every tenth step."""
    writer = EventFileWriter(str(path))
    for name, value in {"world_size": GPUS, "seq_length": WINDOW, "global_batch_size": WINDOWS, **more}.items():
        text = TensorProto(dtype="DT_STRING", string_val=[str(value).encode()], tensor_shape={"dim": [{"size": 1}]})
        tag = Summary.Value(tag=f"{name}/text_summary", tensor=text, metadata={"plugin_data": {"plugin_name": "text"}})
        writer.add_event(Event(step=first - 1, summary=Summary(value=[tag])))
    for number, loss in enumerate(losses, start=first):
        values = {"lm loss": loss}
        if number % 10 == 0:
            values["iteration-time"] = np.mean(seconds[number - first - 9 : number - first + 1])
        tags = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.add_event(Event(step=number, summary=Summary(value=tags)))
    writer.close()
    return path


def compared(tmp_path, *words):
    out = tmp_path / "out.json"
    assert main(["compare", *map(str, words), "--json", str(out)]) == 0
    return json.loads(out.read_text())


KINDS = {
    "step log": (step_log, 1e-9),
    "text": (text_log, 1e-3),
    "text of every tenth step": (lambda *each: text_log(*each, interval=10), 1e-3),
    "board": (board, 1e-6),
}


@pytest.mark.parametrize("base", KINDS)
@pytest.mark.parametrize("ran", KINDS)
def test_logs_of_all_kinds_give_the_same_ratio(base, ran, tmp_path, capsys):
    """Of steps 11 to 70: times, tokens and losses are what was written, in pieces that both logs have."""
    logs = [KINDS[kind][0](tmp_path / name, each) for kind, name, each in ((base, "base", SLOW), (ran, "ran", FAST))]
    found = compared(tmp_path, *logs)
    warm = slice(10, None)
    assert found["ratio"] == pytest.approx(SLOW[warm].sum() / FAST[warm].sum(), rel=1e-3)
    assert found["loss_difference"] < 1e-6
    for rows, seconds, kind in zip(found["steps"], (SLOW, FAST), (base, ran), strict=True):
        counts = np.array(rows)[:, 1]
        assert counts.sum() == STEPS - 10 and set(counts) == {1 if {base, ran} <= {"step log", "text"} else 10}
        tolerance = {"rel": KINDS[kind][1], "abs": 1e-9}
        assert np.array(rows)[:, 2].sum() == pytest.approx(seconds[warm].sum(), **tolerance)
        assert np.array(rows)[:, 3].sum() == (STEPS - 10) * TOKENS
    said = capsys.readouterr().out
    assert re.search(r"^RUN is faster: 1\.2\d\d ± 0\.00\d times BASE's tokens per second and GPU\.", said)
    assert "Losses are equal to" in said
    assert ("Only Megatron's times" in said) == ((base == "step log") != (ran == "step log"))


def test_the_error_is_that_of_the_mean_over_blocks(tmp_path):
    found = compared(tmp_path, step_log(tmp_path / "a", SLOW), step_log(tmp_path / "b", FAST))
    a, b = (np.reshape(each[10:], (20, 3)).sum(axis=1) for each in (SLOW, FAST))
    ratio = a.sum() / b.sum()
    assert found["error"] == pytest.approx(np.std(a - ratio * b, ddof=1) / np.sqrt(20) / b.mean())
    assert found["paired"] is True


def test_runs_of_other_steps_are_compared_without_pairs(tmp_path, capsys):
    found = compared(tmp_path, step_log(tmp_path / "a", SLOW), step_log(tmp_path / "b", FAST, first=500))
    assert found["paired"] is False and "loss_difference" not in found
    assert found["error"] > 2 * compared(tmp_path, tmp_path / "a", step_log(tmp_path / "b", FAST))["error"]
    assert "no step in common" in capsys.readouterr().out


def test_a_run_on_more_gpus_counts_by_gpu(tmp_path):
    more = step_log(tmp_path / "b", SLOW / 2, job=job(dp=4, pp=2).to_json())
    assert compared(tmp_path, step_log(tmp_path / "a", SLOW), more)["ratio"] == pytest.approx(1)


def test_nothing_certain_is_not_called_faster(tmp_path, capsys):
    noise = SLOW * np.random.default_rng(0).permuted(np.repeat((0.9, 1.1), STEPS // 2))
    compared(tmp_path, step_log(tmp_path / "a", SLOW), step_log(tmp_path / "b", noise))
    assert capsys.readouterr().out.startswith("Within noise: RUN has ")
    compared(tmp_path, tmp_path / "a", step_log(tmp_path / "b", 1.1 * SLOW))
    assert capsys.readouterr().out.startswith("RUN is slower: 0.909 ± 0.000 times")
    found = compared(tmp_path, tmp_path / "a", step_log(tmp_path / "b", noise))
    for errors, said in ((1.7, "Within noise: RUN has "), (2.3, "RUN is faster: ")):
        times = noise * found["ratio"] / (1 + errors * found["error"])
        capsys.readouterr()
        compared(tmp_path, tmp_path / "a", step_log(tmp_path / "b", times))
        assert capsys.readouterr().out.startswith(said)


def test_where_losses_part_is_told(tmp_path, capsys):
    losses = LOSSES.copy()
    losses[29:] *= 1.01
    losses[49] *= 1.05
    found = compared(tmp_path, step_log(tmp_path / "a", SLOW), step_log(tmp_path / "b", FAST, losses))
    assert found["losses_part_at"] == 30 and found["loss_difference"] == pytest.approx(0.0605)
    said = "Losses diverge at step 30: 7.31884 and 7.39203, by 1.00%; at most by 6.05%, at step 50."
    assert said in capsys.readouterr().out
    diverged = [entry(i, seconds, loss) for i, (seconds, loss) in enumerate(zip(SLOW, LOSSES, strict=True), start=1)]
    for step in diverged[29:]:
        step["loss"] = None  # as --wlb-log has what is no number
    compared(tmp_path, tmp_path / "a", write(tmp_path / "c", diverged))
    said = capsys.readouterr().out
    assert said.startswith("RUN's loss is not finite from step 30 on.\n")
    left = (
        "Losses are equal to 0.0e+00 at 19 of them. Not compared: 41 that were skipped, or have no finite loss in both."
    )
    assert left in said


def test_the_first_steps_of_every_start_are_left_out(tmp_path):
    """What ran twice counts once, as it ran last."""
    numbers = [*range(1, 21), *range(15, 31)]
    path = write(tmp_path / "a", [entry(n, 1 + i / 100) for i, n in enumerate(numbers)])
    found = compared(tmp_path, path, path, "--skip", "4")
    assert [row[0] for row in found["steps"][0]] == [*range(5, 31)]
    last = {n: 1 + i / 100 for i, n in enumerate(numbers) if i < 20 or i >= 24}
    assert [row[2] for row in found["steps"][0]] == pytest.approx([last[n] for n in range(5, 31)])
    again = [entry(n) | {"loss": None if i in range(14, 20) else 2.5} for i, n in enumerate(numbers)]
    found = compared(tmp_path, path, write(tmp_path / "again", again), "--skip", "4")
    assert not [said for said in found["words"] if "not finite" in said]
    text = text_log(tmp_path / "b", SLOW)
    text.write_text(text.read_text() + text.read_text())
    assert [row[0] for row in compared(tmp_path, text, text)["steps"][0]] == [*range(11, 71)]
    resumed = board(tmp_path / "c", SLOW, first=1001)
    found = compared(tmp_path, resumed, resumed, "--skip", "20")
    assert [row[0] for row in found["steps"][0]] == [*range(1030, 1071, 10)]


def test_prefixes_and_broken_lines_do_no_harm(tmp_path):
    """Of torchrun --tee, of two processes that write at once, and of a line that is lost."""
    log = text_log(tmp_path / "a", SLOW, prefix="[default7]:")
    lines = log.read_text().splitlines()
    lines[-3] = lines[-3].replace("global batch size", "global[rank 3] what")
    del lines[-5]
    log.write_text("\n".join(lines))
    assert [row[:2] for row in compared(tmp_path, log, log)["steps"][0]][-4:] == [[65, 1], [67, 1], [69, 1], [70, 1]]
    before = compared(tmp_path, log, log)["steps"][0]
    log.write_text("\n".join([*lines[:-1], f"{lines[-1]} lm loss: inf | {lines[-2]}"]))
    assert compared(tmp_path, log, log)["steps"][0] == before
    log.write_text("\n".join([*lines[:-1], re.sub(r"lm loss: \S+", "lm loss: inf", lines[-1])]))
    assert "Infinity" not in json.dumps(compared(tmp_path, log, log))


def test_predictions_are_those_of_the_run(tmp_path, capsys):
    """Shares are compared on the steps of which the run told its own; what it could not tell is a dash."""
    shares = {"busy": 0.5, "bubble": 0.3, "exchange": 0.1, "waiting": 0.1}
    lines = [entry(1 + i, s, predicted_ms=800 * s, device=DEVICE, predicted=shares) for i, s in enumerate(SLOW)]
    lines[30]["measured"] = shares | {"busy": 0.4, "exchange": None}
    found = compared(tmp_path, write(tmp_path / "run.jsonl", lines))
    assert (found["error_median"], found["error_p90"]) == pytest.approx((0.2, 0.2))
    assert found["correlation"] == pytest.approx(1) and len(found["steps"]) == STEPS - 10
    said = capsys.readouterr().out
    assert re.search(r"^busy, % of a step +40\.0 +50\.0$", said, re.M)
    assert re.search(r"^exchange, % of a step +- +10\.0$", said, re.M)


def test_predictions_leave_out_the_first_steps_of_every_start(tmp_path, capsys):
    told = {"predicted_ms": 800, "device": DEVICE}
    log = write(tmp_path / "run.jsonl", [entry(number, **told) for number in (*range(1, 41), *range(31, 61))])
    assert [number for number, *_ in compared(tmp_path, log)["steps"]] == [*range(11, 41), *range(41, 61)]


def test_a_profile_of_another_device_is_refused(tmp_path, capsys):
    profile = JOB["profile"] | {"name": "h100-cudnn", "device": "NVIDIA H100"}
    of_job = JOB | {"profile": profile}

    def ran_on(device):
        return step_log(tmp_path / "run", SLOW, predicted_ms=3.0, device=device, job=of_job)

    profile["name"] = "[red]\x1bh100"
    compared(tmp_path, ran_on(DEVICE))
    assert "profile [red] h100." in capsys.readouterr().out
    profile["name"] = "h100-cudnn"
    for device in ("one thread of an x86_64 CPU", "NVIDIA A100-SXM4-80GB"):
        said = refusal(capsys, "compare", str(ran_on(device)))
        assert f"ran on {device}, and profile h100-cudnn is of NVIDIA H100; give the run --wlb-profile" in said
    said = refusal(capsys, "compare", str(step_log(tmp_path / "run", SLOW)))
    assert "has 0 predicted steps after --skip 10; give the run --wlb-profile with the output of `megatron" in said


GOOD = entry()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "LOG has no arguments as Megatron prints them"),
        ([], "LOG has no arguments as Megatron prints them"),
        ([GOOD] * 2, "LOG has 0 steps to compare; give longer logs, or a smaller --skip"),
        ([GOOD, json.dumps(GOOD)[:20]], "LOG, line 2: JSON is malformed: invalid character (byte 20); give the file"),
        ([json.dumps(GOOD)[:-1] + ', "new": ' + "[" * 100_000], "line 1: "),
        ([{"step": 1, "work": [3]}], "line 1: Object missing required field `step_ms`"),
        ([GOOD | {"step_ms": -1}], "line 1: Expected `float` > 0.0 - at `$.step_ms`"),
        ([GOOD | {"step_ms": 1e12}], "line 1: Expected `float` < 1000000000000.0 - at `$.step_ms`"),
        ([GOOD | {"tokens": 0}], "line 1: Expected `int` >= 1 - at `$.tokens`"),
        ([GOOD | {"job": 3}], "line 1: Expected `object`, got `int` - at `$.job`"),
        ([GOOD | {"step": -1}], "`int` >= 1 - at `$.step`"),
        ([GOOD, entry(2, job=job(dp=4, pp=2).to_json())], "LOG is of runs on other numbers of GPUs; give the lines of"),
    ],
)
def test_broken_logs_are_refused(lines, message, tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", lines)
    error = refusal(capsys, "compare", str(path), str(path), "--json", str(tmp_path / "times.json"))
    assert message.replace("LOG", str(path)) in error
    assert list(tmp_path.iterdir()) == [path]


def test_logs_without_times_are_refused(tmp_path, capsys):
    log = text_log(tmp_path / "a", SLOW)
    log.write_text("\n".join(line for line in log.read_text().splitlines() if "iteration" not in line))
    assert "a has no line of an iteration; give Megatron's output" in refusal(capsys, "compare", str(log), str(log))
    folder = board(tmp_path / "board", SLOW[:9], LOSSES[:9])
    assert "add --log-timers-to-tensorboard to the run" in refusal(capsys, "compare", str(folder), str(folder))
    once = text_log(log, SLOW).read_text()
    log.write_text(once + once.replace(f" {GPUS}\n", " 16\n"))
    said = refusal(capsys, "compare", str(log), str(log))
    assert "is of runs with world_size 16 and 4; give each as a file of its own" in said
    assert "4 logs; give BASE and RUN" in refusal(capsys, "compare", "a", "b", "c", "d")


def test_padded_windows_are_not_compared_with_tokens(tmp_path, capsys):
    padded = text_log(tmp_path / "a", SLOW, sft=True)
    said = refusal(capsys, "compare", str(padded), str(step_log(tmp_path / "b", FAST)))
    assert "a does not say how many tokens its steps trained, as" in said
    compared(tmp_path, padded, board(tmp_path / "board", SLOW, sft=True))
    assert "padding counts" in capsys.readouterr().out


def test_a_line_without_end_is_not_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_log, "MOST_OF_A_STEP", 99)
    path = write(tmp_path / "run.jsonl", [GOOD])
    assert "line 1 has over 0 MiB, the limit; give the file" in refusal(capsys, "compare", str(path))


def edited(path, edit, **more):
    """A text log with every second line, or later ones, edited."""
    log = text_log(path, SLOW, **more)
    lines = log.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "iteration" in line)
    log.write_text("\n".join(edit(i - first + 1, line) if i >= first else line for i, line in enumerate(lines)))
    return log


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (lambda i, line: line if i < 31 else re.sub(r"lm loss: \S+", "lm loss: NAN", line), "from step 31 on"),
        (lambda i, line: line if i < 31 else re.sub(r"lm loss: \S+", "lm loss: INF", line), "from step 31 on"),
        (lambda i, line: line if i < 31 else re.sub(r"lm loss: \S+ \|", "", line), "from step 31 on"),
        (lambda i, line: re.sub(r"lm loss: \S+", "lm loss: NAN", line), "from step 1 on"),
        (lambda i, line: re.sub(r"lm loss: \S+", "lm loss: NAN", line) if i % 2 else line,
         "at 35 of 70 steps, first at step 1"),
    ],
)  # fmt: skip
def test_losses_that_are_no_number_are_said_first(edit, where, tmp_path, capsys):
    compared(tmp_path, text_log(tmp_path / "a", SLOW), edited(tmp_path / "b", edit))
    assert capsys.readouterr().out.startswith(f"RUN's loss is not finite {where}.\n")
    compared(tmp_path, edited(tmp_path / "b", edit), tmp_path / "a")
    assert capsys.readouterr().out.startswith(f"BASE's loss is not finite {where}.\n")


@pytest.mark.parametrize("why", ["skipped", "nan"])
def test_skipped_steps_train_no_token(why, tmp_path, capsys):
    """Megatron prints no loss for them, or 0; that they are fast is no gain."""

    def skip(i, line):
        if i % 2:
            return line
        line = line.replace("number of skipped", f"number of nan iterations: {why == 'nan':d} | number of skipped")
        line = line.replace("skipped iterations:   0", f"skipped iterations:   {why == 'skipped':d}")
        return re.sub(r"lm loss: \S+", "lm loss: 0.0E+00", line)

    found = compared(tmp_path, text_log(tmp_path / "a", SLOW), edited(tmp_path / "b", skip))
    said = capsys.readouterr().out
    assert found["ratio"] == pytest.approx(0.5, rel=1e-2) and found["loss_difference"] == 0
    assert "- RUN: 30 of its steps were skipped: they took time and trained no token.\n" in said
    assert "at 30 of them. Not compared: 30 that were skipped" in said and "part at" not in said
    every = edited(tmp_path / "b", lambda i, line: line.replace("iterations:   0", "iterations:   1"))
    assert "b trained no token in 60 steps: all were skipped" in refusal(
        capsys, "compare", str(tmp_path / "a"), str(every)
    )


def test_lines_of_several_steps_count_those_that_trained(tmp_path):
    """Of 4 steps, of which 3 were skipped of which 2 gave no number; and of 4, of which more were skipped than it has.

    Without arguments a line has the steps that most lines have, here 4, where the one before is not nearer.
    """
    fields = "elapsed time per iteration (ms): 500 | global batch size: 8 | lm loss: {} | "
    fields += "number of skipped iterations: {} | number of nan iterations: {} |"
    lines = [(4, 2.5, 0, 0), (8, 2.5, 3, 2), (12, "NAN", 9, 0), *((last, 2.5, 0, 0) for last in (16, 17, 30))]
    log = tmp_path / "log"
    log.write_text("".join(f"iteration {last}/ 99 | {fields.format(*rest)}\n" for last, *rest in lines))
    tokens = WINDOWS * WINDOW
    rows = [(8, 4, 2, tokens, 2.5, 1), (12, 4, 2, 0, 0, 0), (16, 4, 2, 4 * tokens, 10, 4)]
    rows += [(17, 1, 0.5, tokens, 2.5, 1), (30, 4, 2, 4 * tokens, 10, 4)]
    assert run_log.read(str(log), 1, GPUS, WINDOW).steps.tolist() == [list(row) for row in rows]


def test_skipped_steps_of_a_step_log_train_no_token(tmp_path, capsys):
    steps = [entry(i, SLOW[i - 1], LOSSES[i - 1], skipped=i % 2 == 0) for i in range(1, STEPS + 1)]
    base = step_log(tmp_path / "a", SLOW, skipped=False)
    found = compared(tmp_path, base, write(tmp_path / "b", steps))
    said = capsys.readouterr().out
    assert found["ratio"] == pytest.approx(0.5, rel=2e-2) and found["loss_difference"] == 0
    assert "- RUN: 30 of its steps were skipped: they took time and trained no token.\n" in said
    assert "earlier release" not in said
    compared(tmp_path, step_log(tmp_path / "short", SLOW[:40], skipped=False), tmp_path / "b")
    assert "- RUN: 15 of its steps were skipped" in capsys.readouterr().out
    compared(tmp_path, base, step_log(tmp_path / "c", SLOW))
    assert "- RUN: 70 of its steps, of an earlier release, do not say if they were" in capsys.readouterr().out


def test_what_runs_differ_in_is_named(tmp_path, capsys):
    """And with another model, other data or another seed nothing is compared in pairs."""
    base = text_log(tmp_path / "a", SLOW, lr=1e-4, recompute_granularity=None, seed=1, data_path=["x"], save="s")
    other = text_log(tmp_path / "b", FAST, lr=2e-4, recompute_granularity="full", seed=1, data_path=["x"], save="t")
    found = compared(tmp_path, base, other)
    said = capsys.readouterr().out
    assert "- The runs differ also in: lr 0.0001 and 0.0002, recompute_granularity None and full.\n" in said
    assert found["paired"] and found["differ"].keys() == {"lr", "recompute_granularity"}
    same = {"lr": 1e-4, "recompute_granularity": None, "save": "s"}
    for more in ({"seed": 2, "data_path": ["x"]}, {"seed": 1, "data_path": ["y"]}):
        found = compared(tmp_path, base, text_log(tmp_path / "b", FAST, **same, **more))
        said = capsys.readouterr().out
        assert not found["paired"] and "loss_difference" not in found and "differ also in: " in said
        assert "Not compared in pairs, and no losses: steps train another model or data (" in said
    wider = JOB | {"model": JOB["model"] | {"hidden_size": 1 << 12}}
    compared(tmp_path, step_log(tmp_path / "c", SLOW), step_log(tmp_path / "d", FAST, job=wider))
    assert f"hidden_size {JOB['model']['hidden_size']} and 4096." in capsys.readouterr().out
    with_wlb = text_log(tmp_path / "b", FAST, **same, seed=1, data_path=["x"], wlb=True, micro_batch_size=1)
    text_log(tmp_path / "a", SLOW, **same, seed=1, data_path=["x"], wlb=False, micro_batch_size=2)
    assert compared(tmp_path, tmp_path / "a", with_wlb)["differ"] == {}


def test_what_wlb_sets_and_a_vocabulary_unpadded_in_one_log_are_no_difference():
    """Between two runs with or without --wlb, what it sets is one."""
    base, ran = {"padded_vocab_size": None, "calculate_per_token_loss": False}, {"padded_vocab_size": 8, "wlb": True}
    ran["calculate_per_token_loss"] = True
    assert run_log.differences(base, ran) == {}
    base["padded_vocab_size"], base["wlb"] = 16, True
    expected = {"padded_vocab_size": ("16", "8"), "calculate_per_token_loss": ("False", "True")}
    assert run_log.differences(base, ran) == expected


def test_a_step_log_that_leaps_ahead_starts_anew(tmp_path):
    log = write(tmp_path / "a", [entry(number, skipped=False) for number in (1, 2, 3, 7, 8)])
    assert run_log.read(str(log), 1).steps[:, 0].tolist() == [2, 3, 8]


def test_what_is_left_out_is_said(tmp_path, capsys):
    base = text_log(tmp_path / "a", SLOW)
    compared(
        tmp_path, base, edited(tmp_path / "b", lambda i, line: line if i % 2 else line.replace("elapsed", "ela[rank"))
    )
    said = capsys.readouterr().out
    assert "- RUN: 35 lines of iterations are broken, and left out: iteration 2 | " in said
    assert "- BASE: 30 of its steps are left out: the other log does not have them." in said
    tens, fewer = text_log(tmp_path / "tens", SLOW, interval=10), text_log(tmp_path / "fewer", SLOW[:40], interval=10)
    compared(tmp_path, fewer, tens)
    assert "- RUN: 30 of its steps are left out: the other log does not have them." in capsys.readouterr().out
    again = tmp_path / "c"
    again.write_text(base.read_text() + "\n".join(base.read_text().splitlines()[-30:]))
    compared(tmp_path, base, again)
    assert "- RUN: 30 of its steps ran twice; the later time counts." in capsys.readouterr().out
    again.write_text(base.read_text() + base.read_text().replace("num_layers", "lr ...... 1\n  num_layers"))
    restarted = text_log(tmp_path / "d", SLOW, lr=1).read_text() + text_log(tmp_path / "d", SLOW, lr=2).read_text()
    again.write_text(restarted)
    compared(tmp_path, base, again)
    assert "- RUN: its starts differ in lr." in capsys.readouterr().out
    again.write_text(base.read_text().replace("elapsed time", "time"))
    assert "this line cannot be read: iteration 1 |" in refusal(capsys, "compare", str(again), str(base))


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: re.sub(r"(\(ms\): )(\S+)", r"\1\2/999.0", text).replace(" [2026", "[rank-7/8] : [2026"),  # Primus
        lambda text: "\n".join(line.split("] ")[-1].strip() for line in text.splitlines()),
        lambda text: "".join(json.dumps({"log": f"{line}\n", "stream": "stdout"}) + "\n" for line in text.splitlines()),
        lambda text: text.replace("iteration       30", "\0" * 5000 + "iteration       30"),
        lambda text: "\0" * 999 + text,
    ],
)
def test_logs_of_other_writers(edit, tmp_path):
    base, ran = text_log(tmp_path / "a", SLOW), text_log(tmp_path / "b", FAST)
    ratio = compared(tmp_path, base, ran)["ratio"]
    for log in (base, ran):
        log.write_text(edit(log.read_text()))
    assert compared(tmp_path, base, ran)["ratio"] == pytest.approx(ratio)


def test_a_log_without_arguments_needs_its_sizes(tmp_path, capsys):
    base = text_log(tmp_path / "a", SLOW, interval=10)
    bare = tmp_path / "b"
    bare.write_text("model:\n  num_layers: 4\n" + base.read_text().split("end of arguments")[1])
    assert "or give --num-gpus and --seq-length beside it" in refusal(capsys, "compare", str(bare), str(bare))
    sizes = ["--num-gpus", str(GPUS), "--seq-length", str(WINDOW)]
    assert compared(tmp_path, bare, bare, *sizes)["steps"] == compared(tmp_path, base, base)["steps"]
    capsys.readouterr()
    said = refusal(capsys, "compare", str(base), str(base), "--num-gpus", "3")
    assert f"a has world_size {GPUS}, not 3; leave --num-gpus out" in said


def test_a_board_has_the_batch_of_every_step(tmp_path, capsys):
    """By what its starts say, or its own; those whose gradient has no norm were skipped."""
    base = board(tmp_path / "base", np.full(60, 0.1), np.ones(60))
    for sizes in ((8, 16), (16, 8)):
        folder = tmp_path / f"b{sizes[0]}"
        for first, size in zip((1, 31), sizes, strict=True):
            board(folder, np.full(30, size / 80), np.ones(30), first=first, global_batch_size=size)
            (written,) = (path for path in folder.iterdir() if not path.name.endswith("of"))
            written.rename(folder / f"events.out.tfevents.{first:02d}.of")  # names of one second have no order
        assert compared(tmp_path, base, folder)["ratio"] == pytest.approx(1)

    skipped = board(tmp_path / "c", np.full(60, 0.1), np.ones(60))
    writer = EventFileWriter(str(skipped), filename_suffix=".norms")
    for number in range(1, 61):
        tags = {"batch-size": 8} | ({"grad-norm": 1.0} if number % 2 else {})
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        writer.add_event(Event(step=number, summary=Summary(value=values)))
    writer.close()
    assert compared(tmp_path, base, skipped)["ratio"] == pytest.approx(0.5)
    assert "- RUN: 25 of its steps were skipped" in capsys.readouterr().out

    ours = board(tmp_path / "d", np.full(60, 0.1), np.ones(60))
    writer = EventFileWriter(str(ours), filename_suffix=".wlb")
    for number in range(1, 61):
        tags = {"step_ms": 100.0, "tokens": TOKENS, "skipped": 1 - number % 2}
        values = [Summary.Value(tag=f"wlb/{tag}", simple_value=value) for tag, value in tags.items()]
        writer.add_event(Event(step=number, summary=Summary(value=values)))
    writer.close()
    assert compared(tmp_path, base, ours)["ratio"] == pytest.approx(0.5)
    assert "- RUN: 25 of its steps were skipped" in capsys.readouterr().out
