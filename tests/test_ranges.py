"""Fields and arguments have types and ranges: what is in none is refused by its name, wherever it stands."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_wlb import (
    MODELS,
    Packer,
    Parallel,
    Planner,
    PlanSettings,
    balance,
    make_job,
    plan_step,
    read_index,
    windows,
)
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import RunSettings
from megatron_wlb.hardware.profile import KernelTimes, Versions, load_profile
from megatron_wlb.job import Recompute, Sharding
from megatron_wlb.layers.mamba import mamba
from megatron_wlb.pipeline.split import EVEN
from tests.jobs import job, packer

PROFILE = load_profile("gb200-cudnn-9.22")
DESCRIBED = [
    PROFILE,
    PROFILE.network,
    KernelTimes(launch=1.0, tile=1.0, query_tile=1.0),
    Versions(),
    Parallel(),
    Recompute(),
    MODELS["deepseek-v3"],
    mamba(heads=1, head_dim=1, groups=1, state_dim=1),
    EVEN,
    job(),
    PlanSettings(),
    RunSettings(),
    Sharding(),
]
NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.5,
    1 << 70,
    "8",
    b"8",
    [8],
    (),
    {},
    object(),
    np.array([8]),
    np.array(8),
]

SIZES = {"model": MODELS["550m"], "context_length": 8}


def wrong(kind):
    """Values of no field of a type, by its name."""
    text = str(kind)
    if "bool" in text:
        return ["no", 2, None, [], np.array([True])]
    if "int" in text or "float" in text:
        return NUMBERS if "tuple" not in text else [*NUMBERS[:9], (math.nan, math.nan), np.array([8])]
    if "str" in text:
        return [
            5,
            math.nan,
            [],
            b"8",
            object(),
            *(["a\x1b]0;b", "a\nb", "a\u202eb", "a" * 300] if "pattern" in text else []),
        ]
    return [5, "8", [], math.nan, object(), np.array(8)]


@pytest.mark.parametrize("described", DESCRIBED, ids=lambda each: type(each).__name__)
def test_every_field_has_a_range(described):
    for f in fields(described):
        if f.name in ("forward", "sft_skip", "modules", "cuda_graphs"):
            continue
        for value in wrong(f.type):
            with pytest.raises(ValueError, match=f"{f.name.replace('_', '.')}"):
                replace(described, **{f.name: value})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda value: balance([5, 6], job(), value), "dp_rank"),
        (lambda value: balance([5, 6], job(), num_micro_batches=value), "num_micro_batches"),
        (lambda value: balance([5, 6], job(), num_micro_batches=0 * (value == 8) or 1 << 31), "num_micro_batches"),
        (lambda value: make_job(model=MODELS["550m"], context_length=value, global_batch_size=8), "context_length"),
        (lambda value: make_job(**SIZES, global_batch_size=value), "global_batch_size"),
        (lambda value: make_job(**SIZES, global_batch_size=8, budget_bytes=value), "budget"),
        (lambda value: windows(np.array([99]), value), "context_length"),
        (lambda value: windows(np.array([99]), 8, seed=value), "seed"),
        (lambda value: windows(np.array([99]), 8, num_samples=value), "num_samples"),
        (lambda value: plan_step(packer(job(), [99]), job(), value), "dp_rank"),
        (lambda value: Packer(packer(job(), [99])._samples, job(), first_sample=value), "first_sample"),
        (lambda value: Packer(packer(job(), [99])._samples, job(), step=value), "step"),
        (lambda value: Planner(packer(job(), [99]), job(), 0, first_step=value), "first_step"),
        (lambda value: Planner(packer(job(), [99]), job(), 0, first_step=0, patience_seconds=-abs(value)), "patience"),
    ],
)  # fmt: skip
def test_every_argument_has_a_range(call, name):
    for value in {"patience": NUMBERS[:6], "budget": [*NUMBERS[:3], "8"]}.get(name, NUMBERS[:7]):
        with pytest.raises(ValueError, match=name):
            call(value)


def test_a_range_is_said_in_words():
    for change, words in {
        ("name", "a\x1bb"): r"^name is 'a\\x1bb'; it must be text without control characters$",
        ("gains", (("d\n", 1, 1),)): r"^gains\[0\]\[0\] is 'd\\n'; it must be text without control characters$",
        ("fp8", (1, 2)): r"^fp8\[0\] is 1; it must be object, got int$",
    }.items():
        with pytest.raises(ValueError, match=words):
            replace(PROFILE, **dict([change]))
    with pytest.raises(ValueError, match="^method is 'x'; it must be one of block, uniform$"):
        Recompute(method="x")
    with pytest.raises(ValueError, match="^--recompute-method is 'x'; it must be one of uniform, block; give another"):
        MegatronArguments.of({"recompute_method": "x"})


def test_what_is_hidden_or_no_text_is_refused():
    with pytest.raises(ValueError, match="lengths are a masked array, whose hidden entries would be trained; give"):
        balance(np.ma.array([1, 2], mask=[0, 1]), job())
    with pytest.raises(ValueError, match="equal_counts is 'no'; it must be bool"):
        balance([5, 6], job(), equal_counts="no")
    with pytest.raises(ValueError, match="prefix is None; it must be str"):
        read_index(None)
    with pytest.raises(ValueError, match="packed for 1 ranks, not 2; give the packer's job"):
        plan_step(packer(job(), [999]), job(dp=2))
