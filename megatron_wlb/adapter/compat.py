"""Supported upstream versions, scoped replacements that check their targets, and how bad input ends.

Megatron is imported inside functions: without a GPU, `cpu.install` must run before.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from packaging.version import Version

from megatron_wlb import files
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.megatron import parallel_of
from megatron_wlb.layers.linear import has_linear_layers

_COMMON = "megatron.core.models.common"


class Upstream(NamedTuple):
    """What is otherwise in a minor version of megatron-core than in others."""

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
_NEWER = (
    f"in this megatron-core, which is newer than those tested ({TESTED}), or was changed; take one of these, a newer "
    "megatron_wlb, or train without --wlb"
)
_OF_DEV = "megatron.core.context_parallel_layout"


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn a ValueError for bad input into status 2 and one line, which names the rank: files may be missing there."""
    try:
        yield
    except ValueError as error:
        here = os.environ.get("RANK")
        rank = f" on rank {here}" if here and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print(
            f"{os.path.basename(sys.argv[0])}: error{rank}: {files.printable(str(error))}\n",
            end="",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2) from error


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
    """Return what is otherwise in the megatron-core that is imported."""
    return SUPPORTED[_minor(importlib.import_module("megatron.core").__version__)]


def _minor(version: str) -> str:
    return ".".join(map(str, Version(version).release[:2]))


@contextlib.contextmanager
def replaced(module: Any, name: str, make: Any, parameters: Sequence[str]) -> Iterator[None]:
    """Replace `module.name` by `make(original)` inside the context.

    `parameters` names what this plugin relies on of the original's. Raises RuntimeError if upstream has changed them.
    """
    original = getattr(module, name, None)
    if original is None:
        raise RuntimeError(f"{module.__name__}.{name} does not exist {_NEWER}")
    present = inspect.signature(original).parameters
    if missing := [p for p in parameters if p not in present]:
        raise RuntimeError(
            f"{module.__name__}.{name}({', '.join(present)}) lacks {', '.join(missing)}, which --wlb needs, {_NEWER}"
        )
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def prebuilt_dataset_helpers(where: str = "megatron.core.datasets.utils") -> Iterator[None]:
    """Skip compilation of upstream's dataset helpers by `where` if they are built: wheels have no Makefile."""
    module = importlib.import_module(where)
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        yield
        return
    with replaced(module, "compile_helpers", lambda original: lambda: None, ()):
        yield


def weight_and_optimizer_bytes(args: Namespace) -> float | None:
    """Return upstream's bytes on the fullest rank; None without a formula."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    # The formula covers Adam and attention only. Precision-aware states have other dtypes and may be in host memory.
    if args.optimizer != "adam" or args.use_precision_aware_optimizer or has_linear_layers(args):
        return None
    # The distributed optimizer shards over context-parallel ranks, too. The formula splits layers evenly, so give every
    # stage as many layers as the fullest stage has. Pass a copy, since the formula sets defaults.
    parallel = parallel_of(MegatronArguments.of(vars(args)))
    ranks, stages = args.data_parallel_size * args.context_parallel_size, parallel.pp
    layers = parallel.split.layers(args.num_layers, stages, parallel.vpp)
    told = {"data_parallel_size": ranks, "num_layers": stages * int(layers.sum(axis=1).max())}
    if isinstance(args.moe_layer_freq, list):
        told["moe_layer_freq"] = np.resize(args.moe_layer_freq, told["num_layers"]).tolist()
    return float(compute_weight_and_optimizer_memory(Namespace(**vars(args) | told)))


def batch_sizes(args: Namespace) -> list[tuple[int, int]]:
    """(samples trained before, windows a step) of `--step-batch-size-schedule`; [] without. Raises ValueError."""
    if getattr(args, "step_batch_size_schedule", None) is None:
        return []
    calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
    try:
        schedule: list[tuple[int, int]] = calculator.StepBatchsizeNumMicroBatchesCalculator(
            1, 1, False, 1, args.step_batch_size_schedule, args.seq_length
        ).schedule
    except (AssertionError, ValueError) as error:
        raise ValueError(f"--step-batch-size-schedule: {error}; give another, such as '0:512 100B:1024'") from error
    return schedule


@contextlib.contextmanager
def whole_tracker() -> Iterator[None]:
    """Make upstream update its tracker of the latest checkpoint at once; it empties the file first."""

    def at_once(original: Any) -> Any:
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            tracker = os.path.basename(path) == "latest_checkpointed_iteration.txt" and "://" not in str(path)
            return files.written(path) if tracker and mode == "w" else original(path, mode, *args, **kwargs)

        return open_file

    owner, name = upstream().tracker
    with replaced(pkgutil.resolve_name(owner), name, at_once, ()):
        yield


@contextlib.contextmanager
def mean_losses(windows: Callable[[], float]) -> Iterator[None]:
    """Log router and MTP losses as means over micro-batches of so many windows each in the step."""
    tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").MoEMetricsTracker
    helper = importlib.import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper

    def mean(original: Any) -> Any:
        @functools.wraps(original)
        def report(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            call.arguments["loss_scale"] *= windows()
            return original(*call.args, **call.kwargs)

        return report

    with (
        replaced(tracker, "report", mean, ("loss_scale",)),
        replaced(helper, "track_mtp_metrics", mean, ("loss_scale",)),
    ):
        yield
