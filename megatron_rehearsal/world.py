"""Torch's process groups in a world of which only one rank is there."""

import hashlib
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d


class Store(dist.Store):
    """A store in which all that is waited for is there, as if every other rank had answered already."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._kept: dict[str, bytes] = {}

    def communicators(self) -> dict[int, tuple[str, list[int]]]:
        """Return the key under which ranks agree on each communicator, and its ranks in order, by its id."""
        of_group = c10d._world.pg_group_ranks
        groups: dict[str, list[int]] = {name: [*of_group[group]] for group, name in c10d._world.pg_names.items()}
        found = {}
        for key, value in self._kept.items():
            *_, group, _, name = ["", "", *key.split("//")]  # GROUP//cuda:0//NAME has an ncclUniqueId
            ranks = groups.get(group.rpartition("/")[2])
            if len(value) == 128 and ranks:
                if name[0].isdigit() and ":" in name:  # a pair of ranks is its own communicator
                    ranks = [ranks[int(i)] for i in name.split(":")]
                found[int.from_bytes(value[:8], "little")] = key, ranks
        return found

    def set(self, key: str, value: Any) -> None:
        self._kept[key] = value

    def get(self, key: str) -> bytes:
        # Of another rank: what it would be is told apart by its key alone.
        return self._kept.setdefault(key, hashlib.blake2b(key.encode(), digest_size=8).digest() + bytes(120))

    def add(self, key: str, amount: int) -> int:
        return self._world_size

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)  # asked for what went wrong

    def wait(self, *keys: Any) -> None:
        pass

    def clone(self) -> "Store":
        return self


def _silent(common: Any, options: Any) -> Any:
    """Return a backend that communicates nothing; `options` may be NCCL's."""
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size)


def install(world_size: int) -> Store:
    """Make torch's process groups begin without other ranks: NCCL's are real, Gloo's do nothing; returns the store.

    Objects come back as this rank gave them, and barriers are open.
    """
    store = Store(world_size)
    dist.Backend.register_backend("silent", _silent, extended_api=True, devices="cpu")
    begin, make = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin("cpu:silent,cuda:nccl", rank=int(os.environ["RANK"]), world_size=world_size, store=store)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make(ranks, timeout, "silent" if backend == "gloo" else "cpu:silent,cuda:nccl", *args, **kwargs)

    for module in (dist, c10d):
        vars(module).update(init_process_group=init_process_group, new_group=new_group)
    answer_for_others()
    return store


def answer_for_others() -> None:
    """Let objects, which a fake group does not move, come back as this rank gave them, and barriers be open."""

    def all_gather_object(objects: list[Any], mine: Any, *args: Any, **kwargs: Any) -> None:
        objects[:] = [mine] * len(objects)

    def gather_object(mine: Any, objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        all_gather_object(objects or [], mine)

    for module in (dist, c10d):
        vars(module).update(all_gather_object=all_gather_object, gather_object=gather_object)
        vars(module).update(dict.fromkeys(("broadcast_object_list", "barrier"), lambda *_, **__: None))
