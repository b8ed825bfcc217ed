"""The samples of a run: the training split of the data that its arguments name, cut as upstream's datasets cut it."""

import contextlib
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_wlb import files
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import RunSettings
from megatron_wlb.plan.dataset import read_lengths, suspicious_layout
from megatron_wlb.plan.mock import MockDocuments, mock_lengths
from megatron_wlb.plan.samples import DatasetSamples, Rows, Samples, blended, windows
from megatron_wlb.settings import short

DATA = {"data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data"}
"""Arguments that name the data."""
DEFAULT_SPLIT, MOCK_SPLIT = "969,30,1", "1,1,1"
"""Megatron's defaults; no flag changes the split of mock data."""
SURPLUS = 0.005
"""Share of samples by which upstream makes the datasets of a weighted blend longer than it draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training data of a run."""

    lengths: list[np.ndarray]
    """Tokens of each document in the training split of every dataset, int32 [documents]."""
    begins: list[np.ndarray] = field(default_factory=list)
    """Of --sft the first document of each row of that split, int64 [rows + 1], for every dataset; else empty."""
    prefixes: list[str]
    weights: list[float] | None = None
    """Of the datasets; None: by their size."""
    has_validation: bool
    remarks: list[str] = field(default_factory=list)
    """Oddities of the files, and upstream's padding of conversations."""

    @property
    def has_rows(self) -> bool:
        """Whether every sample is a row of its own, which upstream pads to a window."""
        return bool(self.begins)

    def samples(self, seed: int, context_length: int, num_samples: int) -> Samples:
        """Return the samples of a run of `num_samples` in the order of training; after the last they start over.

        Sizes and blend are upstream's, shuffles another generator's. Raises ValueError for a blend without weights and
        a dataset of less than a window in it, which upstream refuses.
        """

        def dataset(i: int, count: int | None) -> DatasetSamples:
            if not self.has_rows:
                return windows(self.lengths[i], context_length, seed=seed, num_samples=count)
            rows, size = np.arange(len(self.begins[i]) - 1), context_length
            sizes = {"context_length": size, "num_samples": count or len(rows)}
            return Rows(rows=rows, begins=self.begins[i], lengths=self.lengths[i], **sizes)

        if len(self.lengths) == 1:
            only = dataset(0, num_samples)
            return Samples(datasets=[only], context_length=context_length, order=lambda places: places % len(only))
        if self.weights is None:
            named = zip(self.prefixes, self.lengths, strict=True)
            if few := next((p for p, each in named if not self.has_rows and each.sum() <= context_length), None):
                raise ValueError(f"{few} fills no window of {context_length} tokens; give the blend weights")
            datasets = [dataset(i, None) for i in range(len(self.lengths))]
            weights, size = [float(len(each)) for each in datasets], min(num_samples, sum(map(len, datasets)))
        else:
            weights = self.weights
            counts = [math.ceil(num_samples * weight / sum(weights)) for weight in weights]
            datasets = [dataset(i, math.ceil(count * (1 + SURPLUS))) for i, count in enumerate(counts)]
            size = sum(counts)
        blend = blended(datasets, weights, size)
        return Samples(
            datasets=datasets, context_length=context_length, blend=blend, order=lambda places: places % size
        )


def data_of(a: MegatronArguments, notes: list[str], settings: RunSettings) -> Data:
    """Return the data of --data-path or its like, or mock data; adds assumptions to `notes`.

    Conversations of --sft are tokenized, unless they are already. Raises ValueError if data are missing or no dataset.
    """
    if a.mock_data and not a.data_path:
        name, lengths = _mock(a.seed, settings.mock_lengths)
        kept = round(_shares(MOCK_SPLIT)[0] * len(lengths))
        return Data(lengths=[lengths[:kept]], prefixes=[name], has_validation=True)
    words, is_split = _blend_words(a)
    split = "1"
    if is_split:
        split = a.split or DEFAULT_SPLIT
        if a.split is None:
            notes.append(f"Assumed: --split {DEFAULT_SPLIT}, Megatron's default.")
    prefixes, weights = _blend(words)
    training, validation = _shares(split)
    remarks: list[str] = []
    found: list[np.ndarray] = []
    begins: list[np.ndarray] = []
    for prefix in prefixes:
        if a.sft:
            every, rows = _conversations(prefix, a, remarks, settings)
            begins.append(rows[: round(training * (len(rows) - 1)) + 1])
            kept = int(begins[-1][-1])
        else:
            every = read_lengths(prefix)
            remarks += suspicious_layout(prefix)
            kept = round(training * len(every))
        found.append(np.array(every[:kept]))  # not mapped: of many datasets, that is as many open files
        if not found[-1].any():
            raise ValueError(
                f"{prefix} has no token among the first {training:.3%} of {len(every)} documents (--split {split}): "
                "there is nothing to train; give another split, or leave the dataset out"
            )
    return Data(
        lengths=found,
        begins=begins,
        prefixes=prefixes,
        weights=weights,
        has_validation=not is_split or validation > 0,
        remarks=remarks,
    )


