"""Killed at any point and resumed in another layout, again and again: every step trains what Megatron's would."""

import time
from pathlib import Path

import numpy as np
import pytest

from tests.adapter.training import ADAM, CP2, PP2, entries, full, train
from tests.worlds import HANGS_SECONDS

LAYOUTS = [(1, ""), (2, ""), (2, CP2), (2, PP2)]


@pytest.mark.parametrize(("kills", "steps"), [(3, 12), full(20, 160)])
def test_killed_and_resumed_trains_the_same(kills, steps, dataset, tmp_path):
    """SIGKILL to every process at random moments of starting, training and saving; every start draws its layout and
    how many micro-batches it makes."""
    log, checkpoint, cache = tmp_path / "log.jsonl", str(tmp_path / "ckpt"), str(tmp_path / "cache")
    flags = [*ADAM, "--adam-eps", "0.01", "--override-opt-param-scheduler", "--train-iters", str(steps)]
    flags += ["--data-cache-path", cache]
    resume = [*flags, "--wlb-digest", "--save", checkpoint, "--load", checkpoint, "--save-interval", "1"]
    rng, layouts, saved = np.random.default_rng(kills), set(), []
    begin = time.monotonic()
    train(1, dataset, *flags, "--train-iters", "1")
    start = time.monotonic() - begin  # how long a start takes on this machine

    def attempt(timeout):
        size, layout = LAYOUTS[rng.integers(len(LAYOUTS))]
        layouts.add((size, layout))
        count = ["--wlb-micro-batches", str(rng.choice([4, 8, 12])), "--wlb-max-tokens", "640"]
        train(size, dataset, *resume, *layout.split(), *count, log=log, timeout=timeout)

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
    theirs = train(1, dataset, *flags, wlb=False)
    found = {e["step"]: e for e in entries(log)}
    assert list(found) == list(range(1, steps + 1)) and len({e["digest"] for e in found.values()}) == steps
    assert [e["loss"] for e in found.values()] == pytest.approx(theirs["losses"], rel=1e-5)
