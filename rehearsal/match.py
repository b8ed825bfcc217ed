"""Whether the NCCL calls of all ranks of a job match, and none waits for ever: their records, played together.

Kernels take no time. A call begins when its stream, and the hardware queue that the stream shares, have come to it; it
ends when all its ranks have begun. That is the pessimistic reading: NCCL may buffer what is small.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rehearsal.record import SYNCS, Kind, members


class Call(NamedTuple):
    """An operation of NCCL, or the making of a communicator."""

    rank: int
    kind: Kind
    group: tuple[str, tuple[int, ...]]
    """The communicator: its key, and its ranks."""
    same: tuple[int, int, int]
    """What its ranks must agree on: elements, type, and root or reduction."""
    peer: int
    """The other rank of a transfer."""
    where: tuple[str, str]
    """Source line, step and pass."""

    def __str__(self) -> str:
        line, at = self.where
        return f"rank {self.rank} {self.kind.name.lower()} of {self.same[0]} values at {line} ({at})"


Item = tuple[Kind, int, int, list[Call]]
"""What a host does: kind, stream, event, and the calls of a group."""


def program(result: dict[str, Any], records: np.ndarray) -> list[Item]:
    """Return what a rank's host does, in order; calls of a group are one item."""
    groups, lines, rank = members(result), [tuple(line) for line in result["lines"]], result["rank"]
    items: list[Item] = []
    depth, calls, begun = 0, [], 0
    for kind, where, stream, thing, amount, kind_of, peer in records.tolist():
        kind = Kind(kind)
        if kind == Kind.GROUP_BEGIN:
            depth += 1
        elif kind == Kind.GROUP_END:
            depth -= 1
        elif kind >= Kind.ALL_REDUCE:
            key, ranks = groups[thing]
            moves = kind in (Kind.SEND, Kind.RECEIVE)
            same = (amount, kind_of, 0 if moves else peer)
            calls.append(Call(rank, kind, (key, ranks), same, ranks[peer] if moves else -1, lines[where]))
            begun = stream
        elif kind == Kind.COMMUNICATOR:
            items.append((kind, 0, 0, [Call(rank, kind, groups[thing], (0, kind_of, 0), -1, lines[where])]))
        elif kind in (Kind.KERNEL, Kind.RECORD, Kind.WAIT, *SYNCS):
            items.append((kind, stream, thing, []))
        if not depth and calls:
            items.append((Kind.ALL_REDUCE, begun, 0, calls))
            calls = []
    return items


def match(programs: Mapping[int, list[Item]], one_queue: bool) -> list[str]:
    """Return what is wrong with the calls of ranks, [] if nothing; others are taken to call what their kind calls.

    `one_queue`: all streams share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """
    played = _Play(programs, one_queue)
    return played.wrong or played.waiting()


