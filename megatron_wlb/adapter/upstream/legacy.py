"""Megatron-core 0.18, whose scripts pass `pretrain()` a function that makes the model.

Goes with 0.18. Other names are in `versions.SUPPORTED`.
"""

import functools
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_wlb.adapter.errors import one_line
from megatron_wlb.adapter.upstream import scripts
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.layers.experts import dispatches


def check(args: Namespace) -> None:
    """Raise ValueError for arguments that later versions have dropped, or that only they serve."""
    from megatron_wlb.adapter import layers

    if args.rampup_batch_size is not None:
        raise ValueError("--wlb: --rampup-batch-size is not planned, megatron-core 0.19 has dropped it; leave it out")
    if any(kind.since > (0, 18) for kind in layers.of(args)):
        raise ValueError("--wlb trains linear layers with megatron-core 0.19 or later; install that, or leave it out")
    if dispatches(args, "flex", "hybridep"):
        raise ValueError(
            "--wlb: --moe-flex-dispatcher-backend hybridep needs equal lengths on all ranks before megatron-core 0.19; "
            "give deepep"
        )


def pretrain(original: Any, bound: inspect.BoundArguments, start: Callable[[], Any]) -> Any:
    """Run upstream's `pretrain`, called with `bound`, with `--wlb`; `start` returns the run's `Training`."""
    args: Namespace = importlib.import_module("megatron.training").get_args()
    gpt = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    scaler = importlib.import_module("megatron.core.transformer.moe.router").MoEAuxLossAutoScaler
    call, make_model = bound.arguments, bound.arguments["model_provider"]
    args.dataloader_inter_document_masking = False  # a flag of 0.19
    training = start()

    def model_provider(*args: Any, **kwargs: Any) -> Any:
        model = make_model(*args, **kwargs)
        if type(model) is not gpt:
            with one_line():
                raise scripts.another_model(type(model).__name__)
        return model

    call["train_valid_test_dataset_provider"] = training.dataset_provider
    call["model_provider"], call["forward_step_func"] = model_provider, training.forward_step
    with (
        training.installed(),
        replaced(gpt, "__init__", _built(training), ("config", "transformer_layer_spec")),
        replaced(scaler, "set_loss_scale", functools.partial(_scaled, args), ("scale",)),
    ):
        return original(*bound.args, **bound.kwargs)


def _scaled(args: Namespace, original: Any) -> Any:
    """Wrap the scale of router losses: with per-token loss, upstream counts tokens of one rank, and divides by all.

    A run that asked for it is left as it is.
    """
    ranks = 1 if args.wlb_per_token_loss else args.tensor_model_parallel_size * args.context_parallel_size
    return lambda scale: original(scale * ranks)


def _built(training: Any) -> Callable[[Any], Any]:
    """Wrap the constructor of GPTModel to make a chunk of the model as the run needs it."""
    from megatron_wlb.adapter import layers

    def constructing(original: Any) -> Any:
        def __init__(self: Any, config: Any, transformer_layer_spec: Any, *args: Any, **kwargs: Any) -> None:
            call = inspect.signature(original).bind(self, config, transformer_layer_spec, *args, **kwargs)
            chunk = SimpleNamespace(
                transformer=config, transformer_layer_spec=lambda _: transformer_layer_spec, pre_wrap_hooks=[]
            )
            training.configure(chunk)
            spec = chunk.transformer_layer_spec(config, call.arguments.get("vp_stage"))
            call.arguments["transformer_layer_spec"] = spec
            for kind in layers.KINDS:
                kind.adapt_given(call.arguments, config, functools.partial(layers.adapt, options=training.attention))
            original(*call.args, **call.kwargs)
            for hook in chunk.pre_wrap_hooks:
                hook([self])

        return __init__

    return constructing
