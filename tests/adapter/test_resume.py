"""Interrupted and resumed equals uninterrupted: the same samples, losses and parameters, to the bit."""

import functools
import json
import os
import re
from argparse import Namespace
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_wlb.adapter import plans
from megatron_wlb.adapter.plans import state_path
from megatron_wlb.adapter.training import Training
from megatron_wlb.describe.arguments import ARGUMENTS, Refused
from megatron_wlb.packing import state
from megatron_wlb.packing.adaptive import AdaptivePacking
from tests.adapter import training
from tests.adapter.training import (
    ADAM,
    CP2,
    GQA,
    LATENT,
    LINEAR,
    MAMBA,
    MTP,
    PP2,
    QUERY_LATENT,
    SINKS,
    TP2,
    VPP2,
    entries,
    full,
    large,
    train,
)
from tests.jobs import job, packer, samples

NON_PERSISTENT = "--non-persistent-save-interval 2 --non-persistent-ckpt-type global --save-interval 9"
EXACT = ("step", "plan", "loss", "tokens", "imbalance", "imbalance_original", "delay_mean_steps", "work")
SCHEDULE = "--step-batch-size-schedule 0:4,2048:8"
"""Where the run is cut, the batch grows."""


@pytest.mark.parametrize(
    ("size", "flags", "packing"),
    [
        (1, "", "paper:96,160"),
        (1, SCHEDULE, "adaptive"),
        (2, f"{PP2} {NON_PERSISTENT}", "adaptive:20"),
        (2, f"{PP2} {MTP} {SINKS} {LATENT} {QUERY_LATENT} --num-layers 2", "adaptive"),
        (2, f"{TP2} {LINEAR} --num-layers 2", "adaptive"),
        (2, f"{PP2} {MAMBA} M*|GM", "adaptive"),
        large(4, f"{TP2} {PP2} {MTP} {SINKS} {LATENT} {QUERY_LATENT} --num-layers 2", "adaptive"),
        large(4, f"{TP2} {PP2} {LINEAR} --num-layers 2", "adaptive"),
        large(4, f"{CP2} {PP2} {MAMBA} M*|GM", "adaptive"),
        *(full(4, f"{CP2} {VPP2}", packing) for packing in ("paper:96,160", "megatron", "adaptive")),
    ],
)
def test_resumed_equals_uninterrupted(size, flags, packing, dataset, tmp_path):
    without = GQA if LATENT in flags else "--global-batch-size" if flags == SCHEDULE else ""
    train = functools.partial(training.train, without=without)
    common = [*flags.split(), *ADAM, *f"--wlb-packing {packing} --train-iters 3".split()]
    common += [] if flags == SCHEDULE else ["--wlb-micro-batches", "8"]
    folder = str(tmp_path / "ckpt")
    common += ["--save", folder, "--save-interval", "2"]
    whole = train(size, dataset, *common, log=tmp_path / "whole.jsonl")
    if waits := packing not in ("adaptive", "megatron"):
        assert state.load(state_path(folder, 2))[0]["step"] == 2
    assert state_path(folder, 2).exists() == waits
    resumed = train(size, dataset, *common, "--load", folder, "--ckpt-step", "2", log=tmp_path / "resumed.jsonl")

    assert [e["step"] for e in whole["log"]] == [1, 2, 3] and [e["step"] for e in resumed["log"]] == [3]
    assert {k: resumed["log"][0][k] for k in EXACT} == {k: whole["log"][2][k] for k in EXACT}
    assert resumed["params"].keys() == whole["params"].keys()
    for name, parameter in whole["params"].items():
        assert torch.equal(resumed["params"][name], parameter), name


DELAY = "--wlb-packing adaptive:20"


