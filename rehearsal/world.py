"""Torch's process groups in a world of which only one rank is there."""

import hashlib
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Store(dist.Store):
    """A store in which all that is waited for is there, as if every other rank had answered already."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._kept: dict[str, bytes] = {}
        self.communicators: dict[int, str] = {}
        """Keys under which ranks agree on a communicator, by its id."""

    def set(self, key: str, value: Any) -> None:
        self._kept[key] = value
        self._note(key, value)

    def get(self, key: str) -> bytes:
        if key not in self._kept:  # of another rank: what it would be is told apart by its key alone
            self.set(key, hashlib.blake2b(key.encode(), digest_size=8).digest() + bytes(120))
        return self._kept[key]

    def _note(self, key: str, value: bytes) -> None:
        if len(value) == 128:  # ncclUniqueId
            self.communicators[int.from_bytes(value[:8], "little")] = key

    def append(self, key: str, value: bytes) -> None:
        self._kept[key] = self._kept.get(key, b"") + value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._world_size

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(desired)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)  # asked for what went wrong

    def wait(self, *keys: Any) -> None:
        pass

    def delete_key(self, key: str) -> bool:
        return self._kept.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._kept)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=1)

    def clone(self) -> "Store":
        return self

    def has_extended_api(self) -> bool:
        return True


def install(world_size: int) -> Store:
    """Make torch's process groups begin without other ranks: NCCL's are real, Gloo's do nothing; returns the store.

    Objects come back as this rank gave them, and barriers are open.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend "fake"

    store = Store(world_size)
    begin, new_group = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin("cpu:fake,cuda:nccl", rank=int(os.environ["RANK"]), world_size=world_size, store=store)

    def group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if backend == "gloo":
            kwargs.pop("pg_options", None)
        return new_group(ranks, timeout, "fake" if backend == "gloo" else "cpu:fake,cuda:nccl", *args, **kwargs)

    def all_gather_object(objects: list[Any], mine: Any, *args: Any, **kwargs: Any) -> None:
        objects[:] = [mine] * len(objects)

    def gather_object(mine: Any, objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if objects is not None:
            objects[:] = [mine] * len(objects)

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    replacements = {
        "init_process_group": init_process_group,
        "new_group": group,
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": nothing,
        "barrier": nothing,
    }
    for module in (dist, c10d):
        vars(module).update(replacements)
    return store


def members() -> dict[str, list[int]]:
    """Return the ranks of every process group of this rank, by the group's name, in the group's order."""
    ranks = c10d._world.pg_group_ranks
    return {name: sorted(ranks[group], key=ranks[group].__getitem__) for group, name in c10d._world.pg_names.items()}
