"""The documents of a run: the training split of the data that its arguments name."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_wlb import files
from megatron_wlb.describe.megatron import MegatronArguments
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
    """The validation split has documents."""

    def stream(self, seed: int, context_length: int) -> DocumentStream:
        """Return the endless stream of documents in training order, from the beginning."""
        return DocumentStream(self.sources, seed=seed, context_length=context_length)


def data_of(a: MegatronArguments, notes: list[str], mock: str = "F2") -> Data:
    """Return the data of --data-path or its like, or mock data of lengths `mock`; adds assumptions to `notes`.

    Raises ValueError if data are missing or no dataset.
    """
    if a.mock_data and not a.data_path:
        index = MockIndex(distribution=mock_lengths(mock), seed=a.seed, vocabulary=1)
        return Data(sources=[Source(lengths=index.lengths)], prefixes=[f"mock data, {mock}"], has_validation=True)
    words, is_split = _blend_words(a)
    split = "1"
    if is_split:
        split = a.split or DEFAULT_SPLIT
        if a.split is None:
            notes.append(f"Assumed: --split {DEFAULT_SPLIT}, Megatron's default.")
    prefixes, weights = _blend(words)
    training, validation = _shares(split)
    sources: list[Source] = []
    for i, prefix in enumerate(prefixes):
        tokens = read_tokens(prefix)
        lengths = trained_tokens(tokens[: round(training * len(tokens))])
        if not lengths.any():
            raise ValueError(
                f"{prefix} has no document of at least 2 tokens among the first {training:.3%} of {len(tokens)} "
                f"(--split {split}): there is nothing to train; give another split, or leave the dataset out"
            )
        weight = weights[i] if weights else float(lengths.sum())
        sources.append(Source(lengths=lengths, weight=weight, first=sum(len(source.lengths) for source in sources)))
    return Data(sources=sources, prefixes=prefixes, has_validation=not is_split or validation > 0)


def _blend_words(a: MegatronArguments) -> tuple[Sequence[str], bool]:
    """Return the training blend, and whether --split divides it, as upstream does."""
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
    """Return the shares of the training and the validation split."""
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not parts or not all(math.isfinite(p) and p >= 0 for p in parts) or not parts[0]:
        raise ValueError(f"--split {split}: give shares of training, validation and test, such as 969,30,1")
    return parts[0] / sum(parts), sum(parts[1:2]) / sum(parts)
