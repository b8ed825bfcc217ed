"""A digest of all that a step trains, whatever the order and the micro-batches, with `--wlb` and without.

It is the sum, modulo 2^64, of two hashes of every token, made on the device. One is of the model's input: token,
position and all keys that the token sees, after their exchange. The other is of the loss's further input: target and
weight. The weight of a target is the step's number of targets times its share in the step's loss. It sees no kernels
and no gradients, and of multi-token prediction only the main loss.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer, is_last_rank
from torch import Tensor

from megatron_wlb.adapter.data import Batch
from megatron_wlb.adapter.layers.attention import keys_before
from megatron_wlb.describe.masks import masks_documents
from megatron_wlb.layers.part import pads_rows
from megatron_wlb.plan.mock import FINALIZER, GOLDEN
from megatron_wlb.runtime.all_to_all import seen_sums
from megatron_wlb.runtime.backends.protocol import Backend


def _signed(x: int) -> int:
    return x - (x >> 63 << 64)


_FACTORS = [_signed(factor) for _, factor in FINALIZER]


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of int64: SplitMix64's output for states x - GOLDEN, but by shifts that keep the sign.

    They take an operation less each, and of two numbers at most with one another the same hash.
    """
    x = x + _signed(GOLDEN)
    for (shift, _), factor in zip(FINALIZER, _FACTORS, strict=True):
        x = (x ^ x >> shift) * factor
    return x ^ x >> 31


def _factors(weights: Tensor) -> Tensor:
    """Return numbers that stand for float32 weights, int64; 0 for 0, so that untrained targets do not count."""
    x = weights.view(torch.int32).long() * _FACTORS[0]
    return x ^ x >> 32


