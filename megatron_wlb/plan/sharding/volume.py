"""How many rows of K and V a sharding moves between ranks."""

import numpy as np

from megatron_wlb.plan.types import ShardPlan


def moved_rows(plan: ShardPlan) -> np.ndarray:
    """Rows that every rank takes in and hands out, int64 [cp, 2].

    In come the keys that the rank's queries see and that others hold: of each of its documents, the beginning up to
    its last query. Out goes each of its rows as often as another rank sees it.
    """
    held = [np.concatenate(shard.calls) for shard in plan.shards]
    segments = np.concatenate(held)
    ranks = np.repeat(np.arange(len(held)), [len(each) for each in held])
    order = np.lexsort((segments["start"], segments["document"]))
    ranks, segments = ranks[order], segments[order]
    documents, rows = segments["document"], segments["stop"] - segments["start"]
    # A rank sees what lies before the end of its last segment of a document. Segments do not overlap, so it sees all of
    # another segment or nothing.
    _, from_end = np.unique((documents * len(held) + ranks)[::-1], return_index=True)
    is_last = np.zeros(len(segments) + 1, np.int64)
    is_last[len(segments) - 1 - from_end] = 1
    lasts = is_last[::-1].cumsum()[::-1]
    others = lasts[:-1] - lasts[np.searchsorted(documents, documents, side="right")] - 1
    moved = np.zeros((len(held), 2), np.int64)
    np.add.at(moved, ranks, np.stack((segments["stop"] * is_last[:-1] - rows, rows * others), axis=1))
    return moved
