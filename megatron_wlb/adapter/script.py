"""`--wlb` for a script of upstream's, which parses its own command line and calls `pretrain()` itself."""

import functools
import importlib
import inspect
import sys
from argparse import Namespace
from typing import Any

from megatron_wlb.adapter.arguments import checked_with_checkpoint
from megatron_wlb.adapter.pretrain import one_line, prepare


def install() -> None:
    """Teach `--wlb` to the `pretrain_gpt.py` that runs; to be called before it imports megatron.

    Its `parse_args` learns our flags. With `--wlb` its `pretrain` then gets our data, forward step and attention; its
    own dataset provider and forward step do not run. Without `--wlb` both do what upstream's do.
    """
    with one_line():
        prepare()
    package: Any = importlib.import_module("megatron.training")
    training: Any = importlib.import_module("megatron.training.training")
    arguments: Any = importlib.import_module("megatron.training.arguments")
    checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
    arguments.parse_args = _parsing(arguments.parse_args)
    checkpointing.load_args_from_checkpoint = checked_with_checkpoint(checkpointing.load_args_from_checkpoint, one_line)
    package.pretrain = training.pretrain = _training(training.pretrain)


def _parsing(original: Any) -> Any:
    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Namespace:
        from megatron_wlb.adapter import arguments, compat

        def provider(parser: Any) -> Any:
            return arguments.add_wlb_arguments(extra_args_provider(parser) if extra_args_provider else parser)

        parsed: Namespace = original(provider, *args, **kwargs)
        if parsed.wlb:
            with one_line():
                compat.check_flags(parsed)
                if not parsed.use_checkpoint_args:
                    arguments.check(parsed, arguments.config_from_args(parsed))
            parsed.dataloader_type = "external"
        return parsed

    return parse_args


def _training(original: Any) -> Any:
    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        from megatron_wlb.adapter import arguments, compat

        if "--wlb" not in sys.argv:
            with compat.prebuilt_dataset_helpers():
                return original(*args, **kwargs)
        from megatron_wlb.adapter.job import WlbJob
        from megatron_wlb.adapter.model import configure

        call = inspect.signature(original).bind(*args, **kwargs)
        given = call.arguments
        with one_line():
            parsed = compat.parsed_by_script(given)
            job = WlbJob(parsed, arguments.config_from_args(parsed))
            model = compat.model_of_script(parsed, given)
        configure(model, options=job.attention_options, context_length=parsed.seq_length)
        given["train_valid_test_dataset_provider"] = job.dataset_provider
        given["forward_step_func"] = job.forward_step
        with compat.prebuilt_dataset_helpers(), compat.parsed(parsed), job.installed():
            return original(*call.args, **call.kwargs)

    return pretrain
