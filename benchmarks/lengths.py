"""Documents that benchmarks draw, and how they pack them. Needs numpy only, since GPU machines may have little more."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.describe.make import make_job
from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import MODELS, shape
from megatron_wlb.plan.mock import F2, PROFILES
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Samples, windows

DATA = Path(__file__).parent / "data"
WINDOW = 131_072
"""The context window that F2 was made for."""
CROSSOVER = 51_200
S_MAX = 1.25
"""In windows."""
SKIPPED = 20
"""Micro-batches before a packer is in its stride."""


def f2(count: int, seed: int, window: int | None = None) -> np.ndarray:
    """Lengths of the synthetic distribution F2, whose tail ends at the context window; default: 131,072."""
    return F2.draw(count, seed, window)


def drawn(profile: str, count: int, seed: int, window: int) -> np.ndarray:
    """Lengths of a profile, as long as they come; F2's tail ends at the context window."""
    return f2(count, seed, window) if profile == "F2" else PROFILES[profile].lengths.draw(count, seed)


def distca() -> np.ndarray:
    """Lengths of DistCA's sample, drawn after the shape in the paper, int64 [documents]."""
    return np.load(DATA / "dist_wlbllm.npz")["lengths"].astype(np.int64)


def samples(lengths: np.ndarray, window: int, *, shuffle: bool = False) -> Samples:
    """Windows cut from documents of `lengths`, by default in order, again and again."""
    part = windows(lengths, window, seed=0 if shuffle else None)
    return Samples(datasets=[part], context_length=window, order=lambda places: places % len(part))


def job_7b(global_batch_size: int = 4, **changes: Any) -> Job:
    """LLaMA2-7B, a micro-batch for every data-parallel rank; `changes` are arguments of `make_job`."""
    given = {"model": MODELS["llama2-7b"], "crossover_tokens": CROSSOVER, "max_tokens": round(S_MAX * WINDOW)}
    given |= {"context_length": WINDOW, "global_batch_size": global_batch_size}
    return make_job(**given | {"parallel": Parallel(dp=global_batch_size)} | changes)


def attention_job(window: int, heads: tuple[int, int], cp: int = 1, **changes: Any) -> Job:
    """A job of which attention alone counts, for (Hq, Hkv) heads of a rank, without communication.

    A micro-batch for every one of four data-parallel ranks, so that packing makes them alike. `changes` are arguments
    of `make_job`.
    """
    given = {"model": shape(1, 1, 1, *heads, 0), "crossover_tokens": CROSSOVER, "cp_exchange": "all"}
    given |= {"context_length": window, "global_batch_size": 4, "parallel": Parallel(cp=cp, dp=4)}
    return make_job(**given | changes)


def packer(lengths: np.ndarray, job: Job) -> Packer:
    """Packs documents of `lengths`, in order, for a job."""
    return Packer(samples(lengths, job.context_length), job)


def packings(lengths: np.ndarray, job: Job, steps: int, skip: int = 0) -> list[PackedBatch]:
    """`steps` steps of a job, after `skip` others."""
    packs = packer(lengths, job)
    return [packs.next().batch for _ in range(skip + steps)][skip:]


def packed(lengths: np.ndarray, job: Job, count: int) -> list[np.ndarray]:
    """Document lengths of `count` micro-batches of a job, int64 [documents] each, in the order of the stream."""
    packs = packer(lengths, job)
    every: list[np.ndarray] = []
    while len(every) < SKIPPED + count:
        packing = packs.next().batch
        documents = [packing.micro_batch(i) for i in range(len(packing))]
        every += [d["length"][np.argsort(d["index"])] for d in documents if len(d)]
    return every[SKIPPED : SKIPPED + count]


def padded(lengths: np.ndarray, unit: int) -> np.ndarray:
    """Brought to a multiple of `unit` by a document at the tail."""
    padding = -int(lengths.sum()) % unit
    return np.append(lengths, padding) if padding else lengths