def check_log(a: MegatronArguments, typed: Mapping[str, Any]) -> None:
    """Raise ValueError for data that a log alone names, and that cost more than lengths: conversations."""
    if a.sft and not (typed.keys() & DATA and "tokenizer_model" in typed):
        raise ValueError(
            "the log is of --sft, and for safety, conversations and tokenizers named only in a log are not read; "
            "give --data-path and --tokenizer-model beside it"
        )


def names_of(a: MegatronArguments) -> list[str]:
    """Return the names of the datasets, or files of conversations, that are trained. Raises ValueError for none."""
    return _blend(_blend_words(a)[0])[0]


def _mock(seed: int, drawn: str | None) -> tuple[str, np.ndarray]:
    """Return the name and document lengths of mock data: of --wlb-mock-lengths, or upstream's own."""
    if drawn is None:
        return "mock data", np.random.default_rng(0).integers(1, 4096, 100_000, np.int32)
    documents = MockDocuments(distribution=mock_lengths(drawn), seed=seed, vocabulary=1)
    return f"mock data, {drawn}", documents.sequence_lengths


def _conversations(
    path: str, a: MegatronArguments, remarks: list[str], settings: RunSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each conversation, and the first of each row; remarks on upstream's padding."""
    from megatron_wlb.adapter.sources import conversations

    assert a.seq_length is not None
    given = asdict(a) | {f"wlb_{name}": value for name, value in asdict(settings).items()}
    with contextlib.redirect_stdout(sys.stderr):
        found = conversations.read(path, Namespace(**given))
    tokens = np.add.reduceat(found.lengths, found.begins[:-1])
    padding = 1 - float(np.minimum(tokens / a.seq_length, 1).mean())
    remarks.append(
        f"Upstream's --sft makes a window of each of the {len(tokens)} lines of {path}: {padding:.1%} of their tokens "
        "are padding, which --wlb leaves out."
    )
    return found.lengths, found.begins


def _blend_words(a: MegatronArguments) -> tuple[Sequence[str], bool]:
    if a.data_path:
        return a.data_path, True
    if a.data_args_path is not None:
        return _text(a.data_args_path, "--data-args-path").split(), True
    if a.per_split_data_args_path is not None:
        return _training_blend(a.per_split_data_args_path), False
    if a.train_data_path:
        return a.train_data_path, False
    raise ValueError("no --data-path; give the prefix of a .bin/.idx dataset, or a blend, or --mock-data")


def _text(path: str, flag: str) -> str:
    remedy = f"give {flag} a file of weights and prefixes"
    try:
        return files.read(path, 1 << 24, remedy).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {short(path)} is no text; {remedy}") from error


def _training_blend(path: str) -> list[str]:
    try:
        blend = json.loads(_text(path, "--per-split-data-args-path"))["train"]
        return blend.split() if isinstance(blend, str) else [str(word) for word in blend]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--per-split-data-args-path {path} holds no training blend ({short(repr(error), 99)}); give JSON such as "
            '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": ["PREFIX"]}'
        ) from error


def _blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights (None: by size), distinguished as upstream does."""
    try:
        weights = [float(text) for text in words[::2]]
    except ValueError:
        weights = []
    if not words:
        raise ValueError("the blend names no dataset; give it the prefix of one")
    if not weights or len(words) % 2:
        return list(words), None
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"--data-path {' '.join(words)}: weights must be positive and finite")
    return list(words[1::2]), weights


def _shares(split: str) -> tuple[float, float]:
    try:
        parts = list(map(float, re.findall(r"[.0-9]+", split)))  # whatever lies between, as upstream
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not parts[0]:
        raise ValueError(f"--split {split}: give shares of training, validation and test, such as 969,30,1")
    return parts[0] / sum(parts), sum(parts[1:2]) / sum(parts)
