"""Micro-batches over data-parallel ranks, and the order in which a pipeline stage receives them."""

from collections.abc import Sequence

import numpy as np


def place(work: np.ndarray, dp_size: int, *, balance: bool) -> np.ndarray:
    """Which micro-batches each data-parallel rank runs, in order: int64 [dp_size, N / dp_size].

    With `balance`, micro-batches are dealt out in descending work, back and forth over the ranks, so that totals and
    maxima come out alike; otherwise round-robin, as Megatron's own sampler does.
    """
    order = np.argsort(-work, kind="stable") if balance else np.arange(len(work))
    rounds = order.reshape(-1, dp_size)
    if balance:
        rounds[1::2] = rounds[1::2, ::-1]
    return np.sort(rounds.T, axis=1)


def receive_order(
    table: Sequence[tuple[int, int]] | None, num_micro_batches: int, num_chunks: int, stage: int, num_stages: int
) -> tuple[list[int], list[int]]:
    """Micro-batch of the k-th tensor that a stage receives from its previous (forward) and next (backward) stage.

    Args:
        table: upstream's interleaved schedule table of (micro-batch, model chunk), None for plain 1F1B.
        num_micro_batches: per data-parallel rank.
        num_chunks: model chunks (virtual stages) per stage.
        stage: of this rank, in [0, num_stages).
        num_stages: of the pipeline.
    """
    if table is None:
        everything = list(range(num_micro_batches))
        return (everything if stage > 0 else []), (everything if stage < num_stages - 1 else [])
    last = num_chunks - 1
    # The first stage receives a chunk's input from the last stage's previous chunk; what the last stage computes in
    # the last chunk goes to the loss. Backward is the same with stages and chunks counted from the other end.
    forward = [m for m, chunk in table if not (stage == 0 and chunk == last)]
    backward = [m for m, chunk in table if not (stage == num_stages - 1 and chunk == last)]
    return forward, backward
