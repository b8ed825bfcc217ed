"""Killed at any point and resumed, again and again: the same documents in the same order, each exactly once."""

import numpy as np
import pytest

from megatron_wlb.adapter.checkpoint import load_state
from megatron_wlb.plan import document_log
from megatron_wlb.plan.dataset import read_index
from megatron_wlb.plan.types import DOCUMENT
from tests.adapter.training import train


@pytest.mark.parametrize(("kills", "steps"), [(3, 16), pytest.param(20, 120, marks=pytest.mark.full)])
def test_killed_and_resumed_trains_the_same_documents(kills, steps, dataset, tmp_path):
    """SIGKILL to every process at random moments of starting, training and saving."""
    flags = "--optimizer adam --lr 1e-3 --wlb-packing adaptive --save-interval 1 --train-iters".split()
    flags += [str(steps)]
    whole, log, checkpoint = str(tmp_path / "whole"), str(tmp_path / "documents"), str(tmp_path / "ckpt")
    train(2, dataset, *flags, "--wlb-document-log", whole)
    run = [*flags, "--wlb-document-log", log, "--save", checkpoint, "--load", checkpoint]
    rng, killed = np.random.default_rng(kills), 0
    for _ in range(kills):
        try:
            train(2, dataset, *run, timeout=rng.uniform(1.0, 5.0))
            break
        except TimeoutError:
            killed += 1
    train(2, dataset, *run)
    assert killed >= 2 * kills // 3
    assert np.array_equal(document_log.read(log), document_log.read(whole))
    state = load_state(checkpoint, steps)
    waiting = np.array([tuple(row) for rows in state["waiting"].values() for row in rows], DOCUMENT)
    pairs = [np.maximum(read_index(dataset).tokens - 1, 0)]
    found = document_log.audit(document_log.read(log), waiting, state["stream"]["position"], pairs)
    assert found.clean and found.steps == steps
