"""Entry points: upstream's script under `megatron_wlb.run`, our `pretrain_gpt.py`. Both add `--wlb` to upstream."""

import functools
import importlib
import inspect
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_wlb.adapter.errors import one_line
from megatron_wlb.adapter.upstream import scripts
from megatron_wlb.adapter.upstream.helpers import prebuilt_dataset_helpers
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.versions import check_version, upstream
from megatron_wlb.describe.adapt import adapt
from megatron_wlb.describe.flags import add_wlb_arguments, given_in, unknown_in
from megatron_wlb.describe.refusals import refusal

_HELP = {"--help", "-h"}
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Variables that say how torch keeps memory. Micro-batches of other lengths than before fragment fixed segments."""


def main() -> None:
    """Train with `--wlb` as `pretrain_gpt.py` does; bad input is one line, status 2."""
    if not ({"--wlb"} | _HELP) & set(sys.argv):
        with one_line():
            raise ValueError(
                "this script trains with --wlb only; give it, or run upstream's script: python -m megatron_wlb.run "
                "CHECKOUT/pretrain_gpt.py FLAGS"
            )
    install()
    train()


def install() -> None:
    """Add `--wlb` to the `pretrain_gpt.py` that runs, before it imports megatron.

    With `--wlb`, its `pretrain` uses the plugin's data, forward step and attention; the script's own do not run.
    """
    unhook()
    with one_line():
        before_megatron()
    after_megatron()


def unhook() -> None:
    """Keep `megatron_wlb_hook` from doing `install` a second time."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(finder, "installs_wlb", False)]


def after_megatron() -> None:
    """Check upstream's version, adapt it to the CPU where there is no GPU, and `patch_upstream` it."""
    import megatron.core
    import torch

    from megatron_wlb.adapter import cpu

    with one_line():
        check_version(megatron.core.__version__)  # a checkout on PYTHONPATH has no metadata
    if not torch.cuda.is_available():
        sys.argv += cpu.FLAGS
        cpu.install_megatron()
    patch_upstream()


def patch_upstream() -> None:
    """Do `install` for an imported megatron: replace three of upstream's functions."""
    package: Any = importlib.import_module("megatron.training")
    training: Any = importlib.import_module("megatron.training.training")
    arguments: Any = importlib.import_module("megatron.training.arguments")
    checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
    given: set[str] = set()
    said: list[str] = []  # before the first step
    arguments.parse_args = _wrap_parse_args(arguments.parse_args, given, said)
    checkpointing.load_args_from_checkpoint = _wrap_load_args(checkpointing.load_args_from_checkpoint, given, said)
    package.pretrain = training.pretrain = _wrap_pretrain(training.pretrain, said)


def train() -> None:
    """Train as upstream's script does after its imports, with our parts."""
    if upstream().passes_functions:
        with one_line():
            raise ValueError(
                "before megatron-core 0.19 a model is made by a checkout's script alone; run that one, python -m "
                "megatron_wlb.run CHECKOUT/pretrain_gpt.py FLAGS"
            )
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain

    # Upstream 0.19 divides by the evaluation interval even without evaluation, and has no default for it.
    defaults = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    make = argument_utils.hybrid_config_from_args if args.hybrid_layer_pattern else argument_utils.gpt_config_from_args
    config = argument_utils.pretrain_cfg_container_from_args(args, make(args))
    pretrain(config, None, ModelType.encoder_or_decoder, None)  # `_wrap_pretrain` has what is None


def before_megatron() -> None:
    """Redirect CUDA to the CPU without a GPU; raises ValueError if the run does not ask for gloo.

    On a GPU, let memory segments expand with `--wlb` unless the environment says how torch keeps memory.
    """
    import torch

    from megatron_wlb.adapter import cpu

    if torch.cuda.is_available():
        unsaid = not _ALLOCATOR & os.environ.keys() and "--use-nccl-ub" not in sys.argv  # upstream refuses both
        if "--wlb" in sys.argv and unsaid:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        return
    if not _HELP & set(sys.argv) and not re.search(r"--distributed-backend[ =]gloo\b", " ".join(sys.argv)):
        raise ValueError(
            "torch sees no GPU on this machine; look at its driver (nvidia-smi) and at torch.version.cuda, or give "
            "--distributed-backend gloo to train on the CPU"
        )
    cpu.install()


