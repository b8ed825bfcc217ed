"""Megatron-core 0.17 and 0.18, whose scripts pass `pretrain()` a function that makes the model.

Goes with 0.18. What is called otherwise stands in `compat.SUPPORTED`.
"""

import contextlib
import functools
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_wlb.adapter import compat, functions
from megatron_wlb.describe.megatron import has_linear_layers
from megatron_wlb.describe.refusals import dispatches


def teach() -> None:
    """Give upstream's initialization of 0.17, which parses arguments, the functions that `script.teach` replaced."""
    initialize: Any = importlib.import_module("megatron.training.initialize")
    for name, source in (("parse_args", "arguments"), ("load_args_from_checkpoint", "checkpointing")):
        if hasattr(initialize, name):
            setattr(initialize, name, getattr(importlib.import_module(f"megatron.training.{source}"), name))


def check(args: Namespace) -> None:
    """Raise ValueError for what only later versions do not know, or know how to serve."""
    if args.rampup_batch_size is not None:
        raise ValueError("--wlb: --rampup-batch-size is not planned, megatron-core 0.19 has dropped it; leave it out")
    if has_linear_layers(args):
        raise ValueError("--wlb trains linear layers with megatron-core 0.19 or later; install that, or leave it out")
    if dispatches(args, "flex", "hybridep"):
        raise ValueError(
            "--wlb: --moe-flex-dispatcher-backend hybridep needs equal lengths on all ranks before megatron-core 0.19; "
            "give deepep"
        )


def pretrain(original: Any, bound: inspect.BoundArguments, begin: Callable[[], Any]) -> Any:
    """Run upstream's `pretrain`, called with `bound`, with `--wlb`.

    Arguments may be parsed inside, so `begin`, which returns the run's `Training`, is called behind that, before any
    process group exists.
    """
    initialize = importlib.import_module("megatron.training.initialize")
    gpt = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    scaler = importlib.import_module("megatron.core.transformer.moe.router").MoEAuxLossAutoScaler
    call, make_model = bound.arguments, bound.arguments["model_provider"]
    run, stack = SimpleNamespace(), contextlib.ExitStack()

    def starting(initialize_distributed: Any) -> Any:
        def _initialize_distributed(*args: Any, **kwargs: Any) -> Any:
            parsed: Namespace = importlib.import_module("megatron.training").get_args()
            later = {"eval_global_batch_size": parsed.global_batch_size, "dataloader_inter_document_masking": False}
            vars(parsed).update(later | vars(parsed))
            run.training = begin()
            stack.enter_context(run.training.installed())
            built = _built(run.training)
            scaled = functools.partial(_scaled, parsed)
            stack.enter_context(compat.replaced(gpt, "__init__", built, ("config", "transformer_layer_spec")))
            stack.enter_context(compat.replaced(scaler, "set_loss_scale", scaled, ("scale",)))
            return initialize_distributed(*args, **kwargs)

        return _initialize_distributed

    def model_provider(*args: Any, **kwargs: Any) -> Any:
        model = make_model(*args, **kwargs)
        if type(model) is not gpt:
            with compat.one_line():
                raise functions.another_model(type(model).__name__)
        return model

    def dataset_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
        return run.training.dataset_provider(num_samples, vp_stage)

    dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank gets iterators

    def forward_step(*args: Any, **given: Any) -> Any:
        return run.training.forward_step(*args, **given)

    replacements = compat.replaced(initialize, "_initialize_distributed", starting, ())
    with compat.prebuilt_dataset_helpers(), stack, replacements:
        call["train_valid_test_dataset_provider"] = dataset_provider
        call["model_provider"], call["forward_step_func"] = model_provider, forward_step
        return original(*bound.args, **bound.kwargs)


def _scaled(args: Namespace, original: Any) -> Any:
    """Wrap what scales router losses: with per-token loss, upstream counts tokens of one rank, and divides by all.

    A run that asked for it is left as it is.
    """
    ranks = 1 if args.wlb_per_token_loss else args.tensor_model_parallel_size * args.context_parallel_size
    return lambda scale: original(scale * ranks)


def _built(training: Any) -> Callable[[Any], Any]:
    """Wrap the constructor of GPTModel to make a chunk of the model as the run needs it."""
    from megatron_wlb.adapter.model import adapt_mtp

    def constructing(original: Any) -> Any:
        def __init__(self: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any) -> None:
            call = inspect.signature(original).bind(self, config, transformer_layer_spec, *args, **kwargs)
            chunk = SimpleNamespace(
                transformer=config, transformer_layer_spec=lambda _: transformer_layer_spec, pre_wrap_hooks=[]
            )
            training.configure(chunk)
            spec = chunk.transformer_layer_spec(config, call.arguments.get("vp_stage"))
            call.arguments["transformer_layer_spec"] = spec
            for layer in getattr(call.arguments.get("mtp_block_spec"), "layer_specs", ()):
                adapt_mtp(layer, config, training.attention)
            original(*call.args, **call.kwargs)
            for hook in chunk.pre_wrap_hooks:
                hook([self])

        return __init__

    return constructing
