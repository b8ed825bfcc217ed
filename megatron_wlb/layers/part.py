"""The interface of a part of a layer: its sizes, the tensors that it keeps, its kernels, and its limits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.job import Job
from megatron_wlb.model import Matrix

ONE_SIZE = "its buffers have one size, and micro-batches vary in length"
Rules = dict[str, Callable[[Any], Any]]
"""Sentences, and whether they hold for Megatron's arguments `a`; a missing one is None."""


class Adaptation(NamedTuple):
    applies: Callable[[Any, Collection[str]], Any]
    """Whether it applies to these arguments (a missing one is None), of which those with these names were given."""
    values: dict[str, Any]
    """Arguments to set. Those without a use of their own, as details of a feature switched off, are not printed."""
    reason: str
    price: str = ""
    """The loss in results or speed; "" if none."""


def ends_documents(a: Any) -> Any:
    """Whether a run without `--wlb` tells its layers where documents end."""
    return a.dataloader_inter_document_masking or a.sft


def pads_rows(a: Any) -> Any:
    """Whether a run without `--wlb` makes a row of every sample, padded, and divides its documents one by one."""
    return a.sft


def without(*names: str) -> dict[str, Any]:
    """Return values that switch arguments off."""
    return dict.fromkeys(names, False)


class Tensor(NamedTuple):
    """A tensor that a layer keeps for backward."""

    bytes: float
    """Per token of a context-parallel rank."""
    modules: tuple[str, ...] = ()
    """Modules whose selective recomputation drops it."""


class Again(NamedTuple):
    """Work of a part that backward runs again, as selective recomputation asks for."""

    matrices: tuple[Matrix, ...] = ()
    share: float = 1.0
    """Of the time of their products."""
    values: float = 0.0
    """That other kernels read and write of a row."""
    kernels: int = 0
    """Others than products."""
    travels: bool = False
    """Rows travel again, too (`Part.travel`)."""


LAUNCHES_US = 850.0
"""Launches of attention, and of a layer and micro-batch in both directions. An MLP and a mixer have as many: assumed,
since no published dense step is bound by them.

Fitted to steps of mixtures of experts with and without graphs (`benchmarks.published`), with times of experts and
copies. The steps tell their sum, and hardly how modules share it: without a model, a release or a GPU the fit has 3700
to 4800 us in all, and 2000 to 3800 for a router (`left_out` of benchmarks/results/published.json). A rehearsal of
Megatron 0.19 over TransformerEngine 2.20 counts, with products by hand, of a layer and micro-batch in both directions:
52 launches of a dense layer in bf16 (63 with latent attention) and 94 in FP8, and 100 of one with experts, beside their
products. So a fitted constant is 33 to 41 us a launch, where a launch itself takes 4 to 8: most of it is modules and
autograd in Python, which no count derives, and rests on the fit alone.
"""


