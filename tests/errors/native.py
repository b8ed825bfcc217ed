"""Errors of the C++ core."""

import dataclasses

import numpy as np

from megatron_wlb.config import MAX_TOKENS
from megatron_wlb.plan import native
from megatron_wlb.plan.workload import FLOPS_PROFILE
from tests.errors.case import At, Case
from tests.plan.test_native import adaptive_settings, columns

FLOPS = FLOPS_PROFILE.kernel(heads=2)


def step(**changes):
    arguments = dict(zip(("index", "length", "work"), columns([1, 2]), strict=True))
    return lambda at: native.WlbCore(2, 100, []).step(**(arguments | changes))


def added(*, index, **changes):
    """Two documents join those that wait in adaptive packing."""
    _, length, work = columns([1, 2])
    core = native.AdaptiveCore(adaptive_settings(**changes))
    core.add(np.array(index), length, work, np.zeros(2, np.int64))


def most_work(at: At):
    core = native.AdaptiveCore(adaptive_settings(max_tokens=MAX_TOKENS, context_length=MAX_TOKENS))
    core.add(np.arange(2), np.full(2, MAX_TOKENS), np.array([2**62 - 1, 2]), np.zeros(2, np.int64))


def sharded(lengths, strategies=("per-sequence",), kernel=FLOPS):
    return lambda at: native.shard(np.array(lengths, np.int64), 2, list(strategies), [1], kernel)


CASES: list[Case] = [
    # document.cpp
    ("num_micro_batches is <0>; it must be <1 to 1048576>", lambda at: native.WlbCore(0, 10, [])),
    ("a document of <0> tokens; lengths must be <at least 1>", step(length=np.array([1, 0]))),
    ("a document of <101> tokens exceeds max_tokens <100>; raise it", step(length=np.array([1, 101]))),
    ("work <-5> of a document of 2 tokens; it must be <0 to 137438953472>", step(work=np.array([1, -5]))),
    # bindings.cpp
    (
        "<index> must be a 1-d array of <int64>, not <1-d of float64>",
        step(index=np.array([1.0, 2.0])),
    ),
    ("work has <3> elements, index has <2>; give as many", step(work=np.array([1, 2, 3]))),
    # fixed.cpp, adaptive.cpp
    (
        "the documents have more than the <20> tokens of <2> windows; give more windows",
        lambda at: native.FixedCore(10, 7).place(np.array([11, 10]), 2),
    ),
    (
        "token_repay is <1.000000>; it must be <0 to 0.990000>",
        lambda at: native.AdaptiveCore(adaptive_settings(token_repay=1.0)),
    ),
    (
        "document <3> comes after document <3>; indices must ascend",
        lambda at: added(index=[3, 3]),
    ),
    ("the work of waiting documents exceeds <4611686018427387904> in all; lower the crossover", most_work),
    # sharding.cpp
    (
        "tile_rows is <3>; it must be <a power of two>",
        sharded([4], kernel=dataclasses.replace(FLOPS, tile_rows=3)),
    ),
    ("the micro-batch has <3> tokens; it must be a multiple of <4>", sharded([3])),
    ("unknown sharding <best>; choose <per-sequence, per-document or hybrid>", sharded([4], ["best"])),
    ("none of the <0> strategies can shard this micro-batch; add per-sequence", sharded([4], [])),
    # pipeline.cpp
    (
        "a micro-batch has work <-1>; it must be <0 to …> for predicted times to fit 64 bits; lower S_max or the "
        "crossover",
        lambda at: native.order(np.array([-1, 1]), 2, 1),
    ),
    ("dp_size is <2>; it must divide the <3> micro-batches", lambda at: native.place(np.ones(3, np.int64), 2, 1, 1)),
]
