"""Windows of upstream's `GPTDataset`, which go on in one stream of the documents of a .bin and .idx file."""

import os
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb.adapter.sources.eod import PiecesByEod, remark_on_ends, resets
from megatron_wlb.adapter.sources.source import SPLITS, DatasetTokens, empty, paths
from megatron_wlb.plan.dataset import check_index, suspicious_layout
from megatron_wlb.plan.samples import DatasetSamples, Windows


class FromIndex:
    """See `Source`."""

    kind: Any = GPTDataset
    apart = False

    def __init__(self, args: Namespace) -> None:
        self._args = args

    def check(self) -> None:
        """Check the files that upstream's data flags name.

        Raises ValueError for none, for a missing or damaged one, and for one with no document in a split, on which
        upstream would wait for ever.
        """
        args = self._args
        blend, blends = get_blend_and_blend_per_split(args)
        prefixes = paths(blend, blends)
        if not prefixes:
            raise ValueError("--wlb: no dataset; give --data-path PREFIX (or --train-data-path ...), or --mock-data")
        sizes = {prefix: check_index(prefix) for prefix in prefixes if "://" not in prefix}  # which upstream reads
        for said in chain.from_iterable(map(suspicious_layout, sizes)) if args.rank == 0 else ():
            print(f"> wlb: WARNING: {said}", flush=True)
        if blend is None:
            return
        splits = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
        for name, bounds in zip(SPLITS, splits, strict=False):
            if bounds is not None and any(round(bounds[0] * n) == round(bounds[1] * n) for n in sizes.values()):
                raise empty(args, name)

    def prepare(self, config: Any) -> None:
        """See `Source`."""

    def opened(self, dataset: Any) -> tuple[DatasetSamples, DatasetTokens]:
        """See `Source`. Where flags that reset ask for it, pieces end with EOD tokens, all of which are read."""
        windows = Windows(
            document_index=dataset.document_index,
            sample_index=dataset.sample_index,
            shuffle_index=dataset.shuffle_index,
            lengths=dataset.dataset.sequence_lengths,
            context_length=self._args.seq_length,
        )
        if why := windows.misfit(dataset.indices):
            folder = os.path.join(str(dataset.dataset_path), "cache", f"{type(dataset).__name__}_indices")
            raise stale(dataset, folder, f"the documents of {dataset.dataset_path}: {why}")
        text = TextOfWindows(windows, dataset)
        return PiecesByEod(windows, text) if resets(self._args) else windows, text

    def remark(self, datasets: Sequence[Any]) -> str:
        """See `Source`."""
        return remark_on_ends(datasets, by_eod=resets(self._args))


def stale(dataset: Any, folder: str, why: str) -> ValueError:
    """Return the error for an index of upstream's cache, by default in `folder`, that does not fit the files."""
    name = os.path.join(dataset.config.path_to_cache or folder, f"{dataset.unique_description_hash}-*")
    return ValueError(f"--wlb: upstream's cached index {name} is not of {why}; delete it, upstream rebuilds it")


class TextOfWindows:
    """Tokens of a `GPTDataset`, whose windows go on in one stream of documents."""

    def __init__(self, windows: Windows, dataset: Any) -> None:
        self._windows, self._documents = windows, dataset.dataset
        self._pad = -1 if dataset._pad_token_id is None else int(dataset._pad_token_id)
        self._eod, self._masks_eod = dataset.config.tokenizer.eod, dataset.config.eod_mask_loss
        self.masks = self._masks_eod or self._pad >= 0
        prefix = getattr(self._documents, "path_prefix", "mock://")
        self.size = 0 if "://" in prefix else os.path.getsize(f"{prefix}.bin")  # object storage is upstream's to read

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `DatasetTokens`."""
        place = int(piece["index"]) % self._windows.context_length + start
        given = min(count, self._windows.context_length - place) + 1
        text = self._stream(int(piece["document"]), int(piece["offset"]) + start, given)
        text = np.concatenate((text, np.full(count + 1 - len(text), self._pad)))
        tokens, labels = text[:-1].copy(), text[1:].copy()
        tokens[given - 1 :] = self._pad  # the token behind a window is a target only
        trained = labels != self._pad
        if self._masks_eod:
            trained &= tokens != self._eod
        tokens[tokens == self._pad] = labels[labels == self._pad] = 0
        return tokens, labels, trained

    def begins(self, piece: np.void, count: int) -> np.ndarray:
        """Return where documents begin in `count` tokens from a DOCUMENT row on, by the EOD tokens, int64 [n]."""
        text = self._stream(int(piece["document"]), int(piece["offset"]), count)
        return np.concatenate(([0], np.flatnonzero(text[:-1] == self._eod) + 1))

    def _stream(self, document: int, offset: int, count: int) -> np.ndarray:
        """Return up to `count` tokens of the stream from a place in `document_index` on."""
        found, windows = [np.empty(0, np.int64)], self._windows
        while count > 0 and document < len(windows.document_index):
            number = int(windows.document_index[document])
            left = int(windows.lengths[number]) - offset
            if left <= 0:  # a piece may go over documents
                document, offset = document + 1, -left
                continue
            self._check_size()
            found.append(np.asarray(self._documents.get(number, offset=offset, length=min(count, left)), np.int64))
            count, offset = count - left, offset + left
        return np.concatenate(found)

    def _check_size(self) -> None:
        """Raise ValueError for a `.bin` file that is cut off.

        Of a mapped one SIGBUS would tell, without a word, and of one that is read uninitialised memory would be
        trained.
        """
        if self.size and (size := os.path.getsize(name := f"{self._documents.path_prefix}.bin")) < self.size:
            raise ValueError(
                f"{name} was cut off since the run began: it has {size} bytes instead of {self.size}; restore it"
            )
