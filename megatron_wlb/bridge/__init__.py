"""Megatron-Bridge's `pretrain()` and `finetune()` with `--wlb`: the same ConfigContainer, one call.

from megatron_wlb.bridge import pretrain

pretrain(config, max_tokens=40960)
"""

import contextlib
import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import megatron.core
from megatron.bridge.data import batch_utils
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.data.loaders import build_train_valid_test_datasets, get_train_valid_test_num_samples
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import checkpointing, setup, train
from megatron.bridge.training import eval as evaluation
from megatron.bridge.training import finetune as finetuning
from megatron.bridge.training import pretrain as bridge
from megatron.bridge.training.callbacks import Callback, normalize_callbacks
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, GPTFIMDatasetConfig
from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_wlb.adapter import jobs
from megatron_wlb.adapter.layers.attention import attended_squares, foreign_core
from megatron_wlb.adapter.sources import datasets
from megatron_wlb.adapter.training import Training
from megatron_wlb.adapter.upstream.helpers import prebuilt_dataset_helpers
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.versions import check_version, upstream
from megatron_wlb.bridge import rows
from megatron_wlb.describe.adapt import adapt
from megatron_wlb.describe.flags import add_wlb_arguments

_ARGUMENTS = {
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "random_seed": "seed",
    "check_for_nan_in_loss": "check_for_nan_in_loss_and_grad",
    "average_in_collective": "ddp_average_in_collective",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
}
"""Fields of Bridge's configs whose flags have another name."""
_REFUSED = """dist.use_decentralized_pg dist.eval_context_parallel_size checkpoint.non_persistent_save_interval
    train.iterations_to_skip train.step_batch_size_schedule dist.use_torch_fsdp2 model.restore_modelopt_state
    model.mtp_num_layers model.experimental_attention_variant""".split()
"""Fields of configs that are not supported."""
_LAYER_CODES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def pretrain(config: ConfigContainer, callbacks: Any = None, **settings: Any) -> None:
    """Train as Bridge's `pretrain()`, with our data, forward step, loss and attention instead of its.

    Args:
        config: of a GPT pre-trained on .bin/.idx datasets; fields that must be otherwise are set, and named before the
            first step.
        callbacks: as Bridge's.
        settings: flags of the plugin without `--wlb-`, such as `max_tokens=40960`.

    Raises ValueError for configs that cannot be served, where possible before any process group exists.
    """
    _call(bridge.pretrain, GPTDatasetConfig, config, callbacks, settings)


def finetune(config: ConfigContainer, callbacks: Any = None, **settings: Any) -> None:
    """Fine-tune as Bridge's `finetune()`: as `pretrain`, on the rows of a GPTSFTDatasetConfig, packed or not.

    All weights or LoRA's are trained.
    """
    _call(finetuning.finetune, GPTSFTDatasetConfig, config, callbacks, settings)


def _call(function: Any, datasets_of: type, config: ConfigContainer, callbacks: Any, settings: dict[str, Any]) -> None:
    check_version(megatron.core.__version__)
    if upstream().passes_functions:
        raise ValueError(
            f"megatron-core {megatron.core.__version__} is for an older Megatron-Bridge; take 0.6 or later"
        )
    run = _Run(config, settings, datasets_of)
    manager = normalize_callbacks(callbacks or [])
    manager.add(run)
    with run.installed():
        function(config, run.forward_step, manager)


