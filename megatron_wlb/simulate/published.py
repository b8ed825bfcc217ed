"""Errors of predicted times of steps against published ones, for runs of a kind."""

from importlib import resources
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_wlb.hardware.profile import gpu_of
from megatron_wlb.job import Job

LONG = 32 << 10
"""Tokens from which on a window is long."""
LEAST_ROWS = 8
"""Rows of a kind below which a wider kind is taken."""


RANGE = (0.04, 0.96)
"""Quantiles of rows between which 80 % of the steps of models are that the rows lack (`benchmarks.published`)."""
FLAGS = (
    *("moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm", "use_transformer_engine_op_fuser"),
    *("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
)
"""Arguments that say how experts run."""


class Row(NamedTuple):
    """A published step, as `benchmarks.published` predicts it."""

    experts: bool
    gpu: str
    precision: str
    """bf16, fp8, mxfp8 or nvfp4."""
    long: bool
    ratio: float
    """Predicted over measured speed."""
    unstated: float | None
    """The same of experts where neither flags of `FLAGS` nor the release are known; None for dense models."""


class Errors(NamedTuple):
    """Errors, as |log(predicted / measured)|, of published steps that are like a run's."""

    kind: str
    rows: int
    median: float | None
    p90: float | None
    """None without rows."""
    least: float | None
    most: float | None
    """`RANGE` of measured times, over the predicted."""
    flags: bool
    """Whether predictions know the flags of the steps."""


ROWS = msgspec.json.decode((resources.files("megatron_wlb.hardware") / "published.json").read_bytes(), type=list[Row])


def precision_of(recipe: str) -> str:
    """Return the precision of a row by a job's."""
    return recipe if recipe in ("bf16", "mxfp8", "nvfp4") else "fp8"


def errors_like(job: Job, *, flags: bool = True) -> Errors:
    """Return errors of steps with experts or without, as a job's, on its GPU, if there are so many in its precision and
    of long or short windows. `flags`: of predictions that know how experts run."""
    gpu, precision = gpu_of(job.profile.device or "") or "", precision_of(job.precision)
    experts, long = job.model.is_mixture, job.context_length >= LONG
    kind = f"{'mixtures of experts' if experts else 'dense models'} on {gpu.upper() or 'this device'}"
    rows = [row for row in ROWS if (row.experts, row.gpu) == (experts, gpu)]
    alike = [row for row in rows if row.precision == precision]
    if len(alike) >= LEAST_ROWS:
        kind, rows = f"{kind} in {'bf16' if precision == 'bf16' else precision.upper()}", alike
    alike = [row for row in rows if row.long == long]
    if len(alike) >= LEAST_ROWS:
        kind, rows = f"{kind}, windows {'from' if long else 'below'} {LONG // 1024}K", alike
    flags = flags or not experts
    ratios = [row.ratio if flags or row.unstated is None else row.unstated for row in rows]
    if not ratios:
        return Errors(kind, 0, None, None, None, None, flags)
    median, p90 = np.quantile(np.abs(np.log(ratios)), (0.5, 0.9)).tolist()
    least, most = np.quantile(ratios, RANGE).tolist()
    return Errors(kind, len(rows), median, p90, least, most, flags)
