"""The interface of a kind of layers in training: when it applies, its replacements in upstream, and its specs."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from megatron_wlb.adapter.clock import Clock
from megatron_wlb.adapter.data import Batch
from megatron_wlb.runtime.attention import AttentionOptions


class Run(NamedTuple):
    """Values of the run that replacements need."""

    trained: Callable[[], float]
    """Share of the running step's tokens by which losses are divided."""
    windows: Callable[[], float]
    """Windows of the running step by its micro-batches."""
    adapt: Callable[[Any, Any], None]
    """Adapts the spec of a layer, for a configuration."""
    clock: Clock


class Kind:
    stack_layer: ClassVar[str] = ""
    """Name of its spec, which is adapted, in upstream's hybrid stack."""

    since: ClassVar[tuple[int, int]] = (0, 18)
    """The first version of megatron-core with which its layers train."""
    padded: ClassVar[bool] = False
    """Whether its layers take a mask of rows that are padding."""
    in_order: ClassVar[bool] = False
    """Whether its layers take rows in the order of documents (`ShardMetadata.packed`)."""
    groups: ClassVar[tuple[str, ...]] = ()
    """Process groups whose collectives a step calls for its layers, by upstream's names."""

    def applies(self, args: Namespace) -> bool:
        """Whether a run has replacements for it."""
        return False

    def installed(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Return a context with the replacements in upstream."""
        return contextlib.nullcontext()

    def depths(self, args: Namespace) -> int:
        """Return the tokens beyond the next that it predicts."""
        return 0

    def inputs(self, batch: Batch, model: Any) -> dict[str, Any]:
        """Return arguments of upstream's forward pass of a micro-batch that its layers need."""
        return {}

    def rotary(self, module: Any) -> list[Any]:
        """Return the rotary embeddings that a module of this kind has of its own."""
        return []

    def check_stack(self, spec: Any) -> None:
        """Raise ValueError for the spec of a hybrid stack whose layers of this kind are not upstream's."""

    def adapt_given(self, arguments: Mapping[str, Any], config: Any, adapt: Callable[[Any, Any], None]) -> None:
        """Adapt specs of its own among the arguments of upstream's model, and by `adapt` the specs of layers inside."""

    def adapt(self, layer: Any, config: Any, options: AttentionOptions) -> bool:
        """Adapt the spec of a layer of this kind; False for another."""
        return False
