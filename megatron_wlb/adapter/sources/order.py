"""The order of samples where upstream's data loader does not take them one after the other."""

import functools
from argparse import Namespace
from collections.abc import Callable

import numpy as np
import torch

Order = Callable[[np.ndarray], np.ndarray]


def order_of(args: Namespace, split: str, size: int) -> tuple[Order | None, int | None]:
    """Return the map from places in training to the `size` samples of a split, None: one after the other, and the steps
    of a pass over it, for --full-validation."""
    ranks = args.data_parallel_size
    if split.startswith("valid") and args.full_validation:
        return functools.partial(_passes, size, ranks), -(-size // ranks)
    if args.wlb_dataloader_type == "cyclic":
        windows = args.wlb_windows_per_micro_batch if split == "train" else args.wlb_eval_windows_per_micro_batch
        return _Cyclic(size, windows, ranks, sharding=args.data_sharding), None
    return None, None


def _passes(size: int, ranks: int, places: np.ndarray) -> np.ndarray:
    """The samples of upstream's `MegatronFullValidationSampler`: every rank goes through its own again and again."""
    number, rank = np.divmod(places, ranks)
    return rank + ranks * (number % -(-(size - rank) // ranks))


class _Cyclic:
    """The samples of upstream's `MegatronPretrainingRandomSampler`: every epoch has a permutation of its own."""

    def __init__(self, size: int, micro_batch_size: int, ranks: int, *, sharding: bool) -> None:
        self._micro_batch_size, self._ranks, self._sharding = micro_batch_size, ranks, sharding
        each = micro_batch_size * ranks
        self._epoch = size - size % each
        self._permuted = size // each * micro_batch_size if sharding else size - size % micro_batch_size
        self._permutation = functools.lru_cache(maxsize=2)(
            lambda epoch: torch.randperm(self._permuted, generator=torch.Generator().manual_seed(epoch)).numpy()
        )

    def __call__(self, places: np.ndarray) -> np.ndarray:
        epoch, place = np.divmod(places, self._epoch)
        batch, place = np.divmod(place, self._micro_batch_size * self._ranks)
        rank, place = np.divmod(place, self._micro_batch_size)
        place += batch * self._micro_batch_size  # among those of the rank
        if not self._sharding:
            place = place * self._ranks + rank
        found = np.empty_like(places)
        for number in np.unique(epoch).tolist():
            found[epoch == number] = self._permutation(number)[place[epoch == number]]
        return found + rank * self._permuted if self._sharding else found