class Part:
    """A kind of layers, or a part of them."""

    letters: ClassVar[str]
    """In `ModelShape.pattern` and `ModelShape.parts_of`."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Values of `--experimental-attention-variant` that stand for it."""
    modules: ClassVar[Mapping[str, float]]
    """Modules of `--cuda-graph-modules`, and us in which the host launches them for a layer and micro-batch in both
    directions. A graph of the last replays all of it."""
    kernels: ClassVar[tuple[int, int]]
    """Kernels that are no products, forward and backward."""
    gathered: ClassVar[bool] = True
    """Tensor-parallel ranks gather its rows before it, and scatter them after it."""
    pooled: ClassVar[bool] = False
    """Ranks pool it (`Parallel.pooling_ranks`)."""
    shown_by: ClassVar[tuple[str, ...]] = ()
    """Arguments, and fields of `ModelShape`, that show whether a model has it: others are judged beside them."""
    title: ClassVar[str] = ""
    """In messages."""
    taken: ClassVar[str] = ""
    """For granted of its time, which was never measured; "" if it was."""
    refused: ClassVar[Rules] = {}
    """Flags, reason and remedy of refused combinations of arguments; one alone has a row in the table."""
    adapted: ClassVar[tuple[Adaptation, ...]] = ()
    """Its arguments that `--wlb` sets or switches off; one alone has a row in the table."""
    assumed: ClassVar[Rules] = {}
    """Sentences on assumptions of predictions about it."""
    differs: ClassVar[Rules] = {}
    """How it is trained otherwise than without `--wlb`; formatted with `a`."""

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return fields of `ModelShape` by Megatron's arguments and other fields. Raises ValueError."""
        return {}

    def ranks(self, a: Any) -> dict[str, Any]:
        """Return fields of `Parallel` by Megatron's arguments. Raises ValueError."""
        return {}

    def settings(self, a: Any) -> dict[str, Any]:
        """Return fields of `Job` by Megatron's arguments."""
        return {}

    def names_products(self, a: Any) -> bool:
        """Whether TransformerEngine has names for its products (QKV, projection, MLP), by Megatron's arguments."""
        return True

    def is_all_matrices(self, a: Any) -> bool:
        """Whether the layers of a model with these arguments have few other weights than their matrices."""
        return True

    def kept(self, job: Job) -> dict[str, Tensor]:
        """Return the tensors that it keeps for backward, with the norm before it."""
        raise NotImplementedError

    def gradient_rows(self, job: Job) -> int:
        """Return the gradients of rows that its backward holds at first, a hidden state each."""
        return 1

    def values(self, job: Job) -> int:
        """Return the values of a row that its kernels read and write, without a norm and a residual sum."""
        raise NotImplementedError

    def again(self, job: Job, dropped: set[str]) -> Again:
        """Return what runs again where these modules are recomputed, but for core attention."""
        return Again()

    def launches_us(self, job: Job) -> float:
        """Return us in which the host launches kernels that no module stands for."""
        return 0.0

    def travel(self, job: Job, tokens: np.ndarray) -> np.ndarray:
        """Return the time in which the rows of a layer travel to the ranks that it is divided over, and back, us."""
        return np.zeros_like(tokens)

    def dispatched(self, job: Job, tokens: np.ndarray, beside: Sequence[float]) -> np.ndarray:
        """Return the time that `travel` adds to forward and to backward, with its copies of rows, us, [2, M].

        `beside`: computation of another micro-batch in the same layer in the other direction, us.
        """
        return np.zeros((2, *tokens.shape))

    def moving(self, job: Job, tokens: np.ndarray) -> np.ndarray:
        """Return the time in which rows of a mixer go to other context-parallel ranks and back, us."""
        return np.zeros_like(tokens)


def layer_input_bytes(job: Job) -> float:
    """Bytes of a layer's input per token of a context-parallel rank."""
    return job.bytes_per_value * job.model.hidden_size / job.parallel.sequence_ranks


def mask_bytes(job: Job) -> float:
    """Bytes of a dropout mask, one per value of the hidden state."""
    return job.model.hidden_size / job.parallel.sequence_ranks if job.hidden_dropout else 0


def rates(job: Job) -> tuple[float, float]:
    """TFLOP/s of a layer's products outside of experts, forward and backward."""
    gain, _ = job.profile.gain(job.precision, "attention")
    forward, backward = job.profile.rates
    return forward * gain, backward * gain


def memory_time(job: Job, bytes_per_token: float, tokens: np.ndarray) -> np.ndarray:
    """Return the time in which so many bytes of a row, over all tensor-parallel ranks, are read and written, us."""
    return bytes_per_token / job.parallel.tp * tokens / job.profile.memory_gb_per_s / 1e3


def network_of_ranks(job: Job) -> tuple[float, float]:
    """Return latency and time of a byte in an all-to-all of context-parallel ranks, us."""
    return job.profile.network.all_to_all(Group(size=job.parallel.cp, stride=job.parallel.tp))
