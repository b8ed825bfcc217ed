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

from megatron_wlb.cost.attention import KernelModel
from megatron_wlb.plan.sharding.chunks import chunk_bounds, mirrored_chunks
from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan


def hybrid(lengths: np.ndarray, cp: int, num_long: int, kernel: KernelModel) -> ShardPlan | None:
    """Shard the `num_long` longest of the documents of `lengths` (int64 [n]) per document, the others whole.

    The sum of the lengths must be divisible by 2 * cp. None if the last long document is too short to level the
    ranks. The reference of `csrc/sharding.cpp`.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = np.zeros((len(lengths), 2 * cp), np.int64)
    tokens = np.zeros(cp, np.int64)
    pointer = 0
    for document in order[: max(0, num_long - 1)]:
        sizes[document], pointer = _tiled(int(lengths[document]), 2 * cp, kernel.tile_rows, pointer)
        tokens += _by_rank(sizes[document])
    if num_long:
        document = order[num_long - 1]
        share, extra = divmod(int(tokens.sum() + lengths[document]), cp)
        missing = share + (np.arange(cp) < extra) - tokens
        if missing.min() < 0:
            return None
        head = missing // 2 // kernel.tile_rows * kernel.tile_rows
        sizes[document] = np.concatenate((head, (missing - head)[::-1]))
    shards = mirrored_chunks(chunk_bounds(sizes))
    room = lengths.sum() // cp - _by_rank(sizes).sum(0)
    pieces = _place(lengths, order[num_long:], room, shards, kernel)
    return ShardPlan(
        lengths=lengths,
        shards=tuple(
            Shard(calls=(np.sort(np.append(s.calls[0], _segments(own))), s.calls[1]))
            for s, own in zip(shards, pieces, strict=True)
        ),
        strategy="hybrid",
    )


def _tiled(length: int, num_chunks: int, tile: int, pointer: int) -> tuple[np.ndarray, int]:
    """Chunks of whole tiles, and where the rotating pointer stands after their remainder, dealt out tile by tile."""
    base = length // (num_chunks * tile) * tile
    tiles, rows = divmod(length - num_chunks * base, tile)
    sizes = np.full(num_chunks, base)
    sizes[(pointer + np.arange(tiles)) % num_chunks] += tile
    sizes[(pointer + tiles) % num_chunks] += rows
    return sizes, (pointer + tiles + (rows > 0)) % num_chunks


def _by_rank(sizes: np.ndarray) -> np.ndarray:
    """[..., 2 * cp] -> [..., cp]: rank r holds chunks r and 2 * cp - 1 - r."""
    cp = sizes.shape[-1] // 2
    return sizes[..., :cp] + sizes[..., : cp - 1 : -1]


def _place(
    lengths: np.ndarray, documents: np.ndarray, room: np.ndarray, shards: tuple[Shard, ...], kernel: KernelModel
) -> list[list[tuple[int, int, int]]]:
    """Segments of the short documents, given longest first, for every rank; `room` counts down to 0."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in shards]
    counts = np.array([kernel.count(np.concatenate(s.calls)) for s in shards])
    own = np.array([kernel.count(_segments([(d, 0, lengths[d])])) for d in documents]).reshape(-1, 2)
    left, tokens_left = own.sum(0), int(lengths[documents].sum())
    for document, (own_tiles, own_query_tiles) in zip(documents.tolist(), own, strict=True):
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
            pieces[rank].append((document, start, stop))
            counts[rank] += kernel.count(_segments([(document, start, stop)]))
            room[rank] -= stop - start
            start = stop
    return pieces


def _segments(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, SEGMENT)
