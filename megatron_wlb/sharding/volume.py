"""Which rank holds what, and how many rows of K and V move."""

import numpy as np

from megatron_wlb.types import SEGMENT, ShardPlan


def moved_rows(plan: ShardPlan) -> np.ndarray:
    """Return the rows that every rank receives and sends, int64 [cp, 2].

    It receives the keys that its queries see and others hold: each of its documents up to its last query there. It
    sends each of its rows as often as another rank sees it.
    """
    moved: np.ndarray = Held(plan).rows().sum(axis=0).T
    return moved


class Held:
    """Which rank of a plan holds what; n segments, all ranks one after the other."""

    def __init__(self, plan: ShardPlan) -> None:
        calls = [call for shard in plan.shards for call in shard.calls]
        sizes = [len(call) for call in calls]
        self.segments = np.concatenate(calls, dtype=SEGMENT)  # to find out the dtype takes five times as long
        """SEGMENT [n]."""
        self.ranks = np.repeat(np.repeat(np.arange(len(plan.shards)), len(plan.call_sets)), sizes)
        """int64 [n]."""
        is_tail = np.diff(plan.call_sets, prepend=-1) == 0
        self.tails = np.repeat(np.tile(is_tail, len(plan.shards)), sizes).astype(np.int64)
        """int64 [n]: 1 in tail calls, the second ones of a set of documents."""
        self.cp, self.lengths = len(plan.shards), plan.lengths
        self.seen = np.zeros((len(plan.lengths), self.cp), np.int64)
        """int64 [documents, cp]: keys of each document that the queries of each rank see."""
        np.maximum.at(self.seen, (self.segments["document"], self.ranks), self.segments["stop"])
        self.is_shared = (self.seen > 0).sum(axis=1) > 1
        """bool [documents]: on several ranks."""

    def of_documents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return segments of documents, the ranks that hold them, and which are tails."""
        (found,) = np.nonzero(np.isin(self.segments["document"], documents))
        return self.segments[found], self.ranks[found], self.tails[found]

    def rows(self) -> np.ndarray:
        """Return rows of documents that ranks receive and send, int64 [documents, 2, cp]."""
        moved = np.zeros((len(self.seen), 2, self.cp), np.int64)
        (travel,) = np.nonzero(self.is_shared[self.segments["document"]])
        segments, ranks = self.segments[travel], self.ranks[travel]
        documents, lengths = segments["document"], segments["stop"] - segments["start"]
        moved[:, 0] = self.seen * self.is_shared[:, None]
        np.subtract.at(moved[:, 0], (documents, ranks), lengths)
        # Segments do not overlap, so another rank sees all of one or nothing.
        needed = (self.seen[documents] > segments["start"][:, None]).sum(axis=1) - 1
        np.add.at(moved[:, 1], (documents, ranks), lengths * needed)
        return moved

    def by_rank(self, values: np.ndarray) -> np.ndarray:
        """Return sums of values [n, x] of segments, int64 [documents, x, cp]."""
        sums = np.zeros((len(self.seen), self.cp, values.shape[1]), np.int64)
        np.add.at(sums, (self.segments["document"], self.ranks), values)
        return sums.swapaxes(1, 2)
