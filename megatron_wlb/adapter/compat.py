"""Which upstream versions work, where they differ, and scoped replacements that first check what they replace.

Megatron is imported inside the functions, since without a GPU `cpu.install` comes before it.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
from packaging.version import Version

from megatron_wlb.pipeline.split import Split

SUPPORTED = ((0, 18, 2), (0, 19, 0), (0, 20, 0))
"""The first version of each minor one of megatron-core that is tested; 0.20.0 is what upstream's main calls itself."""


def check_version(version: str) -> None:
    """Raises ValueError for a megatron-core that this release was not tested with."""
    release = Version(version).release
    if not any(first[:2] == release[:2] and first <= release for first in SUPPORTED):
        tested = ", ".join(f"{major}.{minor}.{patch} or a later {major}.{minor}" for major, minor, patch in SUPPORTED)
        raise ValueError(f"megatron-core {version} is not supported; install {tested}")


def minor() -> int:
    """The n of the megatron-core 0.n that is installed."""
    return int(importlib.import_module("megatron.core").__version__.split(".")[1])


@contextlib.contextmanager
def replaced(module: Any, name: str, make: Any, parameters: Sequence[str]) -> Iterator[None]:
    """Replace `module.name` by `make(original)` inside the context.

    `parameters` are those of the original that we rely on. Raises RuntimeError if it is gone or lacks one of them: a
    name that upstream has moved must never be replaced silently.
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
def prebuilt_dataset_helpers() -> Iterator[None]:
    """Keep upstream from compiling its dataset helpers: the wheel ships them built, but without their Makefile."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        yield
        return
    with replaced(utils, "compile_helpers", lambda original: lambda: None, ()):
        yield


def thd_arguments(bounds: Any, longest: int) -> dict[str, Any]:
    """Arguments of PackedSeqParams for documents without padding, whose queries and keys are the same rows."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds_of = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), bounds)
    arguments = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest, **bounds_of}
    if "pad_between_seqs" in inspect.signature(PackedSeqParams).parameters:
        arguments["pad_between_seqs"] = False
    return arguments


def weight_and_optimizer_bytes(args: Namespace) -> float | None:
    """On the fullest rank, by upstream's formula; None where the formula does not know what `args` has."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    # Of Adam's states only; the precision-aware ones are of other types, and may be in host memory.
    if args.optimizer != "adam" or args.use_precision_aware_optimizer:
        return None
    # Context-parallel ranks share the distributed optimizer, too. The formula deals layers evenly, so that all stages
    # get as many as the fullest. A copy, since it sets defaults.
    ranks, stages = args.data_parallel_size * args.context_parallel_size, args.pipeline_model_parallel_size
    layers = Split.from_args(args).layers(args.num_layers, stages, args.virtual_pipeline_model_parallel_size or 1)
    told = {"data_parallel_size": ranks, "num_layers": stages * int(layers.sum(axis=1).max())}
    if isinstance(args.moe_layer_freq, list):
        told["moe_layer_freq"] = np.resize(args.moe_layer_freq, told["num_layers"]).tolist()
    held = float(compute_weight_and_optimizer_memory(Namespace(**vars(args) | told)))
    return held / ranks if getattr(args, "use_torch_fsdp2", False) else held


# The command line ----------------------------------------------------------------------------------------------------


def check_flags(args: Namespace) -> None:
    """Raise ValueError for a flag that this version has and that we serve only from a later version on."""
    for name in ("use_torch_fsdp2", "mtp_num_layers"):
        if minor() < 19 and getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is not supported with megatron-core 0.{minor()}; leave it out, or install 0.19")


