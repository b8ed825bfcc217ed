"""Interrupted and resumed equals uninterrupted: the same documents, losses and parameters, to the bit."""

import functools
import itertools
import os
import re

import numpy as np
import pytest
import torch

from megatron_wlb.adapter.plans import state_path
from megatron_wlb.adapter.training import Training
from megatron_wlb.describe.refusals import REFUSED
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan import document_log, state
from tests.adapter import training
from tests.adapter.audit import audit
from tests.adapter.datasets import write_dataset
from tests.adapter.training import (
    ADAM,
    CP2,
    GQA,
    LATENT,
    MTP,
    PP2,
    QUERY_LATENT,
    SINKS,
    TP2,
    VPP2,
    entries,
    full,
    train,
)

EXACT = ("step", "digest", "loss", "tokens", "imbalance", "imbalance_original", "delays_tokens", "work")
SCHEDULE = "--step-batch-size-schedule 0:4,2048:8"
"""Where the run is cut, the batch grows."""


@pytest.mark.parametrize(
    ("size", "flags", "packing"),
    [
        (1, "", "wlb"),
        (1, SCHEDULE, "adaptive"),
        (2, f"{PP2} --non-persistent-save-interval 2 --non-persistent-ckpt-type global --save-interval 9", "adaptive"),
        (4, f"{TP2} {PP2} {MTP} {SINKS} {LATENT} {QUERY_LATENT} --num-layers 2", "adaptive"),
        *(full(4, f"{CP2} {VPP2}", packing) for packing in ("wlb", "original", "adaptive", "fixed")),
    ],
)
def test_resumed_equals_uninterrupted(size, flags, packing, dataset, tmp_path):
    without = GQA if LATENT in flags else "--global-batch-size" if flags == SCHEDULE else ""
    train = functools.partial(training.train, without=without)
    common = [*flags.split(), *ADAM, *f"--wlb-packing {packing} --train-iters 3".split()]
    common += [] if flags == SCHEDULE else ["--wlb-micro-batches", "8"]
    whole = train(size, dataset, *common, log=tmp_path / "whole.jsonl")

    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2", "--wlb-log", str(tmp_path / "parts.jsonl")]
    with pytest.raises(RuntimeError, match="SystemExit"):  # upstream's way to stop
        train(size, dataset, *save, *common, "--exit-interval", "2")
    assert state.load(state_path(str(tmp_path / "ckpt"), 2))[0]["step"] == 2
    resumed = train(size, dataset, *save, *common, "--load", str(tmp_path / "ckpt"))

    log = entries(tmp_path / "parts.jsonl")
    assert [e["step"] for e in log] == [1, 2, 3]
    for part, reference in zip(log, whole["log"], strict=True):
        assert {k: part[k] for k in EXACT} == {k: reference[k] for k in EXACT}
    assert resumed["params"].keys() == whole["params"].keys()
    for name, parameter in whole["params"].items():
        assert torch.equal(resumed["params"][name], parameter), name


@pytest.mark.parametrize("packing", ["adaptive", full("wlb"), full("fixed"), full("original")])
def test_no_document_is_lost_or_doubled_when_layout_and_batch_size_change(packing, dataset, tmp_path):
    """Over the run as a whole, by the document log and what waits in the last checkpoint; starts say what is new.

    Where packing lets it, the number of micro-batches changes on its own.
    """
    fixed = POLICIES[packing].fixed_length
    windows, counts = ([4, 8, 6, 16],) * 2 if fixed else ([4, 8, 8, 16], [4, 16, 6, 8])
    log, checkpoint, prints = str(tmp_path / "documents"), str(tmp_path / "ckpt"), tmp_path / "prints"
    common = [*ADAM, "--wlb-packing", packing, "--wlb-document-log", log, "--save", checkpoint, "--load", checkpoint]
    common += "--save-interval 3 --override-opt-param-scheduler --wlb-max-tokens 640 --num-layers 2".split()
    layouts = [(1, ""), (4, PP2), (2, CP2), (2, "")]
    for part, ((size, flags), n, m) in enumerate(zip(layouts, windows, counts, strict=True), 1):
        flags += f" --global-batch-size {n} --wlb-micro-batches {m} --train-iters {3 * part}"
        train(size, dataset, *common, *flags.split(), prints=prints)
    changes = re.findall(
        r"> wlb: resumed at iteration (\d+) with \d+ documents waiting; changed: (.*)", prints.read_text()
    )
    expected = [
        "parallel.pp 1 -> 2, parallel.dp 1 -> 2",
        "parallel.cp 1 -> 2, parallel.pp 2 -> 1, parallel.dp 2 -> 1",
        "parallel.cp 2 -> 1, parallel.dp 1 -> 2",
    ]
    for name, sizes in (("num_micro_batches", counts), ("global_batch_size", windows)):
        for i, (before, now) in enumerate(itertools.pairwise(sizes)):
            expected[i] += f", {name} {before} -> {now}" * (before != now)
    for change, pipelined in ((0, "False -> True"), (1, "True -> False")):
        expected[change] += f", defer_weight_gradients {pipelined}"
    assert changes == [(str(3 * part), change) for part, change in enumerate(expected, 1)]
    rows = document_log.read(log)
    micro_batches = [len(np.unique(rows["micro_batch"][rows["step"] == step])) for step in range(12)]
    assert [max(part) for part in itertools.batched(micro_batches, 3)] == counts  # one may be empty
    found = audit(log, checkpoint, 12, [dataset])
    assert found.clean, found
    assert found.steps == 12


