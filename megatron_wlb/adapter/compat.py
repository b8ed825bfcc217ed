"""Which upstream versions work, where they differ, and scoped replacements that first check what they replace.

Megatron is imported inside the functions, since without a GPU `cpu.install` comes before it.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from packaging.version import Version

SUPPORTED = ((0, 17, 1), (0, 18, 2), (0, 19, 0))
"""The first version of each minor one of megatron-core that the tests run against."""


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


def known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of `options` that `function` takes; where it lacks one, this version lacks the flag behind it too."""
    present = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in present}


def thd_arguments(bounds: Any, padded: Any, longest: int) -> dict[str, Any]:
    """Of PackedSeqParams, for documents whose queries and keys are the same rows."""
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def weight_and_optimizer_bytes(args: Namespace) -> float | None:
    """On the fullest rank, by upstream's formula; None where the formula does not know what `args` has."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    if minor() < 18 and args.num_experts and args.expert_model_parallel_size > 1:
        return None
    # Of Adam's states only; the precision-aware ones are of other types, and may be in host memory.
    if args.optimizer != "adam" or args.use_precision_aware_optimizer:
        return None
    # Context-parallel ranks share the distributed optimizer, too. A copy, since the formula sets defaults.
    ranks = args.data_parallel_size * args.context_parallel_size
    held = float(compute_weight_and_optimizer_memory(Namespace(**vars(args) | {"data_parallel_size": ranks})))
    return held / ranks if getattr(args, "use_torch_fsdp2", False) else held


# The command line ----------------------------------------------------------------------------------------------------


def check_flags(args: Namespace) -> None:
    """Raises ValueError for flags that this version has and that we serve only from a later version on, or never."""
    from megatron.core import __version__

    needs: dict[str, int | None] = {"sft": 18, "hybrid_context_parallel": 18}
    needs |= {"spec": 19, "yaml_cfg": 19, "heterogeneous_layers_config_path": 19, "experimental_attention_variant": 19}
    needs |= {"use_torch_fsdp2": 19}
    needs |= {"use_legacy_models": None, "inprocess_restart": None}  # upstream's second try has no arguments any more
    for name, since in needs.items():
        if getattr(args, name, None) and (since is None or minor() < since):
            newer = f"install 0.{since} or later, " if since else ""
            raise ValueError(
                f"--{name.replace('_', '-')} is not supported with megatron-core {__version__}; leave it out, "
                f"{newer}or train with upstream's own pretrain_gpt.py"
            )


def parse_and_validate(extra_args_provider: Any, args_defaults: dict[str, Any]) -> Namespace:
    """Upstream's command line, validated and made global; where this version lacks a flag, as if it were not given."""
    from megatron.training import arguments, checkpointing, initialize

    if minor() >= 18:
        args = arguments.parse_and_validate_args(extra_args_provider, args_defaults=args_defaults)
    else:
        args = arguments.parse_args(extra_args_provider)
        if args.use_checkpoint_args:
            checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            checkpointing.load_args_from_checkpoint(args)
        args = arguments.validate_args(args, args_defaults)
        initialize.set_global_variables(args)
    return with_newer(args)


def with_newer(args: Namespace) -> Namespace:
    """Add the flags of 0.19 that we read and this version lacks, as if they were not given."""
    newer = {"eval_global_batch_size": args.global_batch_size, "eval_micro_batch_size": args.micro_batch_size}
    newer |= {"dataloader_inter_document_masking": False, "logits_load_dir": None}
    for name, value in newer.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return args


@contextlib.contextmanager
def parsed(args: Namespace) -> Iterator[None]:
    """Give `pretrain()` the arguments that `parse_and_validate` returned; 0.17 would parse once more."""
    from megatron.training import initialize

    with contextlib.ExitStack() as stack:
        if minor() < 18:
            for name, parameters in {
                "parse_args": ("extra_args_provider",),
                "load_args_from_checkpoint": ("args", "load_arg"),
                "validate_args": ("args", "defaults"),
                "set_global_variables": ("args",),
            }.items():
                stack.enter_context(replaced(initialize, name, lambda original: lambda *_, **__: args, parameters))
        yield


# The model -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _ModelConfig:
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
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs

        args, transformer = self.args, self.transformer
        mtp = None
        if transformer.mtp_num_layers is not None:
            last = gpt_layer_specs.get_gpt_decoder_layer_specs(transformer, *self._spec_options())[-1]
            use_te = transformer.transformer_impl == "transformer_engine"
            mtp = gpt_layer_specs.get_gpt_mtp_block_spec(transformer, last, use_te, vp_stage=vp_stage)
        chunk = GPTModel(
            config=transformer,
            transformer_layer_spec=(self.transformer_layer_spec or default_layer_spec)(self, vp_stage=vp_stage),
            mtp_block_spec=mtp,
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

    def _spec_options(self) -> tuple[bool, str, bool]:
        t = self.transformer
        return t.transformer_impl == "transformer_engine", t.normalization, t.qk_l2_norm


def model_config(args: Namespace) -> Any:
    """The model that the flags describe: `transformer`, `transformer_layer_spec`, `pre_wrap_hooks`."""
    if minor() >= 19:
        return importlib.import_module("megatron.training.argument_utils").gpt_config_from_args(args)
    from megatron.training.arguments import core_transformer_config_from_args

    transformer = core_transformer_config_from_args(args)
    if minor() < 18 and transformer.overlap_p2p_comm and not args.wlb:
        # This interleaved schedule frees an output that is still being sent; with --wlb our communicator holds it.
        transformer.deallocate_pipeline_outputs = False
    return _ModelConfig(args=args, transformer=transformer)


def default_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Upstream's layers for a `model_config`: the spec of one layer or of the block."""
    if minor() >= 19:
        return importlib.import_module("megatron.training.models.gpt").default_layer_spec(config, vp_stage)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config.transformer, *config._spec_options(), vp_stage=vp_stage)


