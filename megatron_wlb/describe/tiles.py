"""`--tp-comm-overlap`, whose user buffers have fixed rows, for micro-batches of any length: in tiles of rows."""

from dataclasses import replace
from typing import Any

from megatron_wlb import layers
from megatron_wlb.cost.tiles import has_buffers
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.job import NUM_TILES, Job, Parallel
from megatron_wlb.layers.part import Adaptation, without

TILE_ROWS = 16384
"""Rows of the largest tile over tensor-parallel ranks. As predicted, smaller ones start more kernels, and larger ones
take more memory for little."""


def _serves(a: Any) -> bool:
    """Whether TransformerEngine has user buffers for the layers of these arguments."""
    return not a.use_transformer_engine_op_fuser and all(kind.names_products(a) for kind in layers.KINDS)


ADAPTED = (
    Adaptation(
        lambda a, given: a.tp_comm_overlap and (a.tensor_model_parallel_size or 1) > 1 and not _serves(a),
        without("tp_comm_overlap"),
        "latent attention, fused operations, linear and hybrid layers have no user buffers",
        "communication of tensor parallelism is no longer hidden",
    ),
    Adaptation(
        lambda a, given: a.tp_comm_overlap and a.tensor_model_parallel_size == 1,
        without("tp_comm_overlap"),
        "there is nothing to overlap with one tensor-parallel rank",
    ),
)


def settings(a: MegatronArguments, parallel: Parallel, row_multiple: int) -> dict[str, Any]:
    """Return fields of `Job`: rows of the largest tile, at most a window, and the share of communication that overlaps;
    none without."""
    if not (a.tp_comm_overlap and _serves(a)) or parallel.sequence_ranks == 1 or a.seq_length is None:
        return {}
    unit = parallel.sequence_ranks * row_multiple << NUM_TILES - 1
    rows = min(TILE_ROWS, a.seq_length // parallel.cp) // unit * unit
    return {"tp_tile_rows": rows, "tp_overlap": overlap(parallel.tp) if rows else 0.0}


def overlap(tp: int) -> float:
    """Return the share of communication that overlaps: all but the first part."""
    return 1 - 1 / tp


def without_wlb(a: Any, job: Job) -> float:
    """Return the share that overlaps in Megatron alone, whose user buffers serve all rows."""
    return job.tp_overlap or (overlap(job.parallel.tp) if a.tp_comm_overlap else 0.0)


def switched_on(a: MegatronArguments, job: Job) -> Job | None:
    """Return the job with `--tp-comm-overlap`; None if it has it, or would have no tiles."""
    found = settings(replace(a, tp_comm_overlap=True), job.parallel, job.row_multiple)
    return replace(job, **found) if found.get("tp_tile_rows") and not job.tiles and has_buffers(job) else None
