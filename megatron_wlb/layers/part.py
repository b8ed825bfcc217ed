"""What every part of a layer states: its sizes, the tensors that it keeps, its kernels, and its limits."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.model import Matrix

Rules = dict[str, Callable[[Any], Any]]
"""Sentences, and whether they hold for Megatron's arguments `a`; a missing one is None."""


class Tensor(NamedTuple):
    """A tensor that a layer keeps for backward."""

    bytes: float
    """Per token of a context-parallel rank."""
    modules: tuple[str, ...] = ()
    """Modules whose selective recomputation drops it."""


class Again(NamedTuple):
    """What backward runs again of a part, as selective recomputation asks for."""

    matrices: tuple[Matrix, ...] = ()
    share: float = 1.0
    """Of the time of their products."""
    values: float = 0.0
    """That other kernels read and write of a row."""
    kernels: int = 0
    """Others than products."""
    dispatched: bool = False
    """Rows go to their experts and back again, too."""


class Part:
    """A kind of layers, or a part of them."""

    letters: ClassVar[str]
    """In `ModelShape.pattern` and `ModelShape.parts_of`."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Values of `--experimental-attention-variant` that stand for it."""
    modules: ClassVar[tuple[str, ...]]
    """Modules of `--cuda-graph-modules` that replay it."""
    kernels: ClassVar[tuple[int, int]]
    """Kernels that are no products, forward and backward."""
    refused: ClassVar[Rules] = {}
    """Flag, reason and remedy of what `--wlb` cannot serve of several arguments; one alone has a row in the table."""
    differs: ClassVar[Rules] = {}
    """How it is trained otherwise than without `--wlb`; formatted with `a`."""

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return fields of `ModelShape` by Megatron's arguments and other fields. Raises ValueError."""
        return {}

    def kept(self, job: Job) -> dict[str, Tensor]:
        """Return the tensors that it keeps for backward, with the norm before it."""
        raise NotImplementedError

    def values(self, job: Job) -> int:
        """Return the values of a row that its kernels read and write, without a norm and a residual sum."""
        raise NotImplementedError

    def again(self, job: Job, dropped: set[str]) -> Again:
        """Return what runs again where these modules are recomputed, but for core attention."""
        return Again()

    def moving(self, job: Job, tokens: np.ndarray) -> np.ndarray:
        """Return the time in which rows of a mixer go to other context-parallel ranks and back, us."""
        return np.zeros_like(tokens)


def layer_input_bytes(job: Job) -> float:
    """Bytes of a layer's input per token of a context-parallel rank."""
    return job.bytes_per_value * job.model.hidden_size / job.parallel.sequence_ranks


def mask_bytes(job: Job) -> float:
    """Bytes of a dropout mask, one per value of the hidden state."""
    return job.model.hidden_size / job.parallel.sequence_ranks if job.hidden_dropout else 0
