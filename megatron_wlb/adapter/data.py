"""Documents as tensors: upstream's datasets, and this rank's batches."""

import functools
import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.dist_signal_handler import DistributedSignalHandler
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb import conversations
from megatron_wlb.plan.dataset import DocumentIndex, TrainedTokens, read_index
from megatron_wlb.plan.mock import MockIndex, mock_lengths
from megatron_wlb.plan.step import MicroBatchPlan, Planner
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.runtime.backends.protocol import Encoding, varlen
from megatron_wlb.runtime.metadata import ShardMetadata

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitData:
    """The documents of a split: stream sources, and the dataset or mock of each."""

    sources: list[Source]
    indices: Sequence[DocumentIndex | MockIndex]
    masks: Sequence[np.ndarray]
    """Which tokens are trained as targets, uint8 [tokens] of each `.bin` file; empty: all."""
    whole_epochs: bool = False
    """Train all documents of an epoch before the next begins."""
    shuffle: bool = True

    def targets(self, documents: np.ndarray, depths: int) -> list[int]:
        """Count the trained targets of DOCUMENT rows at each depth, 0 and `depths` more."""
        lengths = documents["length"]
        if not self.masks:
            return [int(np.maximum(lengths - depth, 0).sum()) for depth in range(1 + depths)]
        counts = np.zeros(1 + depths, np.int64)
        for row in documents:
            index = self.indices[row["dataset"]]
            assert isinstance(index, DocumentIndex)
            first = int(index.pointers[row["document"]]) // index.item_bytes + int(row["offset"]) + 1
            trained = self.masks[row["dataset"]][first : first + int(row["length"])]
            counts += [int(trained[depth:].sum()) for depth in range(1 + depths)]
        return counts.tolist()


def load_splits(args: Namespace) -> dict[str, SplitData]:
    """Read the `.idx` files that upstream's data flags name, or draw mock data; an empty split has no sources.

    The keys are SPLITS, but "valid 0", "valid 1" and so on for the sets of `--multiple-validation-sets`. Raises
    ValueError for a missing or damaged file, for an empty training split, and for an empty validation set if the run
    evaluates.
    """
    if args.mock_data:
        return {split: _mock(args, split) for split in SPLITS}
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        raise ValueError("--wlb: no dataset; give --data-path PREFIX (or --train-data-path ...), or --mock-data")
    # A blend may name a dataset in every split.
    read = functools.cache(functools.partial(_opened, args=args))

    def split(blend: Any, bounds: tuple[float, float] | None) -> SplitData:
        sources, indices, masks = [], [], list[np.ndarray]()
        prefixes, weights = blend if blend is not None and bounds is not None else ([], None)
        for i, prefix in enumerate(prefixes):
            index, trained, mask, content = read(prefix)
            first, stop = (round(bound * len(index)) for bound in bounds or ())
            tokens = index.tokens[first:stop]
            lengths: Any = TrainedTokens(tokens) if trained is None else trained[first:stop]
            # The last token of a document is only a target.
            total = int(tokens.sum()) - np.count_nonzero(tokens) if trained is None else int(lengths.sum())
            # Without weights, datasets are weighted by size, as upstream does.
            weight = float(weights[i]) if weights is not None else float(total)
            if total:
                sources.append(Source(lengths=lengths, weight=weight, first=first, content=content))
                indices.append(index)
                masks += [] if mask is None else [mask]
        # With weights, datasets end at different times.
        whole = getattr(args, "sft", False) and (weights is None or len(sources) == 1)
        return SplitData(sources=sources, indices=indices, masks=masks, whole_epochs=whole)

    if blend is not None:
        bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
        data = {name: split(blend, b) for name, b in zip(SPLITS, bounds, strict=True)}
    else:
        train, valid, test = blend_per_split
        sets = {"valid": valid}
        if args.multiple_validation_sets and valid is not None and len(valid[0]) > 1:
            sets = {f"valid {i}": ([prefix], None) for i, prefix in enumerate(valid[0])}
        data = {name: split(b, (0.0, 1.0)) for name, b in {"train": train, **sets, "test": test}.items()}
    if not data["train"].sources:
        raise ValueError("--wlb: the training split is empty: no document of at least 2 tokens; check --split")
    full = args.full_validation
    for name in validation_sets(data):
        if (full or args.eval_iters > 0) and not data[name].sources:  # upstream would evaluate on nothing
            given, instead = "--full-validation is given", "--eval-iters 0 instead"
            if not full:
                given, instead = f"--eval-iters is {args.eval_iters}", "--eval-iters 0"
            raise ValueError(f"--wlb: the validation split is empty, and {given}; give {instead}, or another --split")
        if full:
            data[name] = replace(data[name], whole_epochs=True, shuffle=False)
    for name, each in data.items():
        if each.sources:
            stream_of(args, name, each)  # checks weights
    return data


