"""Runs Megatron-Bridge's real `pretrain()` and `finetune()`, with the plugin or without, in a forked world."""

import functools
import importlib.util
import os
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu

from tests.adapter.stand_ins import stand_in
from tests.adapter.training import _merge, _shards, entries, set_parameters
from tests.worlds import run_world

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge is not installed; .ci/run says how", allow_module_level=True)


# Packages that Bridge imports and whose functions these runs never call: they need a GPU, or many others.
stand_in("transformer_engine", "nvidia_resiliency_ext.inprocess", "nvidia_resiliency_ext.straggler", "megatron.energon")

from megatron.bridge.data.builders import GPTSFTDatasetConfig  # noqa: E402
from megatron.bridge.data.packing import PackedSequenceSpecs  # noqa: E402
from megatron.bridge.data.packing.parquet import write_packed_parquet  # noqa: E402
from megatron.bridge.data.sft_processing import ChatSFTPreprocessingConfig  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec  # noqa: E402
from megatron.bridge.peft import utils as adapters  # noqa: E402
from megatron.bridge.peft.dora import DoRA  # noqa: E402, F401
from megatron.bridge.peft.lora import LoRA  # noqa: E402
from megatron.bridge.training import config as configs  # noqa: E402
from megatron.bridge.training import gpt_step, setup  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.comm_overlap import CommOverlapConfig  # noqa: E402, F401
from megatron.bridge.training.finetune import finetune  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402

from megatron_wlb import bridge  # noqa: E402
from megatron_wlb.adapter.upstream.helpers import prebuilt_dataset_helpers  # noqa: E402

adapters.HAVE_TE = False  # its stand-in lacks layers

WITHOUT_FUSIONS = dict.fromkeys(
    "apply_rope_fusion persist_layer_norm masked_softmax_fusion gradient_accumulation_fusion bias_dropout_fusion "
    "bias_activation_fusion cross_entropy_loss_fusion".split(),
    False,
)
MODEL = dict(
    **{"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "num_query_groups": 2},
    **{"seq_length": 256, "vocab_size": 256, "position_embedding_type": "rope", "normalization": "RMSNorm"},
    **{"gated_linear_unit": True, "activation_func": silu, "add_bias_linear": False, "attention_dropout": 0.0},
    **{"hidden_dropout": 0.0, "share_embeddings_and_output_weights": False, "transformer_impl": "local"},
    **{"transformer_layer_spec": local_layer_spec, "use_cpu_initialization": True},
)
"""The model of `tests.adapter.training.MODEL`."""
WITHIN = {"max_tokens": 320}
ALGORITHM_1 = WITHIN | {"packing": "paper:96,160"}


SGD = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.9}
ADAM = {"optimizer": "adam", "lr": 1e-3, "adam_eps": 0.01}  # this epsilon keeps Adam smooth


PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}


EXPERTS = {
    **{"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"},
    **{"expert_model_parallel_size": 2, "moe_aux_loss_coeff": 0.0},
}


def container(
    dataset, *, steps=2, micro_batch_size=2, optimizer=None, checkpoint=None, tokenizer=None, lora_rank=None, **model
):
    """`dataset`: the prefix of a .bin/.idx dataset, or a config."""
    if isinstance(dataset, str):
        dataset = configs.GPTDatasetConfig(
            random_seed=1234, seq_length=256, data_path=dataset, split="90,10,0", num_workers=0,
            **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        )  # fmt: skip
    decay = {"start_weight_decay": 0.01, "end_weight_decay": 0.01}
    return configs.ConfigContainer(
        model=GPTModelProvider(**MODEL | WITHOUT_FUSIONS | model),
        # A micro-batch of two windows and the mean over micro-batches, which a recipe has, are set.
        train=configs.TrainingConfig(train_iters=steps, global_batch_size=8, micro_batch_size=micro_batch_size),
        validation=configs.ValidationConfig(eval_interval=1, eval_iters=1),
        optimizer=configs.OptimizerConfig(min_lr=0.0, weight_decay=0.01, **optimizer or SGD),
        scheduler=configs.SchedulerConfig(lr_decay_style="constant", override_opt_param_scheduler=True, **decay),
        ddp=configs.DistributedDataParallelConfig(average_in_collective=not model.get("calculate_per_token_loss")),
        dataset=dataset,
        logger=configs.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(**tokenizer or {"tokenizer_type": "NullTokenizer", "vocab_size": 255}),
        checkpoint=configs.CheckpointConfig(**checkpoint or {}),
        dist=configs.DistributedInitConfig(distributed_backend="gloo"),
        rng=configs.RNGConfig(seed=1234),
        peft=LoRA(dim=lora_rank, alpha=8) if lora_rank else None,
    )  # fmt: skip


