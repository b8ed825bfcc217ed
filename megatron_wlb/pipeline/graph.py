"""Dependencies in a pipeline step: passes, transfers, and where a stage goes on.

A *node* ends at max(end of two earlier nodes) + its own time. A transfer begins when both sides have posted it. Stages
post and wait as in megatron-core 0.19 by default: the plain schedule sends and receives synchronously; so
does the interleaved one (`--overlap-p2p-communication`) in warm-up and cool-down, and in between it receives one pass
ahead, and waits for an output until it is sent, and for a gradient until after the next backward. With
`Schedule.overlap_transfers` it receives ahead throughout (`--overlap-p2p-communication-warmup-flush`) and waits for no
send. Passes that run by turns (`Schedule.by_turns`) are a pair: they begin when the inputs of both are there,
run here one after the other, and send when both have ended. Tests compare this with upstream's own functions.
`passes_of` leaves transfers out.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_wlb.pipeline.schedule import Schedule

NONE = -1
"""No node: the beginning of the step."""
PASS, TRANSFER, RESUME = range(3)
"""Kinds of nodes: a pass, the transfer of its result, and the point where its stage goes on. Of n passes, pass i
(numbered as in `Timeline`) has the nodes PASS * n + i, TRANSFER * n + i and RESUME * n + i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in topological order, which does not depend on their times."""

    nodes: np.ndarray
    """int64 [nodes]: kind and pass in one number, see `PASS`."""
    first: np.ndarray
    second: np.ndarray


@lru_cache(maxsize=16)
def graph_of(schedule: Schedule) -> Graph:
    """Return the graph of a schedule. O(passes * log(passes)), vectorised."""
    chains = _chains(schedule)
    num, senders = chains.ids.size, chains.senders
    first, second = np.full(3 * num, NONE), np.full(3 * num, NONE)
    if schedule.num_chunks == 1:
        waits = _plain(chains)
    else:
        waits = (_hidden if schedule.overlap_transfers else _interleaved)(schedule, chains)
    forward, backward = pairs = _pairs(schedule, chains)
    posts = _posts(schedule, chains, *pairs)
    waits.sync[forward], waits.sync[backward] = forward, posts[backward]
    first[:num], second[:num] = waits.arrival, np.where(chains.before != NONE, waits.after[chains.before], NONE)
    sent = TRANSFER * num + senders
    of_pass = (waits.ready != NONE) & (waits.ready < num)
    first[sent], second[sent] = posts[senders], np.where(of_pass, posts[waits.ready % num], waits.ready)
    joins = np.flatnonzero(waits.extra != NONE)
    resumes = RESUME * num + joins
    first[resumes], second[resumes] = waits.sync[joins], waits.extra[joins]
    # Both passes of a pair begin when the inputs of both are there. A forward pass of a pair needs no such node itself.
    begins = RESUME * num + forward
    first[begins], second[begins], second[forward] = second[forward], waits.arrival[backward], begins
    first[backward] = NONE

    # A pair posts behind its backward pass, which has the key behind that of its forward pass.
    behind = np.repeat((9, 3) if len(forward) else (1, 1), num // 2)
    keys = np.concatenate((8 * chains.keys, 8 * chains.keys + behind, np.zeros(num, np.int64)))
    keys[resumes] = np.maximum(keys[waits.sync[joins]], keys[waits.extra[joins]]) + 1
    keys[begins] = np.maximum(*(np.where(each[begins] == NONE, 0, keys[each[begins]]) for each in (first, second))) + 1
    nodes = np.concatenate((PASS * num + np.arange(num), sent, resumes, begins))
    nodes = nodes[np.argsort(keys[nodes].astype(np.int32))]
    place = np.zeros(3 * num + 1, np.int64)  # place[NONE] is the beginning of the step
    place[nodes] = 1 + np.arange(len(nodes))
    before = np.stack((place[first[nodes]], place[second[nodes]]))
    assert (before <= np.arange(len(nodes))).all(), schedule
    return Graph(nodes=nodes, first=before[0], second=before[1])


def _pairs(schedule: Schedule, chains: "_Chains") -> tuple[np.ndarray, np.ndarray]:
    """Return forward and backward passes that run by turns (`Schedule.by_turns`), int64 [pairs] each."""
    none = np.empty(0, np.int64)
    if not schedule.by_turns or schedule.num_stages == 1:  # nothing is sent
        return none, none
    phases = _phases(schedule, chains)
    steady = [passes[phases.steady[passes]] for passes in phases.by_turn.reshape(2, -1)]
    return steady[0], steady[1]


def _posts(schedule: Schedule, chains: "_Chains", forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the node after which a pass posts its send and receive, int64 [passes].

    A pair posts when both passes have ended: first for the forward pass, then for the backward pass, and in between it
    waits for the first send without `Schedule.overlap_transfers`.
    """
    posts, sends = np.arange(chains.ids.size), np.zeros(chains.ids.size, bool)
    sends[chains.senders] = not schedule.overlap_transfers
    posts[forward] = backward
    posts[backward] = np.where(sends[forward], TRANSFER * len(posts) + forward, backward)
    return posts


