"""Whether the NCCL calls of all ranks of a job match, and none waits for ever: their records, played together.

Kernels take no time. A call begins when its stream, and the hardware queue that the stream shares, have come to it; it
ends when all its ranks have begun. That is the pessimistic reading: NCCL may buffer small messages.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rehearsal.record import SYNCS, Kind

MAKING = -1
"""Stands for the stream, with a queue of its own, in which a rank makes communicators."""


class Call(NamedTuple):
    """An operation of NCCL, or the making of a communicator."""

    rank: int
    kind: Kind
    group: tuple[str, tuple[int, ...]]
    """The communicator: its key, and its ranks."""
    same: tuple[int, int, int]
    """Values that its ranks must agree on: elements, type, and root or reduction."""
    peer: int
    """The other rank of a transfer."""
    where: tuple[str, str]
    """Source line, step and pass."""

    def __str__(self) -> str:
        line, at = self.where
        return f"rank {self.rank} {self.kind.name.lower()} of {self.same[0]} values at {line} ({at})"


Item = tuple[Kind, int, int, list[Call]]
"""An action of a host: kind, stream, event, and the calls of a group."""


def program(result: dict[str, Any], records: np.ndarray) -> list[Item]:
    """Return the actions of a rank's host, in order; calls of a group are one item."""
    groups = {int(number): (key, tuple(ranks)) for number, (key, ranks) in result["communicators"].items()}
    lines, rank = [tuple(line) for line in result["lines"]], result["rank"]
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
            made = Call(rank, kind, groups[thing], (0, kind_of, 0), -1, lines[where])
            items += [(kind, MAKING, 0, [made]), (Kind.SYNC_STREAM, MAKING, 0, [])]  # for which the host waits
        elif kind in (Kind.KERNEL, Kind.RECORD, Kind.WAIT, *SYNCS):
            items.append((kind, stream, thing, []))
        if not depth and calls:
            items.append((Kind.ALL_REDUCE, begun, 0, calls))
            calls = []
    return items


def match(programs: Mapping[int, list[Item]], one_queue: bool) -> list[str]:
    """Return the faults in the calls of ranks, [] if none; other ranks are taken to make the calls of their kind.

    `one_queue`: all streams share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """
    played = _Play(programs, one_queue)
    return played.wrong or played.waiting()


class _Play:
    def __init__(self, programs: Mapping[int, list[Item]], one_queue: bool) -> None:
        self._programs, self._one_queue = programs, one_queue
        self._host = dict.fromkeys(programs, 0)
        self._queues: dict[int, dict[int, deque[Any]]] = {rank: defaultdict(deque) for rank in programs}
        # Calls by stream.
        self._issued: dict[int, Counter[int]] = {rank: Counter() for rank in programs}
        self._ended: dict[int, Counter[int]] = {rank: Counter() for rank in programs}
        self._events: dict[int, dict[int, tuple[int, int]]] = {rank: {} for rank in programs}
        self._there: dict[Any, dict[Any, deque[Any]]] = defaultdict(lambda: defaultdict(deque))
        self._work = deque(programs)
        self.wrong: list[str] = []
        while self._work and not self.wrong:
            self._advance(self._work.popleft())

    def waiting(self) -> list[str]:
        """Return the calls that unfinished ranks wait for."""
        found = []
        there = [call for each in self._there.values() for calls in each.values() for call, _ in calls]
        for rank, program in self._programs.items():
            mine = next((call for call in there if call.rank == rank), None)
            if mine:
                found.append(f"{mine} waits for ever")
            elif any(self._queues[rank].values()) or self._host[rank] < len(program):
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
                # What is first begins once its stream has come to it.
                while queue and self._ended[rank][queue[0][0]] >= queue[0][1]:
                    stream, _, calls = queue.popleft()
                    for call in calls:
                        self._come(call, stream)
                    moved = True

    def _issue(self, rank: int) -> bool:
        """Let the host do its next item; False if it must wait."""
        kind, stream, event, calls = self._programs[rank][self._host[rank]]
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
            waits_for = stream, self._issued[rank][stream]
            if kind == Kind.WAIT:
                waits_for = self._events[rank].get(event, (0, 0))
            self._queues[rank][min(stream, 0) if self._one_queue else stream].append((*waits_for, calls))
            self._issued[rank][stream] += len(calls)
        return True

    def _come(self, call: Call, stream: int) -> None:
        moves = call.kind in (Kind.SEND, Kind.RECEIVE)
        ends = (call.rank, call.peer) if call.kind == Kind.SEND else (call.peer, call.rank)
        there = self._there[(call.group, ends) if moves else call.group]
        there[call.kind if moves else call.rank].append((call, stream))
        sides: Sequence[Any] = [rank for rank in call.group[1] if rank in self._programs]
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
                self._ended[each.rank][of] += 1
                self._work.append(each.rank)
