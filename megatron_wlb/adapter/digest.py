"""A digest of all that a step trains, whatever the order and the micro-batches, with `--wlb` and without.

It is the sum, modulo 2^64, over all tokens of a hash of token, target, position in its document and whether the target
is trained, times a number that stands for the target's weight: the trained targets of the micro-batch over which
upstream takes the mean. Two runs with the same digests train the same.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer

from megatron_wlb.plan.mock import GOLDEN, finalized


def _mixed(x: np.ndarray) -> np.ndarray:
    return finalized(x + np.uint64(GOLDEN))


def digest(
    tokens: np.ndarray, labels: np.ndarray, positions: np.ndarray, trained: np.ndarray, origin: np.ndarray
) -> np.ndarray:
    """Return the sum of hashes of every micro-batch of origin, uint64 [largest origin + 1]; all int64 [s]."""
    trained = trained > 0
    # Both are below 2^32, and what is not trained has no target.
    pairs = tokens.astype(np.uint64) << np.uint64(32) | np.where(trained, labels, 0).astype(np.uint64)
    hashes = _mixed(_mixed(pairs) ^ (positions.astype(np.uint64) << np.uint64(1) | trained.astype(np.uint64)))
    sums = np.zeros(int(origin.max(initial=-1)) + 1, np.uint64)
    np.add.at(sums, origin, hashes)
    return sums


def weighed(sums: np.ndarray, trained: np.ndarray | None) -> int:
    """Return the digest of `sums`, given the trained targets of each's micro-batch; None: all weigh the same."""
    if trained is not None:
        sums = sums * (_mixed(trained[: len(sums)].astype(np.uint64)) | np.uint64(1))
    return int(sums.sum(dtype=np.uint64))


def reduced(part: int) -> str:
    """Return the sum of all ranks' parts, modulo 2^64, in hexadecimal digits. A collective call."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    part %= 1 << 64
    total = torch.tensor([part - (part >> 63 << 64)], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total)
    return f"{int(total.item()) % (1 << 64):016x}"


def digest_line(iteration: int, digest: str) -> str:
    """Format the line that training prints, with `--wlb` and without."""
    return f" wlb step {iteration:6d} | digest {digest}"


class Upstream:
    """Digests of a run without `--wlb`, of the batches that its own forward step reads."""

    def __init__(self) -> None:
        self._part = 0
        """Of what this rank has read since the last step."""

    def watching(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's forward step, to see what it reads."""

        @functools.wraps(forward_step)
        def watched(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=get_attr_wrapped_model(model, "vp_stage"))
            # All context-parallel ranks read the same; of tensor-parallel ranks one has an iterator.
            if data_iterator is not None and last and mpu.get_context_parallel_rank() == 0 and model.training:
                data_iterator = self._seen(data_iterator)
            return forward_step(data_iterator, model, *args, **kwargs)

        return watched

    def _seen(self, data_iterator: Iterator[Any]) -> Iterator[Any]:
        batch = next(data_iterator)
        self._part += self._of(batch)
        yield batch

    def _of(self, batch: Any) -> int:
        tokens, labels, mask = (batch[name].flatten().numpy() for name in ("tokens", "labels", "loss_mask"))
        begins = np.zeros(len(tokens), bool)
        size = batch["tokens"].shape[-1]
        begins[::size] = True
        if batch.get("cu_seqlens") is not None:
            for row, bounds in enumerate(batch["cu_seqlens"].numpy()):
                begins[row * size + bounds[bounds < size]] = True
        else:
            begins[1:] |= tokens[:-1] == get_tokenizer().eod
        at = np.flatnonzero(begins)
        positions = np.arange(len(tokens)) - np.repeat(at, np.diff(at, append=len(tokens)))
        sums = digest(tokens, labels, positions, mask, np.zeros(len(tokens), np.int64))
        return weighed(sums, None if get_args().calculate_per_token_loss else np.array([int(mask.sum())]))

    def logged(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's `training_log`, to print the digest of what was read since its last call."""

        @functools.wraps(training_log)
        def log(
            loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> Any:
            text, self._part = reduced(self._part), 0
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                print(digest_line(iteration, text), flush=True)
            return training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)

        return log
