"""This rank's micro-batches as tensors: tokens, targets and weights of its shard."""

import atexit
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from megatron.training.dist_signal_handler import DistributedSignalHandler

from megatron_wlb.adapter.sources.source import DatasetTokens
from megatron_wlb.plan.step import MicroBatchPlan, Planner
from megatron_wlb.runtime.backends.protocol import Encoding
from megatron_wlb.runtime.metadata import ShardMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReader:
    """How samples become rows."""

    split: str
    datasets: Sequence[DatasetTokens]
    """By dataset."""
    context_length: int
    samples_per_micro_batch: int | None
    """Samples over which upstream takes a mean; None: documents run in other steps."""
    vocabulary: int
    """Tokens are below it."""
    depths: int = 0
    """Tokens predicted beyond the next."""
    ahead_in_document: bool = True
    """Multi-token prediction stops at the end of a document, as in upstream's packed sequences, or of the window."""
    in_window: bool = False
    """Positions count in the window: learned ones, without --reset-position-ids."""
    mean_of_means: bool = False
    """Whether upstream takes the mean over micro-batches of their means, as it evaluates conversations."""
    digest: bool = False
    """Whether trained tokens are counted, see `adapter/digest.py`."""

    def upstream_micro_batch(self, documents: np.ndarray, first_sample: int) -> np.ndarray:
        """Return the micro-batch without `--wlb` that DOCUMENT rows belong to, int64 [n]; 0 if in other steps."""
        if self.samples_per_micro_batch is None:
            return np.zeros(len(documents), np.int64)
        return (documents["index"] // self.context_length - first_sample) // self.samples_per_micro_batch

    def targets(self, documents: np.ndarray, *, read: bool) -> np.ndarray:
        """Count the trained targets of DOCUMENT rows at every depth, int64 [n, 1 + depths]; `read`: by their tokens."""
        depths = np.arange(1 + self.depths)
        if not read:
            ends = documents["length"]
            if not self.ahead_in_document:
                ends = self.context_length - documents["index"] % self.context_length
            return np.clip(ends[:, None] - depths, 0, documents["length"][:, None])
        counts = np.zeros((len(documents), 1 + self.depths), np.int64)
        for row, document in zip(counts, documents, strict=True):
            row[:] = self.rows(document, 0, int(document["length"]))[2].sum(axis=1)
        return counts

    def rows(self, document: np.void, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, labels and whether they are trained of rows [start, stop) at every depth.

        int64 and bool [1 + depths, stop - start]. Raises ValueError for a token that the model does not have.
        """
        count = stop - start
        read = self.datasets[document["dataset"]].read(document, start, count + self.depths)
        for tokens in read[:2]:
            self._check(tokens, document, start)
        found = tuple(np.stack([part[k : k + count] for k in range(1 + self.depths)]) for part in read)
        if self.ahead_in_document:
            for depth in range(1, 1 + self.depths):
                beyond = slice(max(0, int(document["length"]) - depth - start), None)
                for part in found:
                    part[depth, beyond] = 0
        return found[0], found[1], found[2]

    def _check(self, tokens: np.ndarray, document: np.void, start: int) -> None:
        strange = (tokens < 0) | (tokens >= self.vocabulary)
        if strange.any():  # upstream would take such a token for none, with tensor parallelism without an error
            at = int(strange.argmax())
            raise ValueError(
                f"token {tokens[at]} near place {int(document['offset']) + start + at} of document "
                f"{document['document']} of dataset {document['dataset']} of the {self.split} blend is not from 0 to "
                f"{self.vocabulary - 1} (--vocab-size, or the tokenizer's); give the tokenizer that the dataset was "
                "made with"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A micro-batch on one pipeline stage of one CP rank; s = local tokens."""

    split: str
    step: int
    padded_tokens: int
    """Tokens of the whole micro-batch with padding, over all context-parallel ranks."""
    metadata: ShardMetadata
    positions: torch.Tensor | None
    """int64 [s], of `tokens` in their documents, or in their windows; in the order of `tokens`, which tiles have
    changed (`Tiles.order`). Only on stages with an embedding or the loss."""
    tokens: torch.Tensor | None
    """int64 [1 + depths, s]; row k is k tokens further ahead. Only on stages with an embedding, and for a
    digest on those with the loss."""
    labels: torch.Tensor | None
    """int64 [1 + depths, s]; only on stages with the loss, as the fields below."""
    loss_mask: torch.Tensor | None
    """float32 [1 + depths, s], 0 without a target or on padding."""
    upstream_micro_batch: torch.Tensor | None
    """int64 [s]: see `SampleReader.upstream_micro_batch`; 0 on padding."""
    padding: torch.Tensor | None
    """bool [s]: rows of no document; only for layers that take such a mask, and for a digest."""

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """For torch's DataLoader."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, move: Callable[[Any], Any]) -> "Batch":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: move(part) for name, part in parts.items() if isinstance(part, torch.Tensor | ShardMetadata)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchDataset(torch.utils.data.Dataset[Batch]):
    """Maps a MicroBatchPlan to this rank's Batch, reading only its own tokens."""

    reader: SampleReader
    cp_rank: int
    is_first: bool
    is_last: bool
    padded: bool
    """Do layers take a mask of rows that are padding?"""
    in_order: bool
    """Do layers take rows in the order of documents?"""
    encode: Encoding
    """Of the attention backend."""
    attention_windows: Sequence[int | None]
    """Of `ModelShape`."""
    order: Callable[[int], torch.Tensor] | None
    """Rows of the shard in the order of the model's, int64 [s] by their number; None: the same."""

    def __getitem__(self, plan: MicroBatchPlan) -> Batch:
        tokens = labels = loss_mask = upstream_micro_batch = positions = None
        metadata = ShardMetadata.build(plan.shards, self.cp_rank, self.encode, self.attention_windows, self.in_order)
        if self.is_first or self.is_last:
            parts = self._read(plan)
            if self.order is not None:
                rows = self.order(len(metadata.positions))
                parts = [part[..., rows] for part in parts]
            tokens, labels, loss_mask, upstream_micro_batch, positions = parts
        return Batch(
            split=self.reader.split,
            step=plan.step,
            padded_tokens=plan.padded_tokens,
            metadata=metadata,
            positions=positions,
            tokens=tokens if self.is_first or self.reader.depths or self.reader.digest else None,
            labels=labels if self.is_last else None,
            loss_mask=loss_mask if self.is_last else None,
            upstream_micro_batch=upstream_micro_batch if self.is_last else None,
            padding=self._padding(plan) if self.padded or self.reader.digest else None,
        )

    def _padding(self, plan: MicroBatchPlan) -> torch.Tensor:
        calls = plan.shards.shards[self.cp_rank].calls
        each = [np.repeat(call["document"], call["stop"] - call["start"]) for call in calls]
        rows = torch.from_numpy(np.concatenate(each) == len(plan.documents))
        return rows if self.order is None else rows[self.order(len(rows))]

    def _read(self, plan: MicroBatchPlan) -> list[torch.Tensor]:
        """Return tokens, labels, mask, upstream_micro_batch and positions."""
        reader, shard = self.reader, plan.shards.shards[self.cp_rank]
        out = np.zeros((2, 1 + reader.depths, shard.tokens), np.int64)
        mask = np.zeros((1 + reader.depths, shard.tokens), np.float32)
        upstream_micro_batch, positions = np.zeros((2, shard.tokens), np.int64)
        of_document = reader.upstream_micro_batch(plan.documents, plan.first_sample)
        shift = plan.documents["index"] % reader.context_length if reader.in_window else np.zeros_like(of_document)
        at = 0
        for number, start, stop in np.concatenate(shard.calls).tolist():
            rows = slice(at, at := at + stop - start)
            if number == len(plan.documents):  # the tail padding: token 0, not trained
                continue
            out[0, :, rows], out[1, :, rows], mask[:, rows] = reader.rows(plan.documents[number], start, stop)
            upstream_micro_batch[rows], positions[rows] = of_document[number], np.arange(start, stop) + shift[number]
        return list(map(torch.from_numpy, (*out, mask, upstream_micro_batch, positions)))


def loader(
    dataset: BatchDataset, planner: Planner, first_step: int, num_workers: int, exit_signal: int | None
) -> Iterator[Batch]:
    """Return this rank's batches, by processes that outlive `exit_signal`.

    They read ahead: where there is no further plan, its RuntimeError comes behind the last batch that has one.
    """
    last: list[RuntimeError] = []

    def micro_batches() -> Iterator[MicroBatchPlan]:
        try:
            for step in itertools.count(first_step):
                yield from planner.get(step).micro_batches
        except RuntimeError as error:
            last.append(error)

    def outlive(worker: int) -> None:
        DistributedSignalHandler(exit_signal).__enter__()

    batches: Any = iter(
        torch.utils.data.DataLoader(
            dataset,
            sampler=micro_batches(),
            batch_size=None,  # the sampler yields whole micro-batches
            num_workers=num_workers,
            # Others would be sent whole indexes; on Linux Python 3.14 starts others.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=None if exit_signal is None else outlive,
        )
    )
    if num_workers:
        # The end of this process would signal them, and wait for ever: they outlive it.
        atexit.register(batches._shutdown_workers)
    return _then_raise(batches, last)


def _then_raise(batches: Iterator[Batch], last: Sequence[RuntimeError]) -> Iterator[Batch]:
    yield from batches
    raise last[0]
