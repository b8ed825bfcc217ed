"""Places documents in micro-batches, as csrc/place.cpp has it, whose comments say why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.packing.place import Sizes

EXCHANGES, LIGHTEST = 200, 4


def place(lengths: np.ndarray, work: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Rows of documents, ordered by micro-batch and within it, and the bounds of micro-batches."""
    columns = (lengths.tolist(), work.tolist(), [0] * len(lengths))
    rows = [Document(*row) for row in zip(range(len(lengths)), *columns, strict=True)]
    return place_in_order(longest_first(rows), sizes)


@dataclass(frozen=True, slots=True)
class Document:
    index: int
    length: int
    work: int
    arrival: int


def longest_first(documents: Iterable[Document]) -> list[Document]:
    return sorted(documents, key=lambda d: (-d.length, d.index))


class Bins:
    """Micro-batches under construction, of every rank: work and tokens of each."""

    def __init__(self, sizes: Sizes) -> None:
        each = sizes.num_micro_batches // sizes.ranks
        self._sizes = sizes
        self.work = [[0] * each for _ in range(sizes.ranks)]
        self.tokens = [[0] * each for _ in range(sizes.ranks)]
        self.cost = [0] * sizes.ranks
        """As `placement.rank_cost` has it."""
        self.total_work, self.total_tokens = 0, 0
        self.work_weighted_tokens = 0.0
        """Sum of length * work over the documents; see `delay._Step._judged`."""

    def copy(self) -> "Bins":
        other = Bins(self._sizes)
        other.work, other.tokens = ([list(each) for each in lists] for lists in (self.work, self.tokens))
        other.cost, other.work_weighted_tokens = list(self.cost), self.work_weighted_tokens
        other.total_work, other.total_tokens = self.total_work, self.total_tokens
        return other

    def next(self) -> tuple[int, int]:
        rank = self.cost.index(min(self.cost))
        return rank, self.work[rank].index(min(self.work[rank]))

    def next_with_room(self, length: int) -> tuple[int, int] | None:
        room = self._sizes.max_tokens - length
        ranks = [r for r, tokens in enumerate(self.tokens) if min(tokens) <= room]
        if not ranks:
            return None
        rank = min(ranks, key=lambda r: (self.cost[r], r))
        fitting = (i for i, tokens in enumerate(self.tokens[rank]) if tokens <= room)
        return rank, min(fitting, key=lambda i: (self.work[rank][i], i))

    def add(self, document: Document, rank: int, i: int) -> None:
        self.change(rank, i, document.work, document.length)
        self.total_work += document.work
        self.total_tokens += document.length
        self.work_weighted_tokens += float(document.length) * float(document.work)

    def change(self, rank: int, i: int, work: int, tokens: int) -> None:
        self.work[rank][i] += work
        self.tokens[rank][i] += tokens
        self.cost[rank] = self.cost_of(self.work[rank])

    def cost_of(self, works: Sequence[int]) -> int:
        return self._sizes.total_weight * sum(works) + self._sizes.largest_weight * max(works)

    def cost_after(self, here: tuple[int, int], there: tuple[int, int], work: int) -> int:
        """Of the costlier one of two ranks, once so much work has gone from a micro-batch to another."""
        works = {rank: list(self.work[rank]) for rank, _ in (here, there)}
        works[here[0]][here[1]] -= work
        works[there[0]][there[1]] += work
        return max(map(self.cost_of, works.values()))


def even_cost(work: float, sizes: Sizes) -> float:
    total, largest = float(sizes.total_weight), float(sizes.largest_weight)
    return total * (work / sizes.ranks) + largest * (work / sizes.num_micro_batches)


def place_in_order(documents: Iterable[Document], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    bins = Bins(sizes)
    held: list[list[list[Document]]] = [[[] for _ in works] for works in bins.work]
    for document in documents:
        place = bins.next_with_room(document.length)
        if place is not None:
            bins.add(document, *place)
            held[place[0]][place[1]].append(document)
    _refine(held, bins, sizes)
    micro_batches = [sorted(each, key=lambda d: d.index) for of_rank in held for each in of_rank]
    order = [d.index for each in micro_batches for d in each]
    return np.array(order, np.int64), np.cumsum([0, *map(len, micro_batches)], dtype=np.int64)


def _refine(held: list[list[list[Document]]], bins: Bins, sizes: Sizes) -> None:
    least = even_cost(float(bins.total_work), sizes)
    for _ in range(EXCHANGES):
        worst = bins.cost.index(max(bins.cost))
        if float(bins.cost[worst]) <= 1.0002 * least:
            return
        heavy = bins.work[worst].index(max(bins.work[worst]))
        others = sorted((r for r in range(sizes.ranks) if r != worst), key=lambda r: (bins.cost[r], r))[:LIGHTEST]
        here, lightest = (worst, heavy), [(r, bins.work[r].index(min(bins.work[r]))) for r in others]
        if sizes.largest_weight:
            inside = sorted(range(len(bins.work[worst])), key=lambda i: (bins.work[worst][i], i))
            lightest += [(worst, i) for i in inside[:LIGHTEST] if i != heavy]
        best, exchange = bins.cost[worst], None
        for rank, i in lightest:
            for a, down in enumerate(held[worst][heavy]):
                for b in range(-1, len(held[rank][i])):
                    up = held[rank][i][b] if b >= 0 else None
                    work, tokens = down.work - (up.work if up else 0), down.length - (up.length if up else 0)
                    if work <= 0 or not _have_room(bins, here, (rank, i), tokens, sizes.max_tokens):
                        continue
                    cost = bins.cost_after(here, (rank, i), work)
                    if cost < best:
                        best, exchange = cost, (rank, i, a, b)
        if exchange is None:
            return
        rank, i, a, b = exchange
        down = held[worst][heavy].pop(a)
        moved = [held[rank][i].pop(b)] if b >= 0 else []
        held[rank][i].append(down)
        held[worst][heavy] += moved
        work, tokens = (getattr(down, name) - sum(getattr(d, name) for d in moved) for name in ("work", "length"))
        bins.change(worst, heavy, -work, -tokens)
        bins.change(rank, i, work, tokens)


def _have_room(bins: Bins, here: tuple[int, int], there: tuple[int, int], tokens: int, most: int) -> bool:
    return bins.tokens[there[0]][there[1]] + tokens <= most and bins.tokens[here[0]][here[1]] - tokens <= most