def _wrap_parse_args(original: Any, given: set[str], said: list[str]) -> Any:
    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
        if "--wlb" in sys.argv and any(word.partition("=")[0] == "--yaml-cfg" for word in sys.argv):
            with one_line():  # before upstream drops all flags for those of the file
                raise ValueError(f"--wlb: {refusal('yaml_cfg', True)}")
        parsers = []

        def provider(parser: Any) -> Any:
            parsers.append(add_wlb_arguments(extra_args_provider(parser) if extra_args_provider else parser))
            return parsers[0]

        parsed: Namespace = original(provider, ignore_unknown_args)
        unknown = unknown_in(parsers[0], parsed)
        given.update(given_in(parsers[0]))
        if "wlb" not in given and any(name.startswith("wlb_") for name in given - {"wlb_digest"}):
            words = [word for word in sys.argv if word.startswith(("--wlb-", "--no-load-wlb"))]
            with one_line():
                raise ValueError(f"{' '.join(words)} without --wlb; give --wlb too, or leave them out")
        if "wlb" in given and not ignore_unknown_args:  # with which upstream looks ahead for a few flags
            if flags := [flag for name, flag in unknown.items() if name in given]:
                said.append(f"> wlb: unknown to this release; trained as Megatron would: {' '.join(flags)}")
            parsed.wlb_dataloader_type = parsed.dataloader_type
            if not parsed.use_checkpoint_args:
                with one_line():
                    _finish_arguments(parsed, given, said)
            parsed.dataloader_type = "external"
        return parsed

    return parse_args


def _finish_arguments(args: Namespace, given: set[str], said: list[str]) -> None:
    """Set the arguments that `--wlb` needs, check the rest, and put the lines on changes in front of `said`."""
    from megatron_wlb.adapter import jobs

    if upstream().passes_functions:
        from megatron_wlb.adapter.upstream import legacy

        legacy.check(args)
    sharded = args.use_torch_fsdp2 or args.use_megatron_fsdp
    changes = adapt(args, given)
    if sharded:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # upstream forbids it with FSDP, and else may demand it
    jobs.check(args)
    said[:0] = changes.lines()


def _wrap_load_args(original: Any, given: set[str], said: list[str]) -> Any:
    """Wrap `load_args_from_checkpoint`, which overwrites flags, to keep attention dropout."""

    @functools.wraps(original)
    def load_args_from_checkpoint(args: Namespace, load_arg: str = "load", **options: Any) -> Any:
        dropout = args.attention_dropout
        loaded = original(args, load_arg=load_arg, **options)
        if args.wlb:
            args.attention_dropout = dropout
            if load_arg == "load":  # upstream's second and last call
                with one_line():
                    try:
                        _finish_arguments(args, given, said)
                    except ValueError as error:
                        raise ValueError(
                            f"{error}; flags of the checkpoint count, too (--use-checkpoint-args)"
                        ) from error
        return loaded

    return load_args_from_checkpoint


def _wrap_pretrain(original: Any, said: Sequence[str]) -> Any:
    @functools.wraps(original)
    @prebuilt_dataset_helpers()
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if "--wlb" not in sys.argv:
            if "--wlb-digest" in sys.argv:
                return _digested(original, *args, **kwargs)
            return original(*args, **kwargs)

        from megatron_wlb.adapter.training import Training

        bound = inspect.signature(original).bind(*args, **kwargs)
        call: dict[str, Any] = bound.arguments
        config: Any = call.get("cfg_container")
        model_provider, forward_step = call.get("model_provider"), call.get("forward_step_func")

        @one_line()
        def start() -> Training:
            if forward_step is not None:  # None: our own script
                scripts.check_script(getattr(config, "model", None), model_provider, forward_step, get_args())
            return Training(get_args(), said)

        if upstream().passes_functions:
            from megatron_wlb.adapter.upstream import legacy

            return legacy.pretrain(original, bound, start)
        training = start()
        training.configure(config.model)
        call["train_valid_test_dataset_provider"] = training.dataset_provider
        call["forward_step_func"] = training.forward_step
        with training.installed():
            return original(*bound.args, **bound.kwargs)

    return pretrain


def _digested(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's training as it is, with the digest of every step."""
    from megatron.training import training

    from megatron_wlb.adapter import digest

    bound = inspect.signature(original).bind(*args, **kwargs)
    upstream = digest.Upstream()
    bound.arguments["forward_step_func"] = upstream.watching(bound.arguments["forward_step_func"])
    log = ("loss_dict", "total_loss_dict", "iteration")
    with replaced(training, "training_log", upstream.logged, log):
        return original(*bound.args, **bound.kwargs)
