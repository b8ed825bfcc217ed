"""Killed at any point and resumed in another layout, again and again: every document exactly once, in its turn."""

import functools
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_wlb.plan import document_log
from tests.adapter import training
from tests.adapter.audit import audit
from tests.adapter.training import ADAM, CP2, GQA, LATENT, MTP, PP2, QUERY_LATENT, full
from tests.worlds import HANGS_SECONDS

LAYOUTS = [(1, ""), (2, ""), (2, CP2), (2, PP2)]
SEVERAL = (8, 4, 12)


@pytest.mark.parametrize(
    ("kills", "steps", "batches"),
    [(3, 12, (8,)), full(20, 160, (8,)), full(3, 24, SEVERAL), full(20, 160, SEVERAL)],
)
def test_killed_and_resumed_trains_the_same_documents(kills, steps, batches, dataset, tmp_path):
    """SIGKILL to every process at random moments of starting, training and saving; every start draws its layout.

    With one global batch size the sequence of documents that Algorithm 1 makes is that of a run that nothing disturbs,
    whatever the layout. Adaptive packing goes by the layout, with several sizes, so the audit remains; of a model with
    latents and layers for multi-token prediction.
    """
    packing, model = ("wlb", "") if len(batches) == 1 else ("adaptive", f"{LATENT} {QUERY_LATENT} {MTP}")
    train = functools.partial(training.train, without=GQA if model else "")
    whole, log, checkpoint = str(tmp_path / "whole"), str(tmp_path / "documents"), str(tmp_path / "ckpt")
    flags = [*ADAM, "--wlb-packing", packing, "--override-opt-param-scheduler", "--train-iters", str(steps)]
    flags += model.split()
    resume = [*flags, "--wlb-document-log", log, "--save", checkpoint, "--load", checkpoint, "--save-interval", "1"]
    rng, layouts, saved = np.random.default_rng(kills + len(batches)), set(), []
    begin = time.monotonic()
    train(1, dataset, *flags, "--train-iters", "1")
    start = time.monotonic() - begin  # how long a start takes on this machine

    def attempt(timeout):
        size, layout = LAYOUTS[rng.integers(len(LAYOUTS))]
        layouts.add((size, layout))
        batch = ["--global-batch-size", str(rng.choice(batches))]
        train(size, dataset, *resume, *layout.split(), *batch, timeout=timeout)

    for _ in range(kills):
        try:
            attempt(rng.uniform(0.4, 2.4) * start)
            break
        except TimeoutError:
            tracker = Path(checkpoint, "latest_checkpointed_iteration.txt")
            saved.append(tracker.read_text() if tracker.is_file() else "0")
    attempt(HANGS_SECONDS)
    assert len(saved) >= 2 * kills // 3
    assert len(set(saved)) > kills // 5 and len(layouts) > 1  # kills met runs that had come further
    found = audit(log, checkpoint, steps, [dataset])
    assert found.clean and found.steps == steps
    if len(batches) == 1:
        train(1, dataset, *flags, "--wlb-document-log", whole)
        assert np.array_equal(document_log.read(log), document_log.read(whole))