def pretrain_arguments(args: Namespace, model: Any) -> dict[str, Any]:
    """The arguments of `pretrain()` that say what to train: a container of all settings, a function, or both."""
    built = {} if minor() >= 19 else {"model_provider": model.build}
    if minor() < 18:
        return built
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    return {"cfg_container": pretrain_cfg_container_from_args(args, None if built else model), **built}


# A script of upstream's that calls pretrain() itself -----------------------------------------------------------------


def parsed_by_script(given: dict[str, Any]) -> Namespace:
    """The script's validated arguments; 0.17 parses them inside of `pretrain()`, which got the arguments `given`."""
    if minor() < 18:
        return parse_and_validate(given.get("extra_args_provider"), given.get("args_defaults", {}))
    from megatron.training import get_args

    return with_newer(get_args())


def model_of_script(args: Namespace, given: dict[str, Any]) -> Any:
    """The `model_config` that the script's `pretrain(**given)` trains.

    Before 0.19 the script gives a function instead, for which ours is exchanged in `given`. Raises ValueError if it
    builds anything but upstream's GPT.
    """
    if minor() >= 19:
        return given["cfg_container"].model
    builder = getattr(given["model_provider"], "args", (None,))[0]
    if getattr(builder, "__name__", None) != "gpt_builder":
        raise ValueError(
            f"--wlb: the script builds its model with {builder or given['model_provider']}; with megatron-core before "
            "0.19 only gpt_builder of upstream's pretrain_gpt.py is supported, use that or install 0.19"
        )
    model = model_config(args)
    given["model_provider"] = model.build
    return model


# Checkpoints ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_tracker() -> Iterator[None]:
    """Let upstream's note of the latest checkpoint change at once.

    Upstream opens it for writing, which empties it: whoever is killed before it is written could not resume any more.
    """
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    owner, name = (checkpointing.maybe_msc, "open") if minor() >= 19 else (checkpointing, "open_file")

    def at_once(original: Any) -> Any:
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            tracker = os.path.basename(path) == "latest_checkpointed_iteration.txt" and "://" not in str(path)
            return _replacing(path) if tracker and mode == "w" else original(path, mode, *args, **kwargs)

        return open_file

    with replaced(owner, name, at_once, ()):
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


# Batches without --wlb -----------------------------------------------------------------------------------------------


def mtp_on_this_rank(config: Any, vp_stage: int | None) -> bool:
    """Whether this chunk has layers of multi-token prediction."""
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    if minor() < 18:
        return bool(mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp_stage))
    layout, layers = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return bool(mtp_on_this_rank(layout=layout, mtp_num_layers=layers, ignore_virtual=False, vp_stage=vp_stage))


def batch_on_this_tp_rank(batch: dict[str, Any], *, has_cu_seqlens: bool, **options: Any) -> dict[str, Any]:
    """Broadcast the batch that tensor-parallel rank 0 read; `options` are those of 0.19."""
    if minor() < 18:  # here it reads, too
        read = importlib.import_module("megatron.training.utils").get_batch_on_this_tp_rank
        return dict(read(iter([batch]), mtp_on_this_rank=options["mtp_on_this_rank"]))
    from megatron.core.utils import get_batch_on_this_tp_rank as broadcast

    packed = known(broadcast, is_sft=has_cu_seqlens, has_cu_seqlens=has_cu_seqlens)
    return dict(broadcast(batch, **packed, **options))


def flattened(batch: dict[str, Any]) -> dict[str, Any]:
    """Packed samples as one sequence; before 0.19 there is one sample."""
    flatten = getattr(importlib.import_module("megatron.core.utils"), "flatten_batch_for_packed_sequences", dict)
    return dict(flatten(batch))


def batch_on_this_cp_rank(batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The shard of this context-parallel rank; `options` are those of 0.19."""
    from megatron.core.utils import get_batch_on_this_cp_rank as shard

    return dict(shard(batch, **known(shard, **options)))


def count_sequence_lengths(cu_seqlens: Any) -> None:
    """Tell upstream's FLOPs accounting how long the packed sequences are; only from 0.18 on are there any."""
    importlib.import_module("megatron.training.training").update_seqlen_stats_from_cu_seqlens(cu_seqlens)