# The model -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class GptConfig:
    """What we use of 0.19's GPTModelConfig, for versions that have the model built by a function."""

    args: Namespace
    transformer: Any
    transformer_layer_spec: Any = None
    pre_wrap_hooks: list[Callable[[list[Any]], list[Any]]] = field(default_factory=list)

    @property
    def transformer_impl(self) -> str:
        impl: str = self.transformer.transformer_impl
        return impl

    def build(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        """The `model_provider` of `pretrain()`: one chunk of the model."""
        from megatron.core.models.gpt import GPTModel

        args, transformer = self.args, self.transformer
        chunk = GPTModel(
            config=transformer,
            transformer_layer_spec=(self.transformer_layer_spec or default_layer_spec)(self, vp_stage=vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        for hook in self.pre_wrap_hooks:
            (chunk,) = hook([chunk])
        return chunk


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Upstream's layers for the model of a script: the spec of one layer or of the block."""
    if minor() >= 19:
        return importlib.import_module("megatron.training.models.gpt").default_layer_spec(config, vp_stage)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    t = config.transformer
    use_te = t.transformer_impl == "transformer_engine"
    return get_gpt_decoder_block_spec(t, use_te, t.normalization, t.qk_l2_norm, vp_stage=vp_stage)


def row_multiple(args: Any) -> int:
    """What FP8 and FP4 kernels align rows to, by arguments or the configuration of a model."""
    if args.fp8:
        from megatron.core.fp8_utils import get_fp8_align_size

        return int(get_fp8_align_size(args.fp8_recipe))
    if getattr(args, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_align_size

        return int(get_fp4_align_size(args.fp4_recipe))
    return 1


def latent_rotation() -> dict[str, bool]:
    """Arguments that make upstream's rotation that of multi-latent attention; before 0.19 its config does."""
    return {"mla_rotary_interleaved": True} if minor() >= 19 else {}


# A script that calls pretrain() --------------------------------------------------------------------------------------


def run_script(defaults: dict[str, Any]) -> None:
    """Parse the command line and call `pretrain()` as upstream's script does, with nothing of its own to train."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain

    own: dict[str, Any] = {"model_type": ModelType.encoder_or_decoder}
    own |= {"train_valid_test_dataset_provider": None, "forward_step_func": None}
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    model = argument_utils.gpt_config_from_args(args) if minor() >= 19 else None
    pretrain(argument_utils.pretrain_cfg_container_from_args(args, model), model_provider=None, **own)


def model_of_script(args: Namespace, call: dict[str, Any]) -> Any:
    """The model that the script's `pretrain(**call)` trains; its `transformer_layer_spec` and `pre_wrap_hooks` count.

    Before 0.19 the script gives a function instead, for which ours is exchanged in `call`. Raises ValueError if it
    builds anything but upstream's GPT.
    """
    if minor() >= 19:
        return call["cfg_container"].model
    from megatron.training.arguments import core_transformer_config_from_args

    provider = call["model_provider"]
    builder = getattr(provider, "args", (None,))[0]
    if provider is not None and getattr(builder, "__name__", None) != "gpt_builder":
        raise ValueError(
            f"--wlb: the script builds its model with {builder or provider}; with megatron-core before 0.19 only "
            "gpt_builder of upstream's pretrain_gpt.py is supported, use that or install 0.19"
        )
    model = GptConfig(args=args, transformer=core_transformer_config_from_args(args))
    call["model_provider"] = model.build
    return model


def delay_weight_gradients(args: Namespace, call: dict[str, Any], model: Any) -> None:
    """Let the layers of TransformerEngine put off the gradients of weights, and DDP wait for them.

    Set after upstream has checked its flags, which tie this to its overlap of experts' communication.
    """
    model.transformer.delay_wgrad_compute = True
    if minor() >= 19:
        call["cfg_container"].ddp.delay_wgrad_compute = True
    else:
        args.delay_wgrad_compute = True


# Checkpoints ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_tracker() -> Iterator[None]:
    """Let upstream's note of the latest checkpoint change at once.

    Upstream opens it for writing, which empties it: whoever is killed before it is written could not resume any more.
    """
    checkpointing = importlib.import_module("megatron.training.checkpointing")

    def at_once(original: Any) -> Any:
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            tracker = os.path.basename(path) == "latest_checkpointed_iteration.txt" and "://" not in str(path)
            return _replacing(path) if tracker and mode == "w" else original(path, mode, *args, **kwargs)

        return open_file

    if minor() >= 19:
        changed = replaced(checkpointing.maybe_msc, "open", at_once, ())
    else:
        changed = replaced(checkpointing, "open_file", at_once, ())
    with changed:
        yield


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[TextIO]:
    with open(f"{path}.tmp", "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


# Losses of the router ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_router_losses() -> Iterator[None]:
    """Keep the router's auxiliary and z losses from shrinking by TP * CP under `--calculate-per-token-loss`.

    Before 0.19 a rank multiplies them by its own rows only, while gradients are divided by the tokens of all ranks.
    """
    if minor() >= 19:
        yield
        return
    from megatron.core import mpu

    def whole(apply: Any) -> Any:
        return lambda rows, loss: apply(rows, loss * mpu.get_tensor_and_context_parallel_world_size())

    scaler = importlib.import_module("megatron.core.transformer.moe.router").MoEAuxLossAutoScaler
    with replaced(scaler, "apply", whole, ()):
        yield


@contextlib.contextmanager
def mean_losses(windows: float) -> Iterator[None]:
    """Let the log show means of the losses of routers and MTP over micro-batches of so many `windows` on average.

    Upstream adds them up and divides by the number of windows.
    """
    tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").MoEMetricsTracker
    helper = importlib.import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper

    def mean(original: Any) -> Any:
        @functools.wraps(original)
        def report(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            call.arguments["loss_scale"] *= windows
            return original(*call.args, **call.kwargs)

        return report

    with (
        replaced(tracker, "report", mean, ("loss_scale",)),
        replaced(helper, "track_mtp_metrics", mean, ("loss_scale",)),
    ):
        yield
