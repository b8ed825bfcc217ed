"""Jobs, samples and packers for tests: `job` makes a small one, of which a test says only what it is about."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_wlb.describe.make import make_job
from megatron_wlb.job import Job, Parallel, Sharding
from megatron_wlb.model import ModelShape
from megatron_wlb.pipeline.split import Split
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Samples, blended, windows

MODEL = ModelShape(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    padded_vocab_size=128,
    kv_channels=16,
)
EDGES = Split(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)


def job(**changes: Any) -> Job:
    """A job of a small model: C = 64, N = M = 4, a crossover of 32 tokens, one rank.

    `changes` are arguments of `make_job`, or fields of `Parallel` (tp=2), `Sharding` or `Job`, which win over defaults.
    `num_micro_batches` alone means as many windows.
    """
    parallel, sharding = (
        kind(**{name: changes.pop(name) for name in list(changes) if name in kind.__dataclass_fields__})
        for kind in (Parallel, Sharding)
    )
    windows = changes.get("num_micro_batches", 4)
    sizes = {"model": MODEL, "context_length": 64, "global_batch_size": windows, "crossover_tokens": 32}
    given = sizes | {"parallel": parallel, "sharding": sharding} | changes
    return make_job(**given)


def samples(
    *datasets: Sequence[int] | np.ndarray,
    context_length: int = 64,
    seed: int | None = 1,
    num_samples: int | None = None,
) -> Samples:
    """One epoch of documents of these lengths, or `num_samples` at least; several datasets are blended by size."""
    how = {"seed": seed, "num_samples": num_samples}
    parts = [windows(np.asarray(each, np.int64), context_length, **how) for each in datasets]
    sizes = [len(part) for part in parts]
    blend = blended(parts, sizes, sum(sizes)) if len(parts) > 1 else None
    return Samples(datasets=parts, blend=blend, context_length=context_length)


def packer(job: Job, *datasets: Sequence[int] | np.ndarray, **how: Any) -> Packer:
    """A packer of documents of these lengths; `how` is for `samples`."""
    return Packer(samples(*datasets, context_length=job.context_length, **how), job)
