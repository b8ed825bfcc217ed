"""Policies are measured as they pack, also where documents fit so badly that the stream waits for them."""

import numpy as np
import pytest

from benchmarks import packing
from benchmarks.lengths import job_7b

WINDOW = 1000
LENGTHS = {
    "long tail": np.clip(np.random.default_rng(0).lognormal(4, 1.2, 2000), 2, WINDOW).astype(np.int64),
    "over half of S_max": np.random.default_rng(0).integers(650, 900, 2000),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("policy", packing.policies(WINDOW).values(), ids=packing.policies(WINDOW))
def test_every_policy_is_measured(policy, lengths):
    summary = packing.measure(job_7b(4, WINDOW, packing=policy), lengths, 60)
    assert summary.steps == 60
    assert summary.imbalance_mean >= 1
