"""How many bytes of tensors are alive, and were at most: on a CPU, too, where no allocator counts them."""

import weakref
from typing import Any

import torch
import torch._dynamo  # a dispatch mode imports it at its first use; now, once for all forked processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make within the context; not what an operator takes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info for r in func._schema.returns):
            return result
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self._alive | given:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                self._alive.add(id(storage))
                weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        return result

    def _freed(self, key: int, num_bytes: int) -> None:
        self._alive.remove(key)
        self.now -= num_bytes