def test_the_latest_checkpoint_is_noted_at_once(dataset, tmp_path, monkeypatch):
    """Upstream empties its note before it writes it; killed in between, no run could resume."""
    checkpoint = tmp_path / "ckpt"
    save = [*ADAM, "--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "1", "--train-iters"]
    train(1, dataset, *save, "1")

    replace = os.replace

    def killed(temporary, path):
        if "latest" in str(path):
            raise KeyboardInterrupt
        replace(temporary, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            train(1, dataset, *save, "2", "--override-opt-param-scheduler")
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "1"
    train(1, dataset, *save, "2", "--override-opt-param-scheduler")
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_on_and_off_within_a_run(dataset, tmp_path):
    """Model, optimizer and iteration go on from a run without `--wlb` and back, whatever the order of documents."""
    ckpt = str(tmp_path / "ckpt")
    common = [*ADAM, *f"--load {ckpt} --save {ckpt} --save-interval 1 --data-cache-path {tmp_path / 'cache'}".split()]
    common += ["--override-opt-param-scheduler", "--train-iters"]
    train(1, dataset, *common, "1", wlb=False)
    on = train(1, dataset, *common, "2", "--wlb-restart-packing", log=tmp_path / "on.jsonl")
    scratch = train(1, dataset, *ADAM, "--train-iters", "1", log=tmp_path / "scratch.jsonl")
    assert [e["step"] for e in on["log"]] == [2]
    assert on["log"][0]["work"] == scratch["log"][0]["work"]  # the same documents
    assert on["log"][0]["loss"] < scratch["log"][0]["loss"]  # another model
    assert state.load(state_path(ckpt, 2))[0]["step"] == 2
    train(1, dataset, *common, "3", wlb=False)
    assert (tmp_path / "ckpt/latest_checkpointed_iteration.txt").read_text() == "3"
    assert not state_path(ckpt, 3).exists()


def test_flags_of_the_checkpoint_are_held_against_the_same_rules(dataset, tmp_path, monkeypatch):
    """`--use-checkpoint-args` overwrites what was given, and gives what was not; but no attention dropout."""
    experts = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64".split()
    for name, flags in (("dense", ["--attention-dropout", "0.1"]), ("moe", experts)):
        save = f"--save {tmp_path / name} --save-interval 9 --data-cache-path {tmp_path / 'cache'} --train-iters 1"
        train(1, dataset, *ADAM, *save.split(), *flags, wlb=False)
    load = [*ADAM, "--use-checkpoint-args", "--wlb-restart-packing", "--train-iters", "2", "--load"]
    load = ["--override-opt-param-scheduler", *load]
    with monkeypatch.context() as patched:
        patched.setitem(REFUSED, "num_experts", "is not supported; give no experts")
        with pytest.raises(RuntimeError, match="give no experts; flags of the checkpoint count, too"):
            train(1, dataset, *load, str(tmp_path / "moe"))
    train(1, dataset, *load, str(tmp_path / "moe"), log=tmp_path / "moe.jsonl")  # with alltoall, not the default

    configure = Training.configure

    def watched(run, built, ddp):
        assert built.transformer.attention_dropout == 0
        configure(run, built, ddp)

    monkeypatch.setattr(Training, "configure", watched)
    run = train(1, dataset, *load, str(tmp_path / "dense"), without="--seq-length", log=tmp_path / "log.jsonl")
    assert [e["step"] for e in run["log"]] == [2]


def test_resume_without_state_and_from_another_dataset_are_refused(dataset, tmp_path):
    documents = str(tmp_path / "documents")
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "1", "--wlb-document-log", documents]
    train(1, dataset, *ADAM, *save, "--train-iters", "1")
    load = [*ADAM, "--load", str(tmp_path / "ckpt"), "--train-iters", "2", "--override-opt-param-scheduler"]
    other = write_dataset(tmp_path / "other", seed=1, documents=300)
    with pytest.raises(RuntimeError, match="saved with another dataset 0 of the blend"):
        train(1, other, *load)
    save = ["--save", str(tmp_path / "again"), *save[2:]]
    run = train(1, other, *load, *save, "--wlb-restart-packing", log=tmp_path / "other.jsonl")
    fresh = train(1, other, *ADAM, "--train-iters", "1", log=tmp_path / "fresh.jsonl")
    assert [e["step"] for e in run["log"]] == [2]
    assert run["log"][0]["work"] == fresh["log"][0]["work"]
    found = audit(documents, tmp_path / "again", 2)
    assert found.clean and (found.restarts, found.first_step, found.steps) == (1, 1, 1)
    state_path(str(tmp_path / "ckpt"), 1).unlink()
    with pytest.raises(RuntimeError, match="there is no packer state .*by --wlb-restart-packing"):
        train(1, dataset, *load)
    (tmp_path / "again/iter_0000002.wlb.json").rename(state_path(str(tmp_path / "ckpt"), 1))
    with pytest.raises(RuntimeError, match="is of step 2, not of iteration 1; copy that one's"):
        train(1, dataset, *load)
