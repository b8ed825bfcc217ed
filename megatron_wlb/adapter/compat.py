"""Supported upstream versions, and scoped replacements that check their targets.

Megatron is imported inside functions: without a GPU, `cpu.install` must run before.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from packaging.version import Version

from megatron_wlb import files
from megatron_wlb.describe.megatron import MegatronArguments, parallel_of
from megatron_wlb.describe.refusals import has_linear_layers

SUPPORTED = ((0, 19, 0), (0, 20, 0))
"""The first tested version of each supported minor version of megatron-core. Upstream's main calls itself 0.20.0."""


def check_version(version: str) -> None:
    """Raise ValueError for a megatron-core that this release was not tested with."""
    release = Version(version).release
    if not any(first[:2] == release[:2] and first <= release for first in SUPPORTED):
        tested = ", ".join(f"{major}.{minor}.{patch} or a later {major}.{minor}" for major, minor, patch in SUPPORTED)
        raise ValueError(f"megatron-core {version} is not supported; install {tested}")


@contextlib.contextmanager
def replaced(module: Any, name: str, make: Any, parameters: Sequence[str]) -> Iterator[None]:
    """Replace `module.name` by `make(original)` inside the context.

    `parameters` names what this plugin relies on of the original's. Raises RuntimeError if upstream has changed them.
    """
    original = getattr(module, name, None)
    if original is None:
        raise RuntimeError(f"{module.__name__}.{name} does not exist in this megatron-core; adapt megatron_wlb")
    present = inspect.signature(original).parameters
    if missing := [p for p in parameters if p not in present]:
        raise RuntimeError(
            f"{module.__name__}.{name}({', '.join(present)}) lacks {', '.join(missing)}; adapt megatron_wlb"
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


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Upstream's default spec for a GPT model: one layer, or the whole block."""
    return importlib.import_module("megatron.training.models.gpt").default_layer_spec(config, vp_stage)


UPSTREAM_DIGESTS = {
    "forward_step": "23bc00a993b6dcf9",
    "loss_func": "483ba9be8a8a94bb",
    "get_batch": "1dd579777a77aa29",
    "train_valid_test_datasets_provider": "5788ef8f825317e0",
    "core_gpt_dataset_config_from_args": "1d65e3f970045a0e",
}
"""`meaning_of` functions of upstream's `pretrain_gpt.py` that do not run with `--wlb`: alike in all of `SUPPORTED`."""
HYBRID_DIGESTS = UPSTREAM_DIGESTS | {
    "forward_step": "610640396c54a832",
    "train_valid_test_datasets_provider": "d992e7fd447d355b",
    "core_gpt_dataset_config_from_args": "6896cde15795994c",
}
"""The same of `pretrain_hybrid.py`."""


def check_script(model: Any, model_provider: Any, forward_step: Any) -> None:
    """Check what a script passes to `pretrain()`, whose `forward_step` will not run.

    Raises ValueError for another model than upstream's GPT and hybrid model, and for functions that are not upstream's.
    """
    models = importlib.import_module("megatron.training.models")
    known = {models.GPTModelConfig: UPSTREAM_DIGESTS, models.HybridModelConfig: HYBRID_DIGESTS}
    if type(model) not in known or model_provider is not None:
        other = "a model_provider of its own" if model_provider is not None else f"a model of {type(model).__name__}"
        raise ValueError(
            f"--wlb trains Megatron's GPT and hybrid models ({', '.join(each.__name__ for each in known)}), and this "
            f"script has {other}; train it without --wlb"
        )
    functions = forward_step.__globals__ | {"forward_step": forward_step}
    digests = known[type(model)]
    if changed := [name for name, digest in digests.items() if meaning_of(functions.get(name)) != digest]:
        raise ValueError(
            f"--wlb has Megatron's data and loss, and would leave out what the functions {', '.join(changed)} in "
            f"{inspect.getfile(forward_step)} change in them; undo that, train without --wlb, or run the "
            "pretrain_gpt.py of megatron_wlb, which has Megatron's as well"
        )


def meaning_of(function: Any) -> str:
    """Return a digest of code, less comments, layout and docstrings; "" without source."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (TypeError, OSError):
        return ""
    return hashlib.blake2b(repr(_meaning(source)).encode(), digest_size=8).hexdigest()


def _meaning(node: Any) -> Any:
    if isinstance(node, list):
        return [_meaning(n) for n in node if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    if not isinstance(node, ast.AST):
        return node
    named = ((name, _meaning(value)) for name, value in ast.iter_fields(node) if name not in ("annotation", "returns"))
    # Fields that are empty differ between versions of Python.
    return type(node).__name__, [(name, value) for name, value in named if value is not None and value != []]


def run_script(defaults: dict[str, Any]) -> None:
    """Parse the command line and call `pretrain()` as upstream's script does."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain

    own: dict[str, Any] = {"model_type": ModelType.encoder_or_decoder}
    own |= {"train_valid_test_dataset_provider": None, "forward_step_func": None}
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    make = argument_utils.hybrid_config_from_args if args.hybrid_layer_pattern else argument_utils.gpt_config_from_args
    pretrain(argument_utils.pretrain_cfg_container_from_args(args, make(args)), model_provider=None, **own)


@contextlib.contextmanager
def whole_tracker() -> Iterator[None]:
    """Make upstream update its tracker of the latest checkpoint at once; it empties the file first."""
    checkpointing = importlib.import_module("megatron.training.checkpointing")

    def at_once(original: Any) -> Any:
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            tracker = os.path.basename(path) == "latest_checkpointed_iteration.txt" and "://" not in str(path)
            return files.written(path) if tracker and mode == "w" else original(path, mode, *args, **kwargs)

        return open_file

    with replaced(checkpointing.maybe_msc, "open", at_once, ()):
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
