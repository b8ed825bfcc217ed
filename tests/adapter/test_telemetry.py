"""What a run writes beside what upstream writes: its log, TensorBoard, W&B, names in a trace."""

import gzip
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_wlb.cli.main import main
from tests.adapter.training import train

PP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2".split()
FLAGS = "--optimizer adam --lr 1e-3 --train-iters 4".split()


@pytest.mark.parametrize(("size", "flags"), [(1, []), (4, PP2)])
def test_scalars_of_tensorboard_are_those_of_the_log(size, flags, dataset, tmp_path):
    board = tmp_path / "board"
    run = train(size, dataset, *flags, *FLAGS, "--tensorboard-dir", str(board), log=tmp_path / "log.jsonl")
    events = EventAccumulator(str(board), size_guidance={"histograms": 0}).Reload()
    found = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if tag.startswith("wlb/")}

    def of_log(name):
        return pytest.approx([entry[name] for entry in run["log"]], rel=1e-6)

    assert found["wlb/tokens"] == of_log("tokens")
    assert found["wlb/micro-batches"] == of_log("num_micro_batches") == [8] * 4
    assert found["wlb/imbalance"] == of_log("imbalance")
    assert found["wlb/imbalance-original"] == of_log("imbalance_original")
    assert found["wlb/delay-mean"] == of_log("delay_mean_steps")
    assert found["wlb/delay-max"] == of_log("delay_max_steps")
    assert found["wlb/waiting-documents"] == of_log("waiting_documents")
    assert [1e3 * seconds for seconds in found["wlb/step-time"]] == of_log("step_ms")
    assert len(found["wlb/step-time-predicted"]) == 3  # the first step says how fast the machine is
    assert all(0 < seconds < math.inf for seconds in found["wlb/step-time-predicted"])
    assert all(value >= 1 for value in found["wlb/imbalance-measured"])
    assert len(found["wlb/imbalance-measured"]) == 4
    assert found["wlb/sharding-whole"] == [1.0] * 4
    for event, entry in zip(events.Histograms("wlb/delay"), run["log"], strict=True):
        counts = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
        assert counts == {float(steps): tokens for steps, tokens in entry["delays_tokens"].items()}


def test_nothing_is_written_or_measured_without_a_writer(dataset, tmp_path, monkeypatch):
    from megatron_wlb.adapter import telemetry

    monkeypatch.setattr(telemetry, "_now", lambda: pytest.fail("measured a pass"))
    train(1, dataset, *FLAGS)
    with pytest.raises(Exception, match="measured a pass"):
        train(1, dataset, *FLAGS, "--tensorboard-dir", str(tmp_path))


def test_the_interval_counts(dataset, tmp_path):
    train(1, dataset, *FLAGS, "--tensorboard-dir", str(tmp_path), "--tensorboard-log-interval", "2")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("wlb/tokens")] == [2, 4]


def test_wandb_gets_the_same(monkeypatch):
    from megatron_wlb.adapter import telemetry

    logged = []
    wandb = SimpleNamespace(
        log=lambda values, step: logged.append((values, step)), Histogram=lambda np_histogram: np_histogram
    )
    monkeypatch.setattr(telemetry, "get_wandb_writer", lambda: wandb)
    monkeypatch.setattr(telemetry, "get_tensorboard_writer", lambda: None)
    args = SimpleNamespace(tensorboard_log_interval=1, tensorboard_dir=None, wandb_project="p")
    micro_batch = SimpleNamespace(shards=SimpleNamespace(strategy="hybrid"))
    plan = SimpleNamespace(num_waiting=1, cost=10, delays={-1: 10, 2: 20}, micro_batches=[micro_batch])
    names = "tokens num_micro_batches imbalance imbalance_original delay_mean_steps delay_max_steps".split()
    telemetry.Telemetry(args).write(7, plan, dict.fromkeys([*names, "plan_wait_ms", "step_ms"], 1.0), 1.25)
    ((values, step),) = logged
    assert step == 7
    assert values["wlb/imbalance-measured"] == 1.25
    assert values["wlb/sharding-hybrid"] == 1.0
    counts, edges = values["wlb/delay"]
    assert np.array_equal(counts, [10, 0, 0, 20])
    assert np.array_equal(edges, [-1, 0, 1, 2, 3])


def test_a_trace_of_upstreams_profiler_names_the_micro_batches(dataset, tmp_path):
    flags = "--context-parallel-size 2 --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3"
    board, log = tmp_path / "board", tmp_path / "log.jsonl"
    run = train(2, dataset, *FLAGS, *flags.split(), "--tensorboard-dir", str(board), log=log)
    events = json.loads(gzip.decompress((tmp_path / "torch_profile/rank-0.json.gz").read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e["name"].startswith("wlb")}
    padded = [-(-m["tokens"] // 4) * 4 for m in run["log"][1]["micro_batches"]]  # upstream counts from 1
    assert names == {f"wlb train step 1: {tokens // 2} of {tokens} tokens" for tokens in padded}


@pytest.mark.parametrize(("size", "flags"), [(1, ""), (4, "--pipeline-model-parallel-size 2 --wlb-packing original")])
def test_the_log_is_what_compare_reads(size, flags, dataset, tmp_path):
    path, out = tmp_path / "log.jsonl", tmp_path / "compared.json"
    entries = train(size, dataset, *flags.split(), "--train-iters", "3", log=path)["log"]
    for entry in entries:
        assert sum(map(sum, entry["lengths"])) == entry["tokens"]
        assert len(entry["lengths"]) == len(entry["work"]) == 8
    assert main(["compare", str(path), "--json", str(out)]) == 0
    compared = json.loads(out.read_text())
    assert compared["job"]["parallel"] == entries[0]["job"]["parallel"]
    assert compared["job"]["parallel"]["dp"] == (2 if size > 1 else 1)
    assert [s["step"] for s in compared["steps"]] == [2, 3]
    assert [s["measured_us"] for s in compared["steps"]] == pytest.approx([1e3 * e["step_ms"] for e in entries[1:]])
