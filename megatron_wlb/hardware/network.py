"""Communication times: fitted to NCCL within a node, assumed between nodes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import msgspec
import numpy as np

from megatron_wlb.settings import Count, Name, Rate, Time, checked, message_of

NOTES = {*"assumed command crossover_tokens date device error kernel_measured linear products source unit".split()}
"""Fields of files that say where their numbers come from, and do not count."""


def of_file[T](text: bytes, kind: type[T]) -> T:
    """Return the JSON of a file as a `kind`. Raises msgspec.MsgspecError for anything else.

    A field that is not read is refused: misspelt, or of another release, it would be missing without a word.
    """
    found = msgspec.json.decode(text)
    try:
        taken = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(message_of(error, found)) from None
    if strange := next(_strange(found, msgspec.to_builtins(taken)), ""):
        raise msgspec.ValidationError(f"its field {strange} is not one that this release reads; correct or remove it")
    return taken


def _strange(found: Any, taken: Any, where: str = "") -> Iterator[str]:
    """Yield the fields in JSON, at any depth, that were not taken."""
    if isinstance(found, dict):
        yield from (f"{where}{name}" for name in found if name not in taken and name not in NOTES)
        found = {name: value for name, value in found.items() if name in taken}
    elif isinstance(found, list):
        found = dict(enumerate(found))
    else:
        return
    for name, value in found.items():
        yield from _strange(value, taken[name], f"{where}{name}.")


def _moved(name: str, ranks: int) -> float:
    """Share of the whole buffer that enters every rank in a ring, as NCCL's "bus bandwidth" counts it."""
    return (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks


class Group(NamedTuple):
    """A process group: `size` ranks, `stride` apart, by TP, then CP, DP and PP."""

    size: int
    stride: int


class Collective(NamedTuple):
    """A collective within a node, measured for several numbers of ranks."""

    ranks: tuple[Count, ...]
    """Increasing."""
    latency_us: tuple[Time, ...]
    gb_per_s: tuple[Rate, ...]
    """Into a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Communication between GPUs. Times in us, sizes in bytes of the whole buffer. Raises ValueError."""

    name: Name
    all_gather: Collective
    reduce_scatter: Collective
    all_reduce: Collective
    gpus_per_node: Count = 8
    link_gb_per_s: Rate = 45.0
    """Between nodes, per GPU. Assumed: 90 % of 400 Gbit/s."""
    hop_us: Time = 10.0
    """Latency per node in a ring, and of a point-to-point message. Assumed."""

    def __post_init__(self) -> None:
        checked(self)
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            measured: Collective = getattr(self, name)
            ranks = [*measured.ranks]
            if not ranks or ranks != sorted(set(ranks)) or {*map(len, measured)} != {len(ranks)}:
                raise ValueError(
                    f"{name} is of {ranks} ranks, with {len(measured.latency_us)} latencies and "
                    f"{len(measured.gb_per_s)} rates; give one of each for increasing numbers of ranks"
                )

    def collective(self, name: str, num_bytes: np.ndarray | float, group: Group) -> np.ndarray:
        """Return the time of a collective; ranks of a node share its links."""
        num_bytes = np.asarray(num_bytes, np.float64)
        if group.size == 1:
            return np.zeros_like(num_bytes)
        local, latency, inside = self._within_node(name, group)
        nodes = -(-group.size // local)
        time = num_bytes * _moved(name, group.size) / inside
        if nodes > 1:
            latency += self.hop_us * (nodes - 1)
            time = np.maximum(time, num_bytes * _moved(name, nodes) / (local * self.link_gb_per_s))
        return latency + time / 1e3

    def all_to_all(self, group: Group, joined: int = 0, parts: tuple[int, int] = (1, 1)) -> tuple[float, float]:
        """Return an all-to-all's latency in us, and us per byte of the busiest rank.

        Within a node as an all-gather (assumed). Between nodes, every rank is sent its own copy of a row. Of `joined`
        copies of a row, to ranks drawn at random, those for a node cross once, and those for a rank are one. The ranks
        are of so many of the group's equal `parts`, drawn before them.
        """
        drawn, of = parts

        def distinct(places: float) -> float:
            if not joined:
                return 1.0
            whole = max(1, round(of / places))  # parts that are in one place
            share = min(1.0, of / places) / drawn  # of a row's copies, where one of these is drawn
            ways = (math.comb(whole, n) * math.comb(of - whole, drawn - n) for n in range(min(whole, drawn) + 1))
            missed = sum(way * (1 - n * share) ** joined for n, way in enumerate(ways)) / math.comb(of, drawn)
            return places * (1 - missed) / joined

        local, latency, inside = self._within_node("all_gather", group)
        time = distinct(group.size) / inside
        if group.size > local:
            latency += self.hop_us
            crossing = distinct(group.size / local) * (group.size - local) / (group.size - 1)
            time = max(time, crossing / self.link_gb_per_s)
        return latency, time / 1e3

    def point_to_point(self, num_bytes: np.ndarray, group: Group) -> np.ndarray:
        """Return the time of a message between neighbours, within or between nodes."""
        one_node = group.size * group.stride <= self.gpus_per_node
        neighbours = Group(size=2, stride=1)
        bandwidth = self._within_node("all_gather", neighbours)[2] if one_node else self.link_gb_per_s
        return self.hop_us + num_bytes / bandwidth / 1e3

    def _within_node(self, name: str, group: Group) -> tuple[int, float, float]:
        """Return a group's ranks in a node, and the latency and GB/s of a collective of these."""
        local = min(group.size, max(1, self.gpus_per_node // group.stride))
        if local == 1:
            return local, 0.0, math.inf
        measured: Collective = getattr(self, name)
        latency, bandwidth = (float(np.interp(local, measured.ranks, values)) for values in measured[1:])
        return local, latency, bandwidth


NETWORKS = resources.files("megatron_wlb.hardware") / "networks"
H100_NETWORK = of_file((NETWORKS / "h100.json").read_bytes(), Network)