@pytest.mark.parametrize("packing", [DELAY, full("--wlb-packing paper:96,160")])
def test_delay_loses_no_document_when_layout_and_batch_size_change(packing, dataset, tmp_path, monkeypatch):
    """What was trained and what waits in the last checkpoint are the pieces of the samples; starts say what is new."""
    log, checkpoint, prints = tmp_path / "log.jsonl", str(tmp_path / "ckpt"), tmp_path / "prints"
    common = [*ADAM, *packing.split(), "--save", checkpoint, "--load", checkpoint, "--save-interval", "3"]
    common += "--override-opt-param-scheduler --wlb-max-tokens 640 --num-layers 2 --train-samples 200".split()
    parts = [(1, "", 4, 4), (4, PP2, 8, 16), (2, CP2, 8, 6), (2, "", 16, 8)]
    for part, (size, flags, n, m) in enumerate(parts, 1):
        flags += f" --global-batch-size {n} --wlb-micro-batches {m} --exit-interval {3 * part}"
        train(size, dataset, *common, *flags.split(), prints=prints, log=log, without="--train-iters", exits=True)
    said = r"> wlb: resumed at iteration (\d+) with \d+ documents waiting; changed: (.*)"
    changes = re.findall(said, prints.read_text())
    assert changes == [
        ("3", "parallel.pp 1 -> 2, parallel.dp 1 -> 2, num_micro_batches 4 -> 16, global_batch_size 4 -> 8"),
        ("6", "parallel.cp 1 -> 2, parallel.pp 2 -> 1, parallel.dp 2 -> 1, num_micro_batches 16 -> 6"),
        ("9", "parallel.cp 2 -> 1, parallel.dp 1 -> 2, num_micro_batches 6 -> 8, global_batch_size 8 -> 16"),
    ]
    packer, *_ = state.load(state_path(checkpoint, 12))
    waiting = np.concatenate(list(state.waiting(packer).values()))
    trained = Counter(length for e in entries(log) for lengths in e["lengths"] for length in lengths)

    def listed(run):
        pieces = run._splits["train"].samples.documents(0, packer["drawn_samples"])
        (tmp_path / "samples").write_text(json.dumps(pieces["length"].tolist()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "batches", listed)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        train(1, dataset, *common, "--global-batch-size", "8", without="--train-iters")
    waits = Counter(waiting["length"].tolist())
    assert trained + waits == Counter(json.loads((tmp_path / "samples").read_text()))
    assert any(e["delay_max_steps"] > 0 for e in entries(log))


@pytest.mark.parametrize(
    ("step", "consumed", "documents", "message"),
    [
        (3, 40, 8, "are of other data, another order or other epochs; give the data"),
        (3, 80, 7, "of 40 consumed samples, and the checkpoint of 80: it is another job's"),
        (2, 40, 7, "is of step 3, not of iteration 2; copy that one's"),
        (1, 40, 7, "there is no packer state .*: its checkpoint was saved without --wlb, or copied without"),
    ],
)
def test_what_waited_in_another_run_is_refused(step, consumed, documents, message, tmp_path):
    described, lengths = job(packing=AdaptivePacking(max_delay_steps=20)), np.full(300, 90)
    packs = packer(described, lengths)
    for _ in range(3):
        packs.next()
    for name in (2, 3):
        state.save(state_path(str(tmp_path), name), packs.state(), described, 40, 7)
    assert plans._load(packer(described, lengths), str(tmp_path), 3, 40, 7)
    with pytest.raises(ValueError, match=message):
        plans._load(packer(described, lengths), str(tmp_path), step, consumed, documents)


def test_documents_of_a_state_are_those_of_the_same_order_lengths_and_files():
    given = samples([5, 9, 60, 70, 80]).datasets[0]

    def digest(size=7, **changes):
        train = Namespace(samples=Namespace(datasets=[replace(given, **changes)]), datasets=[Namespace(size=size)])
        return plans.Plans._documents.func(Namespace(_splits={"train": train}))

    others = ({"lengths": given.lengths[::-1]}, {"document_index": given.document_index[::-1]}, {"size": 8})
    assert digest() == digest() and len({digest(), *(digest(**each) for each in others)}) == 4


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


def test_flags_of_the_checkpoint_are_held_against_the_same_rules(dataset, tmp_path, monkeypatch):
    """`--use-checkpoint-args` overwrites what was given, and gives what was not; but no attention dropout."""
    experts = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64".split()
    for name, flags in (("dense", ["--attention-dropout", "0.1"]), ("moe", experts)):
        save = f"--save {tmp_path / name} --save-interval 9 --data-cache-path {tmp_path / 'cache'} --train-iters 1"
        train(1, dataset, *ADAM, *save.split(), *flags, wlb=False)
    load = [*ADAM, "--use-checkpoint-args", "--train-iters", "2", "--load"]
    load = ["--override-opt-param-scheduler", *load]
    with monkeypatch.context() as patched:
        patched.setitem(ARGUMENTS, "num_experts", (Refused("is not supported; give no experts"),))
        with pytest.raises(RuntimeError, match="give no experts; flags of the checkpoint count, too"):
            train(1, dataset, *load, str(tmp_path / "moe"))
    train(1, dataset, *load, str(tmp_path / "moe"), log=tmp_path / "moe.jsonl")  # with alltoall, not the default

    configure = Training.configure

    def watched(run, built):
        assert built.transformer.attention_dropout == 0
        configure(run, built)

    monkeypatch.setattr(Training, "configure", watched)
    run = train(1, dataset, *load, str(tmp_path / "dense"), without="--seq-length", log=tmp_path / "log.jsonl")
    assert [e["step"] for e in run["log"]] == [2]


def test_with_delay_a_missing_state_stops_the_run_unless_told_to_go_on(dataset, tmp_path):
    checkpoint, prints = tmp_path / "ckpt", tmp_path / "prints"
    common = [*ADAM, "--save-interval", "1", "--override-opt-param-scheduler"]
    train(1, dataset, *common, *DELAY.split(), "--train-iters", "2", "--save", str(checkpoint))
    common += ["--train-iters", "3", "--load", str(checkpoint)]
    with pytest.raises(RuntimeError, match="documents wait at the checkpoint 2 of .*leave them out by --no-load-wlb"):
        train(1, dataset, *common)
    load = [*common, *DELAY.split()]
    state_path(str(checkpoint), 2).unlink()
    with pytest.raises(RuntimeError, match="there is no packer state .*by --no-load-wlb: documents of the"):
        train(1, dataset, *load)
    run = train(1, dataset, *load, "--no-load-wlb", log=tmp_path / "log.jsonl", prints=prints)
    assert [e["step"] for e in run["log"]] == [3] and "that waited then are not trained" in prints.read_text()


def test_states_go_and_are_converted_with_their_checkpoints(dataset, tmp_path):
    checkpoint, delay = tmp_path / "ckpt", [*ADAM, *DELAY.split()]
    save = f"--save {checkpoint} --save-interval 1 --save-retain-interval 2 --train-iters 5".split()
    train(1, dataset, *delay, *save)
    kept = sorted(path.name for path in checkpoint.glob("iter_*") if path.is_dir())
    assert len(kept) < 5
    assert sorted(path.name for path in checkpoint.glob("*.wlb.json")) == [f"{name}.wlb.json" for name in kept]
    convert = f"--train-iters 5 --load {checkpoint} --ckpt-convert-format torch --ckpt-convert-save {tmp_path / 'new'}"
    train(1, dataset, *delay, *convert.split(), exits=True)
    assert len({state_path(str(each), 5).read_text() for each in (checkpoint, tmp_path / "new" / "torch")}) == 1
