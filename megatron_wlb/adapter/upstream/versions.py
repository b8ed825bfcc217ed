"""Supported versions of upstream, and the names that differ between them."""

import importlib
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from packaging.version import Version

_COMMON = "megatron.core.models.common"


class Upstream(NamedTuple):
    """Differences of a minor version of megatron-core from others."""

    passes_functions: bool = False
    """Whether scripts pass a function to `pretrain()` that makes the model, not its config: see `legacy`."""
    tracker: tuple[str, str] = ("megatron.training.checkpointing:maybe_msc", "open")
    """Where the function is, and its name, that opens the tracker of the latest checkpoint."""
    rotary: Mapping[str, Any] = MappingProxyType({"mla_rotary_interleaved": True})
    """Arguments by which `apply_rotary_pos_emb` turns keys of latents as their layers do."""
    nodes: tuple[str, str] = (f"{_COMMON}.fine_grained_callables", f"{_COMMON}.utils")
    """Where the combined schedule has the functions of its nodes, and the class of a layer's."""


SUPPORTED = {
    "0.18": Upstream(
        passes_functions=True,
        tracker=("megatron.training.checkpointing", "open_file"),
        rotary={},
        nodes=("megatron.core.models.gpt.fine_grained_callables",) * 2,
    ),
    "0.19": Upstream(),
    "0.20": Upstream(),  # what upstream's main calls itself
}
"""Every patch release of these, by minor version."""
TESTED = "0.18, 0.19 and main of August 2026"
NEWER = (
    f"in this megatron-core, which is newer than those tested ({TESTED}), or was changed; take one of these, a newer "
    "megatron_wlb, or train without --wlb"
)
_OF_DEV = "megatron.core.context_parallel_layout"


def check_version(version: str) -> None:
    """Raise ValueError for a megatron-core that this release was not tested with, and for upstream's branch dev."""
    releases = ", ".join(f"{minor}.x" for minor in [*SUPPORTED][:-1])
    if _minor(version) not in SUPPORTED:
        raise ValueError(
            f"megatron-core {version} is not supported; install {releases}, take a checkout of main that calls itself "
            f"{[*SUPPORTED][-1]}, or a newer megatron_wlb"
        )
    if importlib.util.find_spec(_OF_DEV) is not None:
        raise ValueError(
            "this Megatron-LM is of the branch dev, whose model config, multi-token prediction and checkpoint tracker "
            f"--wlb does not know; take a checkout of main, or install {releases}"
        )


def upstream() -> Upstream:
    """Return the differences of the imported megatron-core."""
    return SUPPORTED[_minor(importlib.import_module("megatron.core").__version__)]


def _minor(version: str) -> str:
    return ".".join(map(str, Version(version).release[:2]))
