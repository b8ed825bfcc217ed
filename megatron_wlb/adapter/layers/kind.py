"""What training states of a kind of layers: when it applies, what it replaces in upstream, and its specs."""

import contextlib
from argparse import Namespace
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from megatron_wlb.runtime.attention import AttentionOptions


class Run(NamedTuple):
    """What replacements need of the run."""

    trained: Callable[[], float]
    """Share of the running step's tokens by which losses are divided."""
    adapt: Callable[[Any, Any], None]
    """Adapts the spec of a layer, for a configuration."""


class Kind:
    stack_layer: ClassVar[str] = ""
    """Name of its spec, which is adapted, in upstream's hybrid stack."""

    def applies(self, args: Namespace) -> bool:
        """Whether a run has replacements for it."""
        return False

    def installed(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Return a context with the replacements in upstream."""
        return contextlib.nullcontext()

    def rotary(self, module: Any) -> list[Any]:
        """Return the rotary embeddings that a module of this kind has of its own."""
        return []

    def check_stack(self, spec: Any) -> None:
        """Raise ValueError for the spec of a hybrid stack whose layers of this kind are not upstream's."""

    def adapt(self, layer: Any, config: Any, options: AttentionOptions) -> bool:
        """Adapt the spec of a layer of this kind; False for another."""
        return False
