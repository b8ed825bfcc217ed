"""The documents of a run: the training split of the data that its arguments name."""

import contextlib
import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from megatron_wlb import files
from megatron_wlb.describe.megatron import MegatronArguments
from megatron_wlb.describe.settings import RunSettings
from megatron_wlb.plan.dataset import read_tokens, trained_tokens
from megatron_wlb.plan.mock import MockIndex, mock_lengths
from megatron_wlb.plan.stream import DocumentStream, Source

DEFAULT_SPLIT = "969,30,1"
"""Megatron's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training data of a run."""

    sources: list[Source]
    """The training split of every dataset; documents are numbered through all datasets."""
    prefixes: list[str]
    has_validation: bool
    remarks: list[str] = field(default_factory=list)
    """What upstream would make of conversations."""

    def stream(self, seed: int, context_length: int) -> DocumentStream:
        """Return the endless stream of documents in training order, from the beginning."""
        return DocumentStream(self.sources, seed=seed, context_length=context_length)


def data_of(a: MegatronArguments, notes: list[str], settings: RunSettings) -> Data:
    """Return the data of --data-path or its like, or mock data; adds assumptions to `notes`.

    Conversations of --sft are tokenized, unless they are already. Raises ValueError if data are missing or no dataset.
    """
    if a.mock_data and not a.data_path:
        drawn = settings.mock_lengths
        index = MockIndex(distribution=mock_lengths(drawn), seed=a.seed, vocabulary=1)
        return Data(sources=[Source(lengths=index.lengths)], prefixes=[f"mock data, {drawn}"], has_validation=True)
    words, is_split = _blend_words(a)
    split = "1"
    if is_split:
        split = a.split or DEFAULT_SPLIT
        if a.split is None:
            notes.append(f"Assumed: --split {DEFAULT_SPLIT}, Megatron's default.")
    prefixes, weights = _blend(words)
    training, validation = _shares(split)
    sources: list[Source] = []
    remarks: list[str] = []
    for i, prefix in enumerate(prefixes):
        every = _conversations(prefix, a, remarks, settings) if a.sft else trained_tokens(read_tokens(prefix))
        lengths = every[: round(training * len(every))]
        if not lengths.any():
            raise ValueError(
                f"{prefix} has no document of at least 2 tokens among the first {training:.3%} of {len(every)} "
                f"(--split {split}): there is nothing to train; give another split, or leave the dataset out"
            )
        weight = weights[i] if weights else float(lengths.sum())
        sources.append(Source(lengths=lengths, weight=weight, first=sum(len(source.lengths) for source in sources)))
    has_validation = not is_split or validation > 0
    return Data(sources=sources, prefixes=prefixes, has_validation=has_validation, remarks=remarks)


def _conversations(path: str, a: MegatronArguments, remarks: list[str], settings: RunSettings) -> np.ndarray:
    """Return the trained tokens of each conversation; remarks what upstream's rows would pad."""
    from megatron_wlb import conversations

    assert a.seq_length is not None
    given = asdict(a) | {f"wlb_{name}": value for name, value in asdict(settings).items()}
    with contextlib.redirect_stdout(sys.stderr):
        found = conversations.read(path, Namespace(**given))
    padding = 1 - float(np.minimum(found.rows / a.seq_length, 1).mean())
    remarks.append(
        f"Upstream's --sft makes a window of each of the {len(found.rows)} lines of {path}: {padding:.1%} of their "
        "tokens would be padding. Speedups are over windows that are full."
    )
    return found.lengths


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
    return files.read(path, 1 << 24, f"give {flag} a file of weights and prefixes").decode("utf-8")


def _training_blend(path: str) -> list[str]:
    try:
        blend = json.loads(_text(path, "--per-split-data-args-path"))["train"]
        return blend.split() if isinstance(blend, str) else [str(word) for word in blend]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--per-split-data-args-path {path} holds no training blend ({error!r}); give JSON such as "
            '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": ["PREFIX"]}'
        ) from error


def _blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights (None: by size), distinguished as upstream does."""
    try:
        weights = [float(text) for text in words[::2]]
    except ValueError:
        weights = []
    if not weights or len(words) % 2:
        return list(words), None
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"--data-path {' '.join(words)}: weights must be positive and finite")
    return list(words[1::2]), weights


def _shares(split: str) -> tuple[float, float]:
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not parts or not all(math.isfinite(p) and p >= 0 for p in parts) or not parts[0]:
        raise ValueError(f"--split {split}: give shares of training, validation and test, such as 969,30,1")
    return parts[0] / sum(parts), sum(parts[1:2]) / sum(parts)