class _Run(Callback):  # type: ignore[misc]
    def __init__(self, config: ConfigContainer, settings: dict[str, Any], datasets_of: type) -> None:
        self._wlb = vars(add_wlb_arguments(ArgumentParser()).parse_args(["--wlb"]))
        named = {f"wlb_{name}": value for name, value in settings.items()}
        if unknown := sorted(named.keys() - self._wlb.keys()):
            raise ValueError(
                f"{unknown[0][4:]} is no setting of the plugin; leave it out, or look for its name in docs/flags.md"
            )
        self._wlb |= named
        _refuse(config, datasets_of, self._wlb)
        self._while_training = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Step into Bridge where it prepares its configs, builds model and data, runs a step, and saves."""

        def scheduled(original: Any) -> Any:
            return lambda **sizes: self._training.planned_forward_backward(original)(**sizes)

        saved = ("model", "train_iterator", "iteration")
        prepared = ("data_iterator", "default_seq_length")
        with (
            replaced(bridge, "runtime_config_update", self._configured, ("cfg",)),
            replaced(setup, "_build_distributed_model", self._built, ("cfg", "pg_collection")),
            replaced(setup, "setup_data_iterators", self._iterators, ("cfg", "train_state")),
            replaced(train, "get_forward_backward_func", scheduled, ("pp_size", "vp_size")),
            replaced(evaluation, "get_forward_backward_func", scheduled, ("pp_size", "vp_size")),
            replaced(batch_utils, "prepare_finetuning_batch", rows.unprepared, prepared),
            replaced(evaluation, "prepare_finetuning_batch", rows.unprepared, prepared),
            replaced(checkpointing, "maybe_save_dataloader_state", self._saved, saved),
            prebuilt_dataset_helpers("megatron.bridge.training.initialize"),
            self._while_training,
        ):
            yield

    def forward_step(self, *args: Any, **given: Any) -> Any:
        """Run the forward pass of one micro-batch, or return its plan."""
        return self._training.forward_step(*args, **given)

    def on_train_step_end(self, context: Any) -> None:
        """Report the step, and give Bridge's FLOP count its documents."""
        self._state = state = context.state
        lengths = self._training.ran(context.loss_dict, state.train_state.step + 1, skipped=bool(context.skipped_iter))
        ranks = state.cfg.data_parallel_size  # Bridge multiplies by it
        state._flops_seqlen_sum = int(lengths.sum()) // ranks
        state._flops_seqlen_sq_sum = int(attended_squares(self._args, lengths)) // ranks

    def _configured(self, original: Any) -> Any:
        def runtime_config_update(cfg: ConfigContainer) -> None:
            cfg.set_data_parallel_size()
            added, self._said = _set(cfg, Namespace(**arguments(cfg, cfg.comm_overlap) | self._wlb))
            self._wlb |= added
            original(cfg)
            self._args = Namespace(**arguments(cfg) | self._wlb)
            try:
                jobs.check(self._args)
            except ValueError as error:
                raise ValueError(f"{error} (flags are fields of the ConfigContainer here)") from error

        return runtime_config_update

    def _built(self, original: Any) -> Any:
        def _build_distributed_model(cfg: ConfigContainer, pg_collection: Any) -> Any:
            model, padded = cfg.model, cfg.model.vocab_size  # known now that there is a tokenizer
            if model.should_pad_vocab:
                multiple, tp = model.make_vocab_size_divisible_by, model.tensor_model_parallel_size
                padded = calculate_padded_vocab_size(padded, multiple, tp)
            self._args.padded_vocab_size = padded
            self._training = Training(self._args, self._said)
            self._training.writes_to(lambda: (self._state.tensorboard_logger, self._state.wandb_logger))
            _check_attention(model)
            # What `configure` wants of upstream's model config; a provider is its own transformer config.
            spec = model.transformer_layer_spec
            built = SimpleNamespace(transformer=model, transformer_layer_spec=spec, pre_wrap_hooks=[])
            self._training.configure(built)
            model.transformer_layer_spec = built.transformer_layer_spec
            for hook in built.pre_wrap_hooks:
                model.register_pre_wrap_hook(hook)
            self._while_training.enter_context(self._training.installed())
            return original(cfg, pg_collection)

        return _build_distributed_model

    def _iterators(self, original: Any) -> Any:
        def setup_data_iterators(
            cfg: ConfigContainer, train_state: Any, train_valid_test_datasets_provider: Any, **rest: Any
        ) -> Any:
            self._args.iteration = train_state.step
            self._args.consumed_train_samples = train_state.consumed_train_samples
            self._args.consumed_valid_samples = train_state.consumed_valid_samples
            if self._args.wlb_sft:
                built = build_train_valid_test_datasets(cfg, train_valid_test_datasets_provider)
                self._training.load(built, rows.split_data)
            else:
                self._training.load(datasets.build(self._args, get_train_valid_test_num_samples(cfg), cfg.dataset))
            found = self._training.batches().values()
            train_state.do_train, train_state.do_valid, train_state.do_test = (each is not None for each in found)
            return tuple(None if each is None else RerunDataIterator(each) for each in found)

        return setup_data_iterators

    def _saved(self, original: Any) -> Any:
        def maybe_save_dataloader_state(
            model: Any, train_iterator: Any, iteration: int, *args: Any, **rest: Any
        ) -> None:
            self._args.consumed_train_samples = self._state.train_state.consumed_train_samples
            self._training.save(iteration)

        return maybe_save_dataloader_state


def arguments(config: ConfigContainer, overlap: Any = None) -> dict[str, Any]:
    """Return Megatron's arguments with the values of configs, and of `overlap` where it sets them."""
    dataset = config.dataset
    found: dict[str, Any] = dict.fromkeys(("skip_train", "phase_transition_iterations"))
    found |= {f.name: getattr(part, f.name) for part in _parts(config) for f in fields(part)}
    found |= {name: value for name, value in vars(overlap or Namespace()).items() if value is not None}
    found |= {argument: found.pop(name, None) for name, argument in _ARGUMENTS.items()}
    if hasattr(layout := found["pipeline_model_parallel_layout"], "layout"):  # configs are final
        stages = [chunk for chunks in zip(*layout.layout, strict=True) for chunk in chunks]
        found["pipeline_model_parallel_layout"] = "|".join(
            "".join(_LAYER_CODES[layer.name] for layer in stage) for stage in stages
        )
    found |= rows.arguments(dataset) if isinstance(dataset, GPTSFTDatasetConfig) else _of_blends(dataset)
    return found | {
        "dataloader_type": "external",
        "wlb_dataloader_type": dataset.dataloader_type,
        "wlb_frozen": config.peft is not None,
        "grad_reduce_in_bf16": not found["accumulate_allreduce_grads_in_fp32"],  # whatever dtype the optimizer takes
        "group_query_attention": True,  # a config has heads / groups of 1 where it has none
        "untie_embeddings_and_output_weights": not found["share_embeddings_and_output_weights"],
        "spec": None,
        "padded_vocab_size": None,
        "rank": get_rank_safe(),
        "world_size": get_world_size_safe(),
        "data_parallel_size": config.data_parallel_size,
    }


