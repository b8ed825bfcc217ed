"""Hybrid sharding: long documents per document, in whole tiles of the kernel; short ones whole on one rank.

Chunks of a short document waste most of their tiles, and its keys would be gathered for nothing. The paper names such a
sharding as future work (section 8). Of a long document every rank holds a head and a tail chunk as in per-document
sharding, but chunks are multiples of the kernel's tile, so that no query tile is half empty and no diagonal is crossed
twice. The last of the long documents levels what that leaves uneven. Short documents go, longest first, to the rank
with room that would end with least predicted work if its room were filled with the average of what is left; one with
less work a token than that, to the rank that would end with most. What fits nowhere is cut to fill the ranks up. Every
piece of a cut document but the last fills a rank, so fewer than CP documents are cut, of each one piece a rank.
"""

import numpy as np

from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan
from megatron_wlb.plan.workload import KernelModel


def hybrid(lengths: np.ndarray, cp_size: int, num_long: int, kernel: KernelModel) -> ShardPlan | None:
    """Shard the `num_long` longest of the documents of `lengths` (int64 [n]) per document, the others whole.

    The sum of the lengths must be divisible by 2 * cp_size. None if the last long document is too short to level the
    ranks. The reference of `csrc/sharding.cpp`.
    """
    order = np.argsort(-lengths, kind="stable")
    chunks = np.zeros((len(lengths), 2 * cp_size), np.int64)
    tokens = np.zeros(cp_size, np.int64)
    pointer = 0
    for document in order[: max(0, num_long - 1)]:
        chunks[document], pointer = _tiled(int(lengths[document]), 2 * cp_size, kernel.tile_rows, pointer)
        tokens += _by_rank(chunks[document])
    if num_long:
        document = order[num_long - 1]
        share, extra = divmod(int(tokens.sum() + lengths[document]), cp_size)
        missing = share + (np.arange(cp_size) < extra) - tokens
        if missing.min() < 0:
            return None
        head = missing // 2 // kernel.tile_rows * kernel.tile_rows
        chunks[document] = np.concatenate((head, (missing - head)[::-1]))
    long = order[:num_long]
    bounds = np.zeros((len(lengths), 2 * cp_size + 1), np.int64)
    np.cumsum(chunks, axis=1, out=bounds[:, 1:])
    heads = [[(d, bounds[d, r], bounds[d, r + 1]) for d in long] for r in range(cp_size)]
    tails = [[(d, bounds[d, -2 - r], bounds[d, -1 - r]) for d in long] for r in range(cp_size)]
    room = np.full(cp_size, lengths.sum() // cp_size) - _by_rank(chunks).sum(0)
    _place(lengths, order[num_long:], room, heads, tails, kernel)
    shards = tuple(Shard(colours=(_colour(h), _colour(t))) for h, t in zip(heads, tails, strict=True))
    return ShardPlan(lengths=lengths, shards=shards, strategy="hybrid")


def _tiled(length: int, num_chunks: int, tile: int, pointer: int) -> tuple[np.ndarray, int]:
    """Chunks of whole tiles, and where the rotating pointer stands after their remainder, dealt out tile by tile."""
    base = length // (num_chunks * tile) * tile
    tiles, rows = divmod(length - num_chunks * base, tile)
    chunks = np.full(num_chunks, base)
    chunks[(pointer + np.arange(tiles)) % num_chunks] += tile
    chunks[(pointer + tiles) % num_chunks] += rows
    return chunks, (pointer + tiles + (rows > 0)) % num_chunks


def _by_rank(chunks: np.ndarray) -> np.ndarray:
    """[..., 2 * cp_size] -> [..., cp_size]: rank r holds chunks r and 2 * cp_size - 1 - r."""
    cp_size = chunks.shape[-1] // 2
    return chunks[..., :cp_size] + chunks[..., : cp_size - 1 : -1]


def _place(
    lengths: np.ndarray,
    documents: np.ndarray,
    room: np.ndarray,
    heads: list[list[tuple[int, int, int]]],
    tails: list[list[tuple[int, int, int]]],
    kernel: KernelModel,
) -> None:
    """Append the short documents, longest first, to `heads`; `room` counts down to 0."""
    counts = np.array([kernel.count(_colour(h + t)) for h, t in zip(heads, tails, strict=True)])
    own = np.array([kernel.count(_colour([(d, 0, lengths[d])])) for d in documents]).reshape(-1, 2)
    left, tokens_left = own.sum(0), int(lengths[documents].sum())
    for document, (own_tiles, own_query_tiles) in zip(documents, own, strict=True):
        start, length = 0, int(lengths[document])
        per_token = kernel.time(0, *left) / tokens_left
        lighter = kernel.time(0, own_tiles, own_query_tiles) < per_token * length
        left, tokens_left = left - (own_tiles, own_query_tiles), tokens_left - length
        while start < length:
            whole = room >= length - start
            candidates = whole if start == 0 and whole.any() else room > 0
            end = kernel.time(0, *counts.T) + per_token * room
            rank = int(np.where(candidates, -end if lighter else end, np.inf).argmin())
            stop = min(length, start + int(room[rank]))
            heads[rank].append((document, start, stop))
            counts[rank] += kernel.count(_colour([(document, start, stop)]))
            room[rank] -= stop - start
            start = stop


def _colour(segments: list[tuple[int, int, int]]) -> np.ndarray:
    """Segments with rows, in document order."""
    colour = np.array([tuple(s) for s in sorted(segments) if s[2] > s[1]], SEGMENT)
    return colour