def _keys(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return hashes of the tokens and positions that keys are made from."""
    return _mixed(tokens << 32 ^ positions)


def _pads(tokens: Tensor) -> Tensor:
    """Return which rows may pad conversations, and do not count: upstream's windows have more of them."""
    padding: Tensor = tokens == get_tokenizer().pad
    return padding


def _learned(args: Namespace) -> bool:
    """Whether positions are learned; otherwise they count in the document, since rotations are relative."""
    return bool(args.position_embedding_type == "learned_absolute")


def reduced(part: Tensor) -> str:
    """Return the sum of all ranks' parts, int64 [], in hexadecimal digits. A collective call."""
    total = part.clone()
    torch.distributed.all_reduce(total)
    return f"{int(total.item()) % (1 << 64):016x}"


def digest_line(iteration: int, digest: str) -> str:
    """Format the line that training prints, with `--wlb` and without."""
    return f" wlb step {iteration:6d} | digest {digest}"


class Planned:
    """This rank's part of the digest of a run with `--wlb`."""

    def __init__(self, args: Namespace, backend: Backend, device: torch.device) -> None:
        self._args, self._backend, self._device = args, backend, device
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.part = torch.zeros((), dtype=torch.int64, device=self._device)

    def given(self, batch: Batch, model: Any, order: Callable[[int], Tensor] | None) -> Callable[[Tensor], None] | None:
        """Add a first stage's input; returns the function that adds a last one's targets, by their weights [s].

        `order`: as in `BatchDataset`.
        """
        stage = {"ignore_virtual": False, "vp_stage": get_attr_wrapped_model(model, "vp_stage")}
        first, last = mpu.is_pipeline_first_stage(**stage), mpu.is_pipeline_last_stage(**stage)
        if mpu.get_tensor_model_parallel_rank() or not (first or last):
            return None
        assert batch.tokens is not None and batch.positions is not None and batch.padding is not None
        metadata, tokens = batch.metadata, batch.tokens[0]
        window = None if None in metadata.orders else next(iter(metadata.orders))
        at: Any = slice(None)
        if order is not None:
            with self._device:
                at = order(len(tokens))
        keys = _keys(tokens, batch.positions if _learned(self._args) else metadata.positions[at])
        in_shard = keys if order is None else torch.empty_like(keys).index_copy_(0, at, keys)
        seen = seen_sums(in_shard, metadata, self._backend.spans, window, mpu.get_context_parallel_group())[at]
        hashes = _mixed(keys ^ seen)
        if first:
            spare = batch.padding | _pads(tokens) if self._args.wlb_sft else batch.padding
            self.part = self.part + hashes.masked_fill(spare, 0).sum()

        def trained(weights: Tensor) -> None:
            assert batch.labels is not None
            self.part = self.part + (_mixed(hashes ^ batch.labels[0]) * _factors(weights)).sum()

        return trained if last else None


def _here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Upstream:
    """Digests of a run without `--wlb`, of the batches that its own forward step reads."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._parts: list[Tensor] = []
        """Of the data that this rank has read since the last step, less its targets, int64 [] each."""
        self._means: list[Tensor] = []
        """Sums of the targets' hashes, and their numbers, int64 [2, cp]: means are over a rank's targets."""

    def watching(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's forward step, to see the data that it reads."""

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
        masked = masks_documents(get_args())
        read = {name: given for name, given in batch.items() if masked or name != "attention_mask"}
        self._add({name: given.to(_here(), non_blocking=True) for name, given in read.items()})
        yield batch

    def _add(self, batch: dict[str, Tensor]) -> None:
        args, ranks, tokens = get_args(), mpu.get_context_parallel_world_size(), batch["tokens"]
        place = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        begins, stops = _bounds(batch, place)
        own = place - begins
        before = [keys for keys in keys_before(args) if keys is not None]
        first = torch.maximum(begins, place - before[0]) if len(before) == args.num_layers else begins
        keys = _keys(tokens, batch["position_ids"] if _learned(args) else own)
        sums = torch.nn.functional.pad(keys.cumsum(-1), (1, 0))
        seen = sums[:, 1:] - sums.gather(1, first)
        hashes, trained = _mixed(keys ^ seen), batch["loss_mask"] > 0
        padded = pads_rows(args)
        given = hashes.masked_fill(_pads(tokens), 0) if padded else hashes
        self._parts.append(given.sum())
        # A context-parallel rank has two of so many equal pieces, of documents or windows.
        piece = 2 * ranks * (own if padded else place) // (stops - begins if padded else tokens.shape[-1])
        rank = torch.minimum(piece, 2 * ranks - 1 - piece).flatten()
        sums = torch.stack((_mixed(hashes ^ batch["labels"]) * trained, trained)).flatten(1)
        self._means.append(torch.zeros_like(sums[:, :ranks]).index_add_(1, rank, sums))

    def _ended(self) -> Tensor:
        """Return this rank's part of the step, int64 []. A collective call."""
        nothing = torch.zeros(2, 0, dtype=torch.int64, device=_here())
        hashes, targets = torch.cat([nothing, *self._means], dim=1)
        counts = torch.stack((targets.sum(), torch.ones_like(targets).sum()))
        torch.distributed.all_reduce(counts)
        weights = torch.ones_like(targets, dtype=torch.float64)
        if not get_args().calculate_per_token_loss:
            weights = counts[0] / (counts[1] * targets).double()
        return torch.cat([hashes * _factors(weights.float()), *(part[None] for part in self._parts)]).sum()

    def logged(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap upstream's `training_log`, to print the digest of the data read since its last call."""

        @functools.wraps(training_log)
        def log(
            loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> Any:
            text = reduced(self._ended())
            self._begin()
            if is_last_rank():
                print(digest_line(iteration, text), flush=True)
            return training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)

        return log


def _bounds(batch: dict[str, Tensor], place: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first key that each row sees, and where its sequence ends, int64 [b, s], less sliding windows."""
    if "cu_seqlens" in batch:
        bounds = batch["cu_seqlens"].long()
        which = torch.searchsorted(bounds, place.contiguous(), right=True)
        return bounds.gather(1, which - 1), bounds.gather(1, which)
    whole = torch.zeros_like(place), torch.full_like(place, place.shape[-1])
    if "attention_mask" in batch:
        return batch["attention_mask"].squeeze(1).to(torch.uint8).argmin(-1), whole[1]  # 1: hidden
    return whole
