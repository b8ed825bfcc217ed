"""Documents that benchmarks draw, and how they pack them. Needs numpy only, since GPU machines may have little more."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.describe.make import make_job
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import MODELS
from megatron_wlb.plan.packer import Packer, make_packer
from megatron_wlb.plan.stream import DocumentStream, Source

DATA = Path(__file__).parent / "data"
WINDOW = 131_072
"""That F2 was made for."""
CROSSOVER = 51_200
S_MAX = 1.25
"""In windows."""
SKIPPED = 20
"""Micro-batches before a packer is in its stride."""


def f2(count: int, seed: int, window: int | None = None) -> np.ndarray:
    """Lengths of the synthetic distribution F2, whose tail ends at the context window; default: the file's."""
    p = json.loads((DATA / "f2.json").read_text())
    rng = np.random.default_rng(seed)
    body = rng.lognormal(p["body"]["mu"], p["body"]["sigma"], count)
    tail = p["tail"]["minimum"] * (1 + rng.pareto(p["tail"]["alpha"], count))
    drawn = np.where(rng.random(count) < p["tail"]["probability"], tail, body)
    shortest, longest = p["clip"]
    return np.clip(drawn, shortest, window or longest).astype(np.int64)


def stream(lengths: np.ndarray, window: int, *, shuffle: bool = False) -> DocumentStream:
    """Documents of `lengths`, by default in order, again and again."""
    return DocumentStream([Source(lengths=lengths)], seed=0, context_length=window, shuffle=shuffle)


def job_7b(global_batch_size: int = 4, window: int = WINDOW, **changes: Any) -> Job:
    """LLaMA2-7B, whose crossover is scaled with the window, a micro-batch for every data-parallel rank.

    `changes` are arguments of `make_job`.
    """
    ranks = Parallel(dp=global_batch_size)
    sizes = {
        "parallel": ranks,
        "global_batch_size": global_batch_size,
        "context_length": window,
        "max_tokens": round(S_MAX * window),
    }
    crossover = CROSSOVER * window // WINDOW
    return make_job(**{"model": MODELS["llama2-7b"], "crossover_tokens": crossover} | sizes | changes)


def packer(lengths: np.ndarray, job: Job) -> Packer:
    """Packs documents of `lengths`, in order, for a job."""
    return make_packer(stream(lengths, job.context_length), job, fingerprint="")


def packed(lengths: np.ndarray, job: Job, count: int) -> list[np.ndarray]:
    """Document lengths of `count` micro-batches of a job, int64 [documents] each, in the order of the stream."""
    packs = packer(lengths, job)
    every: list[np.ndarray] = []
    while len(every) < SKIPPED + count:
        packing = packs.next().packing
        documents = [packing.micro_batch(i) for i in range(len(packing))]
        every += [d["length"][np.argsort(d["index"])] for d in documents if len(d)]
    return every[SKIPPED : SKIPPED + count]


def padded(lengths: np.ndarray, unit: int) -> np.ndarray:
    """Brought to a multiple of `unit` by a document at the tail."""
    padding = -int(lengths.sum()) % unit
    return np.append(lengths, padding) if padding else lengths
