"""Documents that end where EOD tokens are, as the flags that reset positions or attention masks ask."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megatron_wlb.documents import DOCUMENT
from megatron_wlb.plan.samples import Windows

SAMPLED = 64
"""Documents that are read at the start, to see where they end."""


def resets(args: Namespace) -> bool:
    """Whether EOD tokens end pieces. Masks of whole documents come with positions in these."""
    return bool(args.reset_attention_mask or args.reset_position_ids) and not args.dataloader_inter_document_masking


class _Begins(Protocol):
    def begins(self, piece: np.void, count: int) -> np.ndarray: ...


class PiecesByEod:
    """Windows in pieces that end with EOD tokens, wherever documents end; every rank reads all that it plans."""

    def __init__(self, windows: Windows, text: _Begins) -> None:
        self._windows, self._text = windows, text
        self.document_index, self.lengths = windows.document_index, windows.lengths

    def __len__(self) -> int:
        return len(self._windows)

    def documents(self, samples: np.ndarray) -> np.ndarray:
        """See `DatasetSamples`. A piece may go over documents, as the stream does."""
        rows, size = self._windows.documents(samples), self._windows.context_length
        found = [np.empty(0, DOCUMENT)]
        for of_sample in np.split(rows, np.searchsorted(rows["index"], size * np.arange(1, len(samples)))):
            places = of_sample["index"] - of_sample["index"][0]
            total = int(of_sample["length"].sum())
            begins = self._text.begins(of_sample[0], total)
            row = np.searchsorted(places, begins, side="right") - 1
            pieces = of_sample[row]
            pieces["offset"] += begins - places[row]
            pieces["index"] += begins - places[row]
            pieces["length"] = np.diff(begins, append=total)
            found.append(pieces)
        return np.concatenate(found)


def remark_on_ends(datasets: Sequence[Any], *, by_eod: bool) -> str:
    """Return the remark at the start of a run on documents without EOD as their last token, or with another.

    `SAMPLED` documents of `GPTDataset`s tell; "" if these have none. `by_eod`: pieces end with EOD.
    """
    sampled = irregular = 0
    pairs = within = 0.0  # of tokens in a document, and of those that no EOD separates
    chosen = range(0, len(datasets), -(-len(datasets) // SAMPLED))
    for i in chosen:
        dataset = datasets[i]
        lengths, eod = dataset.dataset.sequence_lengths, dataset.config.tokenizer.eod
        # --dataloader-fast-cache-load leaves indices out.
        numbers = dataset.document_index if dataset.indices is None else dataset.indices
        numbers = numbers[:: -(-len(numbers) * len(chosen) // SAMPLED)]
        for number in numbers[lengths[numbers] > 0].tolist():
            length = int(lengths[number])
            (at,) = np.nonzero(dataset.dataset.get(number) == eod)
            parts = np.diff(np.concatenate(([0], at + 1, [length])))
            sampled, irregular = sampled + 1, irregular + (at.tolist() != [length - 1])
            pairs, within = pairs + float(length) ** 2, within + float((parts.astype(float) ** 2).sum())
    if not irregular:
        return ""
    how = f"{irregular} of {sampled} sampled documents do not end with their only EOD token"
    if by_eod:
        return f"{how}: pieces end where EOD is, as the flags that reset ask; every rank reads all tokens for that"
    return f"{how}: attention goes across EOD for {1 - within / pairs:.1%} of their pairs of tokens"
