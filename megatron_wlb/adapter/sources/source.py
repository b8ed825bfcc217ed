"""The protocol of a source, and the data of a split."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from megatron_wlb.plan.samples import DatasetSamples, Samples

SPLITS = ("train", "valid", "test")


class DatasetTokens(Protocol):
    """Tokens of one dataset of a blend."""

    masks: bool
    """Whether some rows may not be trained."""
    size: int
    """Bytes of the file, or its tokens."""

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, labels and whether they are trained of `count` rows, as the sample has them.

        int64 and bool [count], from row `start` of a DOCUMENT row on; tokens after the sample are 0, untrained.
        """


class Source(Protocol):
    """Where the documents of a run are from; made from its arguments."""

    kind: Any
    """Upstream's class, or one like it, of which its builder makes a dataset for every file and split."""
    apart: bool
    """Whether upstream trains each document by itself, whatever flags say: positions and targets end with it."""

    def check(self) -> None:
        """Check the files that flags name, and set arguments for it, before upstream reads them. Raises ValueError."""

    def prepare(self, config: Any) -> None:
        """Set the fields of upstream's dataset config that `kind` reads. A collective call; raises ValueError."""

    def opened(self, dataset: Any) -> tuple[DatasetSamples, DatasetTokens]:
        """Return samples and tokens of a built dataset. Raises ValueError for an index that is not of its files."""

    def remark(self, datasets: Sequence[Any]) -> str:
        """Return the remark on a split's datasets at the start of a run; "" if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitData:
    """The data that a split trains or evaluates."""

    samples: Samples
    datasets: Sequence[DatasetTokens]
    """By dataset."""
    first_sample: int
    """Where this process begins."""
    steps: int | None
    """Steps of a pass over the split, for --full-validation."""
    identity: int
    """Digest of which files it reads, and of their sizes."""
    remark: str
    """See `Source.remark`."""


def paths(blend: Any, blend_per_split: Any) -> list[str]:
    """Return the files, or prefixes of them, that upstream's blends name, each once."""
    named = [each[0] for each in (blend, *(blend_per_split or ())) if each is not None]
    return list(dict.fromkeys(chain.from_iterable(named)))


def evaluates(args: Namespace) -> bool:
    return bool(args.full_validation or args.eval_iters > 0)


def empty(args: Namespace, split: str) -> ValueError:
    """Return the error of a split without documents."""
    names = {"train": "training", "valid": "validation", "test": "test"}
    given = "--full-validation is given" if args.full_validation else f"--eval-iters is {args.eval_iters}"
    remedy = f"and {given}; give --eval-iters 0 and another --split, such as 100,0,0"
    if split == "train":
        remedy = "give another --split"
    return ValueError(f"--wlb: the {names[split.split()[0]]} split is empty, {remedy}")