def _of_blends(dataset: GPTDatasetConfig) -> dict[str, Any]:
    blends = dataset.blend_per_split or (None, None, None)
    names = ("train_data_path", "valid_data_path", "test_data_path")
    return {name: _listed(blend) for name, blend in zip(names, blends, strict=True)} | {
        "data_path": _listed(dataset.blend),
        "data_args_path": None,
        "per_split_data_args_path": None,
        "mock_data": dataset.blend is None and dataset.blend_per_split is None,
        "dataloader_inter_document_masking": dataset.inter_document_masking,
    }


def _listed(blend: Any) -> list[str] | None:
    """Return a blend as `--data-path` gives it."""
    if blend is None:
        return None
    prefixes, weights = blend
    return list(prefixes) if weights is None else [str(x) for pair in zip(weights, prefixes, strict=True) for x in pair]


def _refuse(config: ConfigContainer, datasets_of: type, wlb: dict[str, Any]) -> None:
    """Raise ValueError for features that Bridge has and Megatron's flags do not, unless they are known to work."""
    model, dataset = config.model, config.dataset
    if getattr(type(model), "provide", None) is not GPTModelProvider.provide:
        raise ValueError(
            f"wlb trains models of GPTModelProvider, and config.model is of {type(model).__name__}; leave wlb out"
        )
    finetunes = datasets_of is GPTSFTDatasetConfig
    if not isinstance(dataset, datasets_of) or isinstance(dataset, GPTFIMDatasetConfig):
        how = "fine-tunes on rows of conversations" if finetunes else "pre-trains on .bin/.idx datasets"
        raise ValueError(f"wlb {how}; give a {datasets_of.__name__}, not {type(dataset).__name__}")
    others = {
        "peft, but for LoRA in finetune()": config.peft is not None and not (finetunes and type(config.peft) is LoRA),
        "inprocess_restart": config.inprocess_restart is not None and config.inprocess_restart.enabled,
    } | {name: attrgetter(name)(config) for name in _REFUSED}
    others |= rows.others(dataset, config.train, wlb) if finetunes else _others_of_blends(dataset)
    if given := [name for name, is_given in others.items() if is_given]:
        raise ValueError(f"wlb in Bridge does not support {given[0]}; leave it out, or train without wlb")


def _others_of_blends(dataset: GPTDatasetConfig) -> dict[str, Any]:
    return {
        "dataset.full_validation": dataset.full_validation,
        "dataset.multiple_validation_sets": dataset.multiple_validation_sets,
    }


def _set(config: ConfigContainer, args: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Set the fields that wlb needs; `args` are `arguments` of the configs.

    Returns additions of `adapt` to them, and the lines that name all changes.
    """
    default = args.attention_dropout == TransformerConfig.attention_dropout
    before = dict(vars(args))
    changes = adapt(args, () if default else ("attention_dropout",))
    if args.tp_comm_overlap:
        args.tp_comm_overlap = False
        changes.priced.append(
            "no tp_comm_overlap: Bridge makes user buffers before the job is known; communication is no longer hidden"
        )
    fields_of = {argument: name for name, argument in _ARGUMENTS.items()}
    for name in (name for name, value in before.items() if value != vars(args)[name]):
        field = fields_of.get(name, name)
        for owner in (*_parts(config), config.comm_overlap):
            if hasattr(owner, field):
                setattr(owner, field, vars(args)[name])
    return {name: value for name, value in vars(args).items() if name not in before}, changes.lines()


def _parts(config: ConfigContainer) -> list[Any]:
    """Return the configs with Megatron's arguments; of a name, the last one counts."""
    names = "dataset logger checkpoint rerun_state_machine dist ddp optimizer train validation model".split()
    return [getattr(config, name) for name in names]


def _check_attention(model: Any) -> None:
    """Raise ValueError for a model with a core attention of its own, which ours would replace."""
    spec = model.transformer_layer_spec
    if callable(spec) and not isinstance(spec, ModuleSpec):  # which is callable, too
        stage = {"vp_stage": 0} if "vp_stage" in inspect.signature(spec).parameters else {}
        spec = spec(model, **stage)
    for layer in getattr(spec, "layer_specs", [spec]):
        if name := foreign_core(layer):
            raise ValueError(f"wlb replaces Megatron's core attention, and config.model has {name}; train without wlb")
