"""Interrupted and resumed equals uninterrupted: the same documents, losses and parameters, to the bit."""

import json

import pytest
import torch

from megatron_wlb.adapter.checkpoint import load_state, save_state, state_path
from tests.adapter.training import train

ADAM = "--optimizer adam --lr 1e-3".split()
LAYOUTS = {
    "one-process": (1, ""),
    "cp2-pp2-vpp2": (
        4,
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
}
EXACT = ("step", "digest", "loss", "tokens", "imbalance", "imbalance_original", "delays_tokens", "work")


@pytest.mark.parametrize("packing", ["wlb", "original", "adaptive", "fixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_equals_uninterrupted(layout, packing, dataset, tmp_path):
    size, flags = LAYOUTS[layout]
    common = [*flags.split(), *ADAM, "--wlb-packing", packing, "--train-iters", "4"]
    whole = train(size, dataset, *common, log=tmp_path / "whole.jsonl")

    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2", "--wlb-log", str(tmp_path / "parts.jsonl")]
    with pytest.raises(RuntimeError, match="SystemExit"):  # upstream's way to stop
        train(size, dataset, *common, *save, "--exit-interval", "2")
    assert json.loads(state_path(str(tmp_path / "ckpt"), 2).read_text())["step"] == 2
    resumed = train(size, dataset, *common, *save, "--load", str(tmp_path / "ckpt"))

    log = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log] == [1, 2, 3, 4]
    for part, reference in zip(log, whole["log"], strict=True):
        assert {k: part[k] for k in EXACT} == {k: reference[k] for k in EXACT}
    assert resumed["params"].keys() == whole["params"].keys()
    for name, parameter in whole["params"].items():
        assert torch.equal(resumed["params"][name], parameter), name


def test_state_is_written_atomically(tmp_path):
    save_state(str(tmp_path), 7, {"step": 7})
    with pytest.raises(TypeError):
        save_state(str(tmp_path), 7, {"step": object()})  # fails half way through
    assert load_state(str(tmp_path), 7) == {"step": 7}
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000007.wlb.json"]


def test_missing_and_damaged_state(tmp_path):
    with pytest.raises(ValueError, match=r"has no packer state iter_0000003.wlb.json"):
        load_state(str(tmp_path), 3)
    state_path(str(tmp_path), 3).write_text('{"format": "megatron-wlb')
    with pytest.raises(ValueError, match="is damaged"):
        load_state(str(tmp_path), 3)


def test_resume_without_state_and_from_another_dataset_are_refused(dataset, tmp_path):
    from tests.adapter.datasets import write_dataset

    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    train(1, dataset, *ADAM, *save, "--train-iters", "1")
    load = [*ADAM, "--load", str(tmp_path / "ckpt"), "--train-iters", "2", "--override-opt-param-scheduler"]
    other = write_dataset(tmp_path / "other", seed=1, documents=300)
    with pytest.raises(RuntimeError, match="saved with fingerprint"):
        train(1, other, *load)
    state_path(str(tmp_path / "ckpt"), 1).unlink()
    with pytest.raises(RuntimeError, match="has no packer state"):
        train(1, dataset, *load)