def validation_sets(data: Iterable[str]) -> list[str]:
    """Return the names of the sets that are evaluated while training."""
    return [name for name in data if name.startswith("valid")]


def _opened(path: str, args: Namespace) -> tuple[DocumentIndex, np.ndarray | None, np.ndarray | None, str]:
    """Return a dataset, trained tokens and mask of conversations, a digest of its content."""
    if getattr(args, "sft", False):
        given = conversations.read(path, args)
        return given.index, given.lengths, given.mask, given.content
    index = read_index(path)
    return index, None, None, index.fingerprint


def _mock(args: Namespace, split: str) -> SplitData:
    index = MockIndex(
        distribution=mock_lengths(args.wlb_mock_lengths),
        seed=args.seed + SPLITS.index(split),
        vocabulary=args.vocab_size or args.padded_vocab_size,
    )
    return SplitData(sources=[Source(lengths=index.lengths)], indices=[index], masks=[])


def stream_of(args: Namespace, split: str, data: SplitData, num_epochs: int | None = None) -> DocumentStream:
    """Return the stream of a split's documents in training order, from the beginning; endless without `num_epochs`."""
    return DocumentStream(
        data.sources,
        seed=args.seed + SPLITS.index(split.partition(" ")[0]),
        context_length=args.seq_length,
        shuffle=data.shuffle,
        num_epochs=num_epochs,
        whole_epochs=data.whole_epochs,
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
    """int64 [s], of `tokens` in their documents; None: as in `metadata`. Tiles have another order (`tiles.order`)."""
    tokens: torch.Tensor | None
    """int64 [1 + depths, s]; row k is k tokens further ahead (`mtp`). Only on stages with an embedding."""
    labels: torch.Tensor | None
    """int64 [1 + depths, s]; only on stages with the loss, as the mask."""
    loss_mask: torch.Tensor | None
    """float32 [1 + depths, s], 0 without a target or on padding."""

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """For torch's DataLoader."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, move: Callable[[Any], Any]) -> "Batch":
        parts = {name: getattr(self, name) for name in ("metadata", "positions", "tokens", "labels", "loss_mask")}
        return replace(self, **{name: move(part) for name, part in parts.items() if part is not None})


class DocumentDataset(torch.utils.data.Dataset[Batch]):
    """Maps a MicroBatchPlan to this rank's Batch, reading only its own tokens."""

    def __init__(
        self,
        split: str,
        data: SplitData,
        *,
        cp_rank: int,
        is_first: bool,
        is_last: bool,
        mmap: bool,
        vocabulary: int,
        encode: Encoding = varlen,
        depths: int = 0,
        order: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`vocabulary`: tokens are below it; `encode`: of the attention backend; `depths`: tokens predicted beyond the
        next; `order`: rows of the shard in the order of the model's, int64 [s] by their number, None: the same."""
        self._split, self._cp_rank, self._encode, self._depths = split, cp_rank, encode, depths
        self._order = order
        self._vocabulary = vocabulary
        self._is_first, self._is_last = is_first, is_last
        needed, self._data = is_first or is_last, data
        self._readers = [_reader(index, mmap) for index in data.indices] if needed else []

    def __getitem__(self, plan: MicroBatchPlan) -> Batch:
        tokens = labels = loss_mask = positions = None
        metadata = ShardMetadata.build(plan.shards, self._cp_rank, self._encode)
        if self._is_first or self._is_last:
            tokens, labels, loss_mask = self._read(plan)
            if self._order is not None:
                rows = self._order(len(metadata.positions))
                tokens, labels, loss_mask = (part[:, rows] for part in (tokens, labels, loss_mask))
                positions = metadata.positions[rows]
        return Batch(
            split=self._split,
            step=plan.step,
            padded_tokens=plan.padded_tokens,
            metadata=metadata,
            positions=positions,
            tokens=tokens if self._is_first or self._depths else None,
            labels=labels if self._is_last else None,
            loss_mask=loss_mask if self._is_last else None,
        )

    def _read(self, plan: MicroBatchPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for i in np.unique(plan.documents["dataset"]).tolist():
            _check_size(self._data.indices[i])
        shard = plan.shards.shards[self._cp_rank]
        out = np.zeros((2, 1 + self._depths, shard.tokens), np.int64)
        mask = np.zeros((1 + self._depths, shard.tokens), np.float32)
        at = 0
        for number, start, stop in np.concatenate(shard.calls).tolist():
            if number < len(plan.documents):  # skip the tail padding: token 0, not trained
                document = plan.documents[number]
                length = int(document["length"])
                count = min(stop + self._depths, length) + 1 - start
                read, trained = self._tokens(document, start, count), self._trained(document, start, count)
                for depth in range(1 + self._depths):
                    size = max(0, min(stop, length - depth) - start)  # rows with a target at this depth
                    out[:, depth, at : at + size] = read[depth : depth + size], read[depth + 1 : depth + 1 + size]
                    mask[depth, at : at + size] = 1 if trained is None else trained[depth + 1 : depth + 1 + size]
            at += stop - start
        tokens, labels = torch.from_numpy(out)
        return tokens, labels, torch.from_numpy(mask)

    def _tokens(self, document: np.void, start: int, count: int) -> np.ndarray:
        number, first = int(document["document"]), int(document["offset"]) + start
        tokens = self._readers[document["dataset"]](number, first, count)
        strange = (tokens < 0) | (tokens >= self._vocabulary)
        if strange.any():  # upstream would take such a token for none, with tensor parallelism without an error
            at = int(strange.argmax())
            raise ValueError(
                f"token {tokens[at]} at place {first + at} of document {number} of dataset {document['dataset']} of "
                f"the {self._split} blend is not from 0 to {self._vocabulary - 1} (--vocab-size, or the tokenizer's); "
                "give the tokenizer that the dataset was made with"
            )
        return tokens

    def _trained(self, document: np.void, start: int, count: int) -> np.ndarray | None:
        if not self._data.masks:
            return None
        index = self._data.indices[document["dataset"]]
        assert isinstance(index, DocumentIndex)
        at = int(index.pointers[document["document"]]) // index.item_bytes + int(document["offset"]) + start
        return self._data.masks[document["dataset"]][at : at + count]


def _check_size(index: DocumentIndex | MockIndex) -> None:
    """Raise ValueError for a `.bin` file that is cut off.

    Of a mapped one SIGBUS would tell, without a word, and of one that is read uninitialised memory would be trained.
    """
    if isinstance(index, DocumentIndex) and (size := os.path.getsize(f"{index.prefix}.bin")) < index.bytes:
        name, before = f"{index.prefix}.bin", index.bytes
        raise ValueError(f"{name} was cut off since the run began: it has {size} bytes instead of {before}; restore it")


def _reader(index: DocumentIndex | MockIndex, mmap: bool) -> Callable[[int, int, int], np.ndarray]:
    if isinstance(index, MockIndex):
        return index.read
    dataset = IndexedDataset(index.prefix, mmap=mmap)

    def read(document: int, first: int, count: int) -> np.ndarray:
        offset = int(index.pointers[document]) + first * index.item_bytes
        tokens: np.ndarray = dataset.bin_reader.read(dtype=dataset.index.dtype, count=count, offset=offset)
        return tokens

    return read


def loader(
    dataset: DocumentDataset, planner: Planner, first_step: int, num_workers: int, exit_signal: int | None
) -> Iterator[Batch]:
    """Return this rank's endless batches, by processes that outlive `exit_signal`."""
    steps = map(planner.get, itertools.count(first_step))
    return iter(
        torch.utils.data.DataLoader(
            dataset,
            sampler=(micro_batch for plan in steps for micro_batch in plan.micro_batches),
            batch_size=None,  # the sampler yields whole micro-batches
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=None if exit_signal is None else functools.partial(_outlive, exit_signal),
        )
    )


def _outlive(exit_signal: int, worker: int) -> None:
    DistributedSignalHandler(exit_signal).__enter__()