def rows(folder, **given):
    """Bridge's config of fine-tuning on the files of a folder."""
    common = {"seq_length": 256, "num_workers": 0, "persistent_workers": False, "do_test": False, "seed": 5}
    return GPTSFTDatasetConfig(dataset_root=str(folder), **common, **given)


def chats(folder):
    return rows(folder, preprocessing=ChatSFTPreprocessingConfig())


def packs(folder, **of_split):
    """The same of packs, which it writes: rows of input_ids, loss_mask and seq_start_id by split."""
    paths = {}
    for split, found in of_split.items():
        paths[f"packed_{split}_data_path"] = path = str(folder / f"{split}.idx.parquet")
        write_packed_parquet(found, path)
    specs = PackedSequenceSpecs(packed_sequence_size=256, **paths)
    return rows(folder, enable_offline_packing=True, offline_packing_specs=specs)


def run(size, dataset, log=None, settings=WITHIN, call=bridge.pretrain, **options):
    """As `tests.adapter.training.train`, by Bridge; without a `log` without the plugin."""
    settings = settings | {"log": str(log)} if log else {}
    results = run_world(_run, size, dataset, settings, call, options)
    grads = [_merge([r["grads"][step] for r in results]) for step in range(len(results[0]["grads"]))]
    return results[-1] | {"grads": grads, "log": entries(log) if log else []}


def _run(dataset, settings, call, options):
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK="0")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    found, made = {"grads": [], "losses": [], "evaluations": []}, setup.setup_optimizer

    def setup_and_watch(*args, model, **rest):
        optimizer, scheduler = made(*args, model=model, **rest)
        set_parameters(model)
        optimizer.reload_model_params()
        step = optimizer.step

        def watched():
            found["grads"].append(_shards(model, lambda p: p.main_grad if p.requires_grad else None))
            return step()

        optimizer.step = watched
        return optimizer, scheduler

    class Watch(Callback):
        def on_train_step_end(self, context):
            found["losses"] += [float(loss) for loss in context.loss_dict.values()]

        def on_train_end(self, context):
            state, ranks = context.state, context.state.cfg.data_parallel_size
            found["tokens"], found["squares"] = state._flops_seqlen_sum * ranks, state._flops_seqlen_sq_sum * ranks

        def on_eval_end(self, context):
            found["evaluations"] += [float(loss) for loss in context.total_loss_dict.values()]

    setup.setup_optimizer = setup_and_watch
    call(container(dataset, **options), callbacks=[Watch()], **settings)
    return found


def alone(config, callbacks):
    """Bridge's own `finetune()`, whose local attention takes documents apart."""
    forward = DotProductAttention.forward

    def apart(self, query, key, value, attention_mask, *args, packed_seq_params=None, **rest):
        if packed_seq_params is None:
            return forward(self, query, key, value, attention_mask, *args, **rest)
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = packed_seq_params.cu_seqlens_q if bounds is None else bounds
        rows = torch.arange(len(query))
        which = torch.searchsorted(bounds, rows, right=True)
        hidden = (which[:, None] != which) | (rows[:, None] < rows)
        return forward(self, *(x[:, None] for x in (query, key, value)), hidden[None, None], *args, **rest)

    helpers = prebuilt_dataset_helpers("megatron.bridge.training.initialize")
    with helpers, patch.object(DotProductAttention, "forward", apart):
        finetune(config, gpt_step.forward_step, callbacks)
