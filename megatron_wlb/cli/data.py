"""Which documents a command reads: LENGTHS, or the training split of the data that launch flags name."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wlb.cli.flags import require
from megatron_wlb.cli.lengths import FORMATS, read_lengths
from megatron_wlb.plan.dataset import read_tokens, trained_tokens
from megatron_wlb.plan.stream import DocumentStream, Source

DEFAULT_SPLIT = "969,30,1"
"""Megatron's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a run trains on."""

    sources: list[Source]
    """The training split of every dataset; documents are numbered through all of them."""
    prefixes: list[str]
    has_validation: bool = False
    """The validation split has documents."""
    shuffle: bool = True
    """Documents come in the order of training, not of the file."""

    def stream(
        self, seed: int, context_length: int, num_epochs: int | None = None, kind: type[DocumentStream] = DocumentStream
    ) -> DocumentStream:
        """The documents from their beginning."""
        return kind(self.sources, seed=seed, context_length=context_length, shuffle=self.shuffle, num_epochs=num_epochs)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Let a command of `add_job_flags` take LENGTHS, which comes first, in place of a run's data."""
    parser.add_argument(
        "lengths",
        metavar="LENGTHS",
        help=f"{FORMATS}; documents come in its order. Where it is left out, --data-path counts",
    )
    parse = parser.parse_known_args

    def parse_known_args(arguments: list[str], namespace: argparse.Namespace | None = None) -> Any:
        # An optional positional would be looked for behind flags, too, where it could be a word of a launch line.
        return parse(arguments if arguments and not arguments[0].startswith("--") else ["", *arguments], namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def documents_of(args: argparse.Namespace, notes: list[str]) -> Data:
    """The documents of LENGTHS, or else the data of `data_of`."""
    if not args.lengths:
        return data_of(args, notes)
    return Data(sources=[Source(lengths=read_lengths(args.lengths))], prefixes=[args.lengths], shuffle=False)


def data_of(args: argparse.Namespace, notes: list[str]) -> Data:
    """The data of --data-path and Megatron's flags that stand for it; what was assumed is added to `notes`.

    Raises ValueError, naming the flags, for what is missing or no dataset.
    """
    words, is_split = _blend_words(args)
    split = "1"
    if is_split:
        split = args.split or DEFAULT_SPLIT
        if args.split is None:
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


def _blend_words(args: argparse.Namespace) -> tuple[list[str], bool]:
    """The words of the training blend, and whether --split divides it: upstream's get_blend_and_blend_per_split."""
    if not args.data_path:
        if args.data_args_path is not None:
            return Path(args.data_args_path).read_text(encoding="utf-8").split(), True
        if args.per_split_data_args_path is not None:
            return _training_blend(args.per_split_data_args_path), False
        if args.train_data_path:
            return args.train_data_path, False
    require(args, "data_path")
    return args.data_path, True


def _training_blend(path: str) -> list[str]:
    try:
        blend = json.loads(Path(path).read_text(encoding="utf-8"))["train"]
        return blend.split() if isinstance(blend, str) else [str(word) for word in blend]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--per-split-data-args-path {path} holds no training blend ({error!r}); give JSON such as "
            '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": ["PREFIX"]}'
        ) from error


def _blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights (None: by size), which upstream tells apart likewise."""
    try:
        weights = [float(text) for text in words[::2]]
    except ValueError:
        weights = []
    if not weights or len(words) % 2:
        return list(words), None
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"--data-path {' '.join(words)}: weights must be over 0")
    return list(words[1::2]), weights


def _shares(split: str) -> tuple[float, float]:
    """The shares of the training and the validation split."""
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not parts or not all(math.isfinite(p) and p >= 0 for p in parts) or not parts[0]:
        raise ValueError(f"--split {split}: give shares of training, validation and test, such as 969,30,1")
    return parts[0] / sum(parts), sum(parts[1:2]) / sum(parts)
