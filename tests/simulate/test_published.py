"""Errors of published steps that are like a run's."""

import math
from dataclasses import replace

import pytest

from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.model import MODELS
from megatron_wlb.simulate import published
from megatron_wlb.simulate.published import LEAST_ROWS, LONG, ROWS, Row, errors_like, precision_of
from tests.jobs import job

H100 = job(profile=load_profile("h100-cudnn"), context_length=4096)


@pytest.fixture
def rows(monkeypatch):
    """Of dense models on H100, many in FP8, few of these long; of experts one."""
    short, long = ([Row(False, "h100", "fp8", each, ratio, None)] * 9 for each, ratio in ((False, 1.1), (True, 0.5)))
    found = [*short, *long[:2], Row(False, "h100", "bf16", False, 2.0, None), Row(True, "h100", "bf16", True, 1.5, 0.8)]
    monkeypatch.setattr(published, "ROWS", found)
    return found


def test_the_closest_kind_that_has_enough_rows_is_taken(rows):
    fp8 = errors_like(replace(H100, precision="tensorwise"))
    assert fp8[:2] == ("dense models on H100 in FP8, windows below 32K", 9)
    assert fp8.median == fp8.p90 == pytest.approx(math.log(1.1))
    long = errors_like(replace(H100, precision="delayed", context_length=LONG, max_tokens=LONG))
    assert long[:2] == ("dense models on H100 in FP8", 11) and long.p90 == pytest.approx(math.log(2))
    assert errors_like(H100)[:2] == ("dense models on H100, windows below 32K", 10)
    assert errors_like(replace(H100, profile=replace(H100.profile, name="mine"))) == errors_like(H100)
    assert [precision_of(each) for each in ("bf16", "mxfp8", "nvfp4", "delayed")] == ["bf16", "mxfp8", "nvfp4", "fp8"]
    experts = errors_like(replace(H100, model=MODELS["qwen3-30b-a3b"]))
    assert experts[:2] == ("mixtures of experts on H100", 1) and experts.median == pytest.approx(math.log(1.5))


def test_where_flags_are_not_known_errors_of_experts_are_of_predictions_without_them(rows):
    moe = replace(H100, model=MODELS["qwen3-30b-a3b"])
    known, unknown = (errors_like(moe, flags=each) for each in (True, False))
    assert (known.least, known.most, known.flags) == (1.5, 1.5, True)
    assert (unknown.least, unknown.most, unknown.flags) == (0.8, 0.8, False)
    assert errors_like(H100, flags=False) == errors_like(H100)


def test_a_range_leaves_few_rows_out():
    assert sum(row.unstated is not None for row in ROWS) == sum(row.experts for row in ROWS)
    found = errors_like(replace(H100, model=MODELS["qwen3-30b-a3b"]), flags=False)
    of_kind = [row.unstated for row in ROWS if row.experts and row.gpu == "h100" and row.precision == "bf16"]
    assert len(of_kind) == found.rows and found.median > 0.1
    assert sum(found.least <= each <= found.most for each in of_kind) >= 0.8 * found.rows


def test_a_kind_without_rows_has_no_error(rows):
    none = errors_like(replace(H100, profile=load_profile("a100-fa2")))
    assert none[:2] == ("dense models on A100", 0) and none.median is none.p90 is None


def test_what_is_shipped_is_of_known_kinds():
    assert len(ROWS) > 10 * LEAST_ROWS and all(row.ratio > 0 for row in ROWS)
    assert {row.precision for row in ROWS} == {"bf16", "fp8", "mxfp8", "nvfp4"}