@dataclass(frozen=True, slots=True, kw_only=True)
class PassGraph:
    """Passes alone: each waits for the previous one of its stage and its sender.

    int32 [passes] in topological order; the last pass ends last. Ends are kept in slots that later passes reuse.
    """

    first: np.ndarray
    second: np.ndarray
    """Slots of the ends that a pass waits for; the last slot is the beginning of the step."""
    end: np.ndarray
    time: np.ndarray
    """Which time it takes: 2 * micro-batch + backward."""
    num_slots: int


@lru_cache(maxsize=64)
def passes_of(schedule: Schedule) -> PassGraph:
    """Return the graph of a schedule whose transfers take no time."""
    chains = _chains(schedule)
    num = chains.ids.size
    sender, place = np.full(num, NONE), np.full(num + 1, NONE)
    sender[chains.receivers] = chains.senders
    order = np.argsort(chains.keys, kind="stable")
    place[order] = np.arange(num)
    waits = place[np.stack((sender[order], chains.before[order]))]  # [2, passes]
    reach = int((np.arange(num) - waits).max(where=waits != NONE, initial=0)) + 1
    slots = np.where(waits == NONE, reach, waits % reach).astype(np.int32)
    backward, micro_batch = order // chains.ids[0].size, order % schedule.micro_batches_per_rank
    return PassGraph(
        first=slots[0],
        second=slots[1],
        end=(np.arange(num) % reach).astype(np.int32),
        time=(2 * micro_batch + backward).astype(np.int32),
        num_slots=reach + 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """Passes in the order of their stage, and of their micro-batch."""

    ids: np.ndarray
    """int64 [directions, stages, chunks, micro-batches]: 0, 1, 2, ..."""
    turns: np.ndarray
    """Shaped as `ids`: see `Schedule.turns`."""
    keys: np.ndarray
    """int64 [passes]: greater than for every pass before it, on the stage or for the micro-batch."""
    before: np.ndarray
    """int64 [passes]: the pass before on the same stage, or NONE."""
    senders: np.ndarray
    receivers: np.ndarray
    """int64 [transfers]: the result of the one is sent to the other, on another stage."""


def _chains(schedule: Schedule) -> _Chains:
    stages, chunks, count = schedule.num_stages, schedule.num_chunks, schedule.micro_batches_per_rank
    ids = np.arange(2 * stages * chunks * count).reshape(2, stages, chunks, count)
    turns = np.stack([schedule.turns(s) for s in range(stages)], axis=1)
    by_turn = np.argsort(turns.swapaxes(0, 1).reshape(stages, -1), axis=1)
    sequence = np.take_along_axis(ids.swapaxes(0, 1).reshape(stages, -1), by_turn, axis=1)
    before = np.full(ids.size, NONE)
    before[sequence[:, 1:]] = sequence[:, :-1]

    # Micro-batches pass through the virtual stages, then back; where they turn round, nothing is sent.
    ways = ids.swapaxes(1, 2).reshape(2, stages * chunks, count)
    ways = np.concatenate((ways[:1], ways[1:, ::-1]))
    hops = (ways[:, :-1], ways[:, 1:]) if stages > 1 else (ways[:, :0], ways[:, :0])
    # A forward pass comes 1 (plain) or 2 turns after that of the stage before it, a backward pass as much earlier.
    keys = turns + (1 if chunks == 1 else 2) * np.arange(stages)[:, None, None]
    senders, receivers = (hop.ravel() for hop in hops)
    return _Chains(ids=ids, turns=turns, keys=keys.ravel(), before=before, senders=senders, receivers=receivers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """Nodes (or NONE) that passes and transfers wait for, int64 [passes] unless stated."""

    arrival: np.ndarray
    """A pass, for the transfer of its input."""
    sync: np.ndarray
    extra: np.ndarray
    """After a pass, its stage goes on when both have ended."""
    ready: np.ndarray
    """int64 [transfers]: posted by the receiver after it."""

    @property
    def after(self) -> np.ndarray:
        """The point where the stage goes on: a node of its own only if it waits for two."""
        num = len(self.sync)
        return np.where(self.extra == NONE, self.sync, RESUME * num + np.arange(num))


def _plain(chains: _Chains) -> _Waits:
    num, senders, receivers = chains.ids.size, chains.senders, chains.receivers
    arrival, sync = np.full(num, NONE), np.arange(num)
    arrival[receivers] = sync[senders] = TRANSFER * num + senders
    previous = chains.before[receivers]
    # Two passes of the same direction: first a send, then a receive. Otherwise both at once.
    backward = np.arange(num) >= chains.ids[0].size
    ready = np.where((previous != NONE) & (backward[previous] == backward[receivers]), sync[previous], previous)
    return _Waits(arrival=arrival, sync=sync, extra=np.full(num, NONE), ready=ready)


def _interleaved(schedule: Schedule, chains: _Chains) -> _Waits:
    ids, senders, receivers = chains.ids, chains.senders, chains.receivers
    _, stages, chunks, count = ids.shape
    num, total = ids.size, chunks * count
    by_turn, turn, direction, stage, warm_up, steady, corner = _phases(schedule, chains)

    # A receive is posted after the pass before, or around the corner stages - 1 passes after the sender's number.
    slot = turn[senders] + np.where(corner, stages - 1, -1)
    posted = np.where(slot >= 0, by_turn[direction[receivers], stage[receivers], slot], NONE)
    received = np.full(num, NONE)
    received[posted[slot >= 0]] = TRANSFER * num + senders[slot >= 0]

    # After warm-up forward and cool-down backward, wait for both; after a steady backward, for the send of the one
    # before.
    sends = np.zeros(num, bool)
    sends[senders] = True
    sync = np.arange(num) + np.where(sends & ((direction == 0) | ~steady), TRANSFER, PASS) * num
    extra = np.where(steady, NONE, received)
    late, now = by_turn[1:, :, :-1].ravel(), by_turn[1:, :, 1:].ravel()
    late, now = late[sends[late] & steady[now]], now[sends[late] & steady[now]]
    extra[now] = TRANSFER * num + late

    # What was received in steady state is waited for by the pass that takes it, but around the corner in the order of
    # the receives.
    arrival = np.full(num, NONE)
    ahead = ~corner & ((slot < 0) | steady[posted])
    arrival[receivers[ahead]] = TRANSFER * num + senders[ahead]
    _around_the_corner(arrival, received, by_turn, steady, receivers)

    # The first gradient is received after the warm-up: ahead, or at once if there is nothing else to do.
    waits = _Waits(arrival=arrival, sync=sync, extra=extra, ready=posted)
    first = np.flatnonzero((slot < 0) & (direction[receivers] == 1))
    last = by_turn[0, stage[receivers[first]], warm_up[stage[receivers[first]]] - 1]
    idle = warm_up[stage[receivers[first]]] == total
    posted[first] = np.where(idle, sync[last], waits.after[last])
    arrival[receivers[first[idle]]] = NONE
    extra[last[idle]] = TRANSFER * num + senders[first[idle]]
    return waits


def _hidden(schedule: Schedule, chains: _Chains) -> _Waits:
    """Return waits of an interleaved pipeline with `Schedule.overlap_transfers`.

    In warm-up and cool-down, the input of a pass is received as the previous pass begins; else after a pass.
    """
    senders, receivers, before, num = chains.senders, chains.receivers, chains.before, chains.ids.size
    by_turn, turn, direction, stage, warm_up, steady, corner = _phases(schedule, chains)

    # A pass before which the next one's input is received begins when its own has arrived.
    arrival, extra = np.full(num, NONE), np.full(num, NONE)
    arrival[receivers[~corner]] = TRANSFER * num + senders[~corner]
    previous = np.where(turn > 0, by_turn[direction, stage, turn - 1], NONE)
    early = ~corner & (previous[receivers] != NONE) & ~steady[previous[receivers]]
    begins = previous[receivers[early]]
    after = before[begins]
    extra[after[after != NONE]] = arrival[begins[after != NONE]]
    ready = previous[receivers]
    ready[early] = np.where(after == NONE, arrival[begins], RESUME * num + after)
    first = np.flatnonzero(~corner & (ready == NONE) & (direction[receivers] == 1))
    of_first = stage[receivers[first]]
    ready[first] = by_turn[0, of_first, warm_up[of_first] - 1]

    # Around the corner in the order of the receives, each stages - 1 passes after the sender's number.
    sent, got = senders[corner], receivers[corner]
    ready[corner] = by_turn[direction[got], stage[got], turn[sent] + schedule.num_stages - 1]
    received = np.full(num, NONE)
    received[ready[corner]] = TRANSFER * num + sent
    _around_the_corner(arrival, received, by_turn, np.ones(num, bool), receivers)
    return _Waits(arrival=arrival, sync=np.arange(num), extra=extra, ready=ready)


class _Phases(NamedTuple):
    """Passes of an interleaved pipeline by phase; [passes] unless stated otherwise."""

    by_turn: np.ndarray
    """int64 [directions, stages, passes of one direction]: the k-th pass."""
    turn: np.ndarray
    """Its inverse."""
    direction: np.ndarray
    stage: np.ndarray
    warm_up: np.ndarray
    """int64 [stages]: forward passes before the first backward."""
    steady: np.ndarray
    """Neither a forward pass of the warm-up nor a backward pass of the cool-down."""
    corner: np.ndarray
    """bool [transfers]: from the last stage to the first in forward, the other way in backward."""


def _phases(schedule: Schedule, chains: _Chains) -> _Phases:
    directions, stages, chunks, count = chains.ids.shape
    num, total = chains.ids.size, chunks * count
    by_turn = chains.turns.reshape(directions, stages, total).argsort(axis=2)
    by_turn += chains.ids[:, :, :1, 0]
    turn = np.empty(num, np.int64)
    turn[by_turn] = np.arange(total)
    direction, stage, _, _ = np.unravel_index(np.arange(num), chains.ids.shape)
    warm_up = np.array([min(total, schedule.warm_up(s)) for s in range(stages)])
    steady = np.where(direction == 0, turn >= warm_up[stage], turn < total - warm_up[stage])
    corner = stage[chains.receivers] == np.where(direction[chains.receivers] == 0, 0, stages - 1)
    return _Phases(by_turn, turn, direction, stage, warm_up, steady, corner)


def _around_the_corner(
    arrival: np.ndarray, received: np.ndarray, by_turn: np.ndarray, ahead: np.ndarray, receivers: np.ndarray
) -> None:
    """Write into `arrival` the nodes that the first stage, and backward of the last, wait for.

    These passes take inputs that were `received` after passes that look `ahead`, in the order of the receives.
    """
    takes = np.zeros(len(arrival), bool)
    takes[receivers] = True
    for d, of_stages in enumerate(by_turn):
        pending: deque[int] = deque()
        for i in of_stages[0 if d == 0 else -1].tolist():
            if takes[i] and pending:
                arrival[i] = pending.popleft()
            if ahead[i] and received[i] != NONE:
                pending.append(received[i])
