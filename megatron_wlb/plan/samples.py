"""The samples of a run in Megatron's order: the pieces of documents in each, from arrays alone.

Megatron's GPTDataset concatenates shuffled documents to one stream of tokens, cuts it into windows of C tokens, and
shuffles these; BlendedDataset draws windows from several. Three arrays of a dataset and two of a blend say all that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from msgspec import Meta

from megatron_wlb.documents import DOCUMENT
from megatron_wlb.settings import Size, SizeOrNone, in_range

_CHUNK = 1 << 22
"""Documents that are looked at together."""


class DatasetSamples(Protocol):
    """One dataset of a blend."""

    def __len__(self) -> int:
        """Number of its samples."""

    def documents(self, samples: np.ndarray) -> np.ndarray:
        """DOCUMENT rows of samples, int64 [n]; `index` counts tokens as if each had C, from the first of `samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows of C tokens in a stream of documents: the arrays of a `GPTDataset`."""

    document_index: np.ndarray
    """Documents in the order of the stream, int32 [documents, of all epochs]."""
    sample_index: np.ndarray
    """Where windows begin, as place in `document_index` and offset, int32 or int64 [windows + 1, 2]."""
    shuffle_index: np.ndarray
    """The windows in the order of training, [windows]."""
    lengths: np.ndarray
    """Tokens of each document, int32 [documents]; Megatron's documents are the sequences of its `.idx` files."""
    context_length: int

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def documents(self, samples: np.ndarray) -> np.ndarray:
        """See `DatasetSamples`. `document` is a place in `document_index`. O(documents in `samples`)."""
        windows = self.shuffle_index[samples].astype(np.int64)
        begins, ends = (self.sample_index[windows + i].astype(np.int64) for i in (0, 1))
        counts = ends[:, 0] - begins[:, 0] + 1
        sample, number = _within(counts)
        document = begins[sample, 0] + number
        lengths = self.lengths[self.document_index[document]].astype(np.int64)
        offset = np.where(number == 0, begins[sample, 1], 0)
        stop = np.where(number == counts[sample] - 1, ends[sample, 1], lengths)
        rows = np.zeros(len(sample), DOCUMENT)
        rows["document"], rows["offset"], rows["length"] = document, offset, stop - offset
        tokens = np.cumsum(rows["length"]) - rows["length"]
        first = np.cumsum(counts) - counts  # row of a window
        rows["index"] = sample * self.context_length + tokens - tokens[first[sample]]
        return rows[rows["length"] > 0]

    def misfit(self, documents: np.ndarray | None) -> str:
        """Return the evidence that the arrays belong to another dataset than `lengths`, or "".

        `documents` of the split are ascending; None: unknown. All numbers are checked, some at a time.
        """
        index, count, size = self.document_index, len(self.sample_index) - 1, self.context_length
        low, high = (0, len(self.lengths) - 1) if documents is None else (int(documents[0]), int(documents[-1]))
        tokens = named = seen = 0
        for first in range(0, len(index), _CHUNK):
            numbers = index[first : first + _CHUNK]
            if numbers.min() < low or numbers.max() > high:
                return f"it has documents {numbers.min()} to {numbers.max()}, and the split has {low} to {high}"
            lengths = self.lengths[numbers]
            ends = tokens + np.cumsum(lengths, dtype=np.int64)
            stop = int(np.searchsorted(self.sample_index[:, 0], first + len(numbers)))
            begins = self.sample_index[seen:stop].astype(np.int64)
            row = begins[:, 0] - first
            if ((row < 0) | (row >= len(numbers))).any():
                return "its windows are not in order"
            at = ends[row] - lengths[row] + begins[:, 1]
            right = np.arange(seen, stop) * size
            if seen <= count < stop and at[-1] < right[-1]:  # a last window that is not full goes to the last token
                right[-1] = tokens + int(self.lengths[index[first:]].sum(dtype=np.int64)) - 1
            if (wrong := np.flatnonzero(at != right)).size:
                i = int(wrong[0])
                return f"window {seen + i} begins at token {at[i]} of its documents instead of {right[i]}"
            tokens, named, seen = int(ends[-1]), named + int(numbers.sum(dtype=np.int64)), stop
        if documents is not None:
            epochs, rest = divmod(len(index), len(documents))
            if rest or named != epochs * int(documents.sum(dtype=np.int64)):
                return f"its {len(index)} documents are not the {len(documents)} of the split in each of some epochs"
        if seen != count + 1 or not (tokens - 1) // size <= count <= -(-(tokens - 1) // size):
            return f"it has {count} windows, and {tokens} tokens make {(tokens - 1) // size}"
        order = self.shuffle_index
        if len(order) != count or order.max() != count - 1 or order.sum(dtype=np.int64) != count * (count - 1) // 2:
            return f"its order of {len(order)} is none of {count} windows"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples that are rows of a file, each of some documents and at most C tokens: conversations."""

    rows: np.ndarray
    """The rows in order; they start over after the last, int64 [rows of the split]."""
    begins: np.ndarray
    """First document of each row of the file, int64 [rows of the file + 1]."""
    lengths: np.ndarray
    """Tokens of each document, int32 [documents]."""
    context_length: int
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def documents(self, samples: np.ndarray) -> np.ndarray:
        """See `DatasetSamples`. A row is cut off after C tokens, as upstream does."""
        row = self.rows[samples % len(self.rows)]
        counts = self.begins[row + 1] - self.begins[row]
        sample, number = _within(counts)
        rows = np.zeros(len(sample), DOCUMENT)
        rows["document"] = self.begins[row[sample]] + number
        rows["length"] = self.lengths[rows["document"]]
        tokens = np.concatenate(([0], np.cumsum(rows["length"])))
        place = tokens[:-1] - tokens[np.cumsum(counts) - counts][sample]
        rows["length"] = np.minimum(rows["length"], self.context_length - place)
        rows["index"] = sample * self.context_length + place
        return rows[rows["length"] > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a run in the order of training."""

    datasets: Sequence[DatasetSamples]
    context_length: int
    blend: tuple[np.ndarray, np.ndarray] | None = None
    """Dataset of every sample, and the number of the sample there; None: all are of the only dataset."""
    order: Callable[[np.ndarray], np.ndarray] | None = None
    """Maps the place in training to the sample, int64 [n] each; it makes the samples endless. None: the same."""

    def __post_init__(self) -> None:
        size = self.context_length
        if any(getattr(each, "context_length", size) != size for each in self.datasets):
            raise ValueError(
                f"datasets have other windows than the samples' {size} tokens; give all one context_length"
            )

    def __len__(self) -> int:
        return len(self.datasets[0]) if self.blend is None else len(self.blend[0])

    @in_range
    def documents(self, first: SizeOrNone, stop: SizeOrNone) -> np.ndarray:
        """Return DOCUMENT rows of samples [first, stop), arrival 0, in their order.

        Raises ValueError behind the last sample.
        """
        if stop > len(self) and self.order is None:
            raise ValueError(f"the data ends: samples {first} to {stop} of {len(self)}; train fewer steps")
        places = np.arange(first, stop)
        samples = places if self.order is None else self.order(places)
        if self.blend is None:
            rows = self.datasets[0].documents(samples)
        else:
            which, of_dataset = (np.asarray(column[samples], np.int64) for column in self.blend)
            found = [np.empty(0, DOCUMENT)]
            for i in np.unique(which).tolist():
                (at,) = np.nonzero(which == i)
                rows = self.datasets[i].documents(of_dataset[at])
                sample, place = np.divmod(rows["index"], self.context_length)
                rows["index"], rows["dataset"] = at[sample] * self.context_length + place, i
                found.append(rows)
            rows = np.concatenate(found)
            rows = rows[np.argsort(rows["index"], kind="stable")]
        rows["index"] += first * self.context_length
        return rows


@in_range
def windows(
    lengths: np.ndarray,
    context_length: Size,
    *,
    seed: SizeOrNone | None = 0,
    num_samples: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None,
) -> Windows:
    """Cut documents of `lengths`, int64 [n], into windows as `GPTDataset` does, with another generator's shuffles.

    `seed` None keeps the order. `num_samples`: at least so many, from as many epochs as it takes; None: one epoch.
    Raises ValueError if there is not one window, and for lengths that are none.
    """
    lengths = np.asarray(lengths)
    if lengths.size and (lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.min() < 0):
        raise ValueError(f"lengths have shape {lengths.shape} of {lengths.dtype}; give whole numbers from 0 on")
    tokens = int(lengths.sum())
    epochs = 1 if num_samples is None else -(-(num_samples * context_length + 1) // max(1, tokens))
    count = (epochs * tokens - 1) // context_length
    if count < 1:
        raise ValueError(
            f"{len(lengths)} documents of {tokens} tokens do not fill one window of {context_length} and the token "
            "behind it; give more data, or a shorter window"
        )
    rng = None if seed is None else np.random.default_rng(seed)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    shuffle = np.arange(count)
    if rng is not None:
        rng.shuffle(documents)
        rng.shuffle(shuffle)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    begins = np.arange(count + 1) * context_length
    at = np.searchsorted(ends, begins, side="right")
    offset = begins - (ends[at] - lengths[documents[at]])
    return Windows(
        document_index=documents,
        sample_index=np.stack((at, offset), axis=1),
        shuffle_index=shuffle,
        lengths=lengths,
        context_length=context_length,
    )


def blended(
    datasets: Sequence[DatasetSamples], weights: Sequence[float], num_samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a blend as `BlendedDataset` draws it: each sample from the dataset that is furthest behind its weight."""
    shares = np.array(weights) / sum(weights)
    drawn = np.zeros(len(datasets), np.int64)
    which, of_dataset = np.empty(num_samples, np.int64), np.empty(num_samples, np.int64)
    for i in range(num_samples):
        k = int((shares * max(i, 1) - drawn).argmax())
        which[i], of_dataset[i] = k, drawn[k]
        drawn[k] += 1
    return which, of_dataset


def _within(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of `counts` things of every group its group, and its number there, int64 [sum] each."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]