class _Play:
    def __init__(self, programs: Mapping[int, list[Item]], one_queue: bool) -> None:
        self._programs, self._one_queue = programs, one_queue
        self._host = dict.fromkeys(programs, 0)
        self._queues: dict[int, dict[int, deque[Any]]] = {rank: defaultdict(deque) for rank in programs}
        self._issued: dict[int, Counter[int]] = {rank: Counter() for rank in programs}
        self._ended: dict[int, Counter[int]] = {rank: Counter() for rank in programs}
        # Calls left of the group that runs on a stream.
        self._open: dict[int, dict[int, int]] = {rank: {} for rank in programs}
        self._events: dict[int, dict[int, tuple[int, int]]] = {rank: {} for rank in programs}
        self._there: dict[Any, dict[Any, deque[Any]]] = defaultdict(lambda: defaultdict(deque))
        self._made: dict[int, set[Any]] = {rank: set() for rank in programs}
        self._work = deque(programs)
        self.wrong: list[str] = []
        while self._work and not self.wrong:
            self._advance(self._work.popleft())

    def waiting(self) -> list[str]:
        """Return what ranks wait for that have not come to their end."""
        found = []
        for rank, program in self._programs.items():
            heads = [queue[0] for queue in self._queues[rank].values() if queue]
            open_calls = [call for each in self._there.values() for calls in each.values() for call, _ in calls]
            mine = [call for call in open_calls if call.rank == rank]
            if mine:
                found.append(f"{mine[0]} waits for ever")
            elif heads or self._host[rank] < len(program):
                found.append(f"rank {rank} waits behind that, at {self._host[rank]} of {len(program)}")
        return sorted(found, key=lambda text: "behind" in text)

    def _advance(self, rank: int) -> None:
        moved = True
        while moved:
            moved = False
            while self._host[rank] < len(self._programs[rank]) and self._issue(rank):
                self._host[rank] += 1
                moved = True
            for queue in [*self._queues[rank].values()]:
                while queue and self._begin(rank, queue[0]):
                    queue.popleft()
                    moved = True

    def _issue(self, rank: int) -> bool:
        """Let the host do its next item; False if it must wait."""
        kind, stream, event, calls = self._programs[rank][self._host[rank]]
        if kind == Kind.COMMUNICATOR:
            return self._meets(calls[0])
        if kind == Kind.RECORD:
            self._events[rank][event] = stream, self._issued[rank][stream]
        elif kind == Kind.SYNC_STREAM:
            return self._ended[rank][stream] >= self._issued[rank][stream]
        elif kind == Kind.SYNC_DEVICE:
            return all(self._ended[rank][s] >= n for s, n in self._issued[rank].items())
        elif kind == Kind.SYNC_EVENT:
            of, number = self._events[rank].get(event, (0, 0))
            return self._ended[rank][of] >= number
        else:
            queue = self._queues[rank][0 if self._one_queue else stream]
            if kind == Kind.WAIT:
                queue.append((kind, *self._events[rank].get(event, (0, 0)), calls))
            else:
                self._issued[rank][stream] += bool(calls)
                queue.append((kind, stream, self._issued[rank][stream] - bool(calls), calls))
        return True

    def _begin(self, rank: int, head: tuple[Kind, int, int, list[Call]]) -> bool:
        """Begin what is first in a queue; False if its stream has not come to it."""
        _, stream, needed, calls = head
        if self._ended[rank][stream] < needed:
            return False
        if calls:
            self._open[rank][stream] = len(calls)
            for call in calls:
                self._come(call, stream)
        return True

    def _meets(self, call: Call) -> bool:
        """Whether all ranks of a communicator have come to make it."""
        if call.group not in self._made[call.rank]:
            self._made[call.rank].add(call.group)
            self._there["made", call.group][call.rank].append((call, 0))
            if all(self._there["made", call.group][r] for r in self._members(call)):
                del self._there["made", call.group]
                self._work.extend(self._members(call))
        return ("made", call.group) not in self._there

    def _members(self, call: Call) -> list[int]:
        return [rank for rank in call.group[1] if rank in self._programs]

    def _come(self, call: Call, stream: int) -> None:
        moves = call.kind in (Kind.SEND, Kind.RECEIVE)
        ends = (call.rank, call.peer) if call.kind == Kind.SEND else (call.peer, call.rank)
        there = self._there[(call.group, ends) if moves else call.group]
        there[call.kind if moves else call.rank].append((call, stream))
        sides: Sequence[Any] = self._members(call)
        if moves:
            sides = (Kind.SEND, Kind.RECEIVE) if call.peer in self._programs else (call.kind,)
        while all(there[side] for side in sides):
            met = [there[side].popleft() for side in sides]
            kinds = {(None if moves else each.kind, each.same) for each, _ in met}
            if len(kinds) > 1:
                usual = Counter((each.kind, each.same) for each, _ in met).most_common(1)[0][0]
                odd = next(each for each, _ in met if moves or (each.kind, each.same) != usual)
                other = next(each for each, _ in met if each is not odd)
                self.wrong.append(f"{odd} meets {other}")
            for each, of in met:
                self._open[each.rank][of] -= 1
                if not self._open[each.rank][of]:
                    self._ended[each.rank][of] += 1
                    self._work.append(each.rank)
