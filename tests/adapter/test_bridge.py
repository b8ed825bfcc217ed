"""Megatron-Bridge's real `pretrain()` with the plugin, against Megatron's in one process: losses and all gradients."""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import silu

from megatron_wlb.adapter.plans import state_path
from tests.adapter.test_parity import compare
from tests.adapter.training import MOE, _merge, _shards, entries, set_parameters, train
from tests.worlds import run_world

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge is not installed; docs/integrations.md says how", allow_module_level=True)


class _Named(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        return getattr(_Named, name) if name.startswith("__") else _Named(name, (), {})


class _WithoutTransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Bridge imports TransformerEngine, which needs a GPU to be built, and its pre-training calls nothing of it."""

    def find_spec(self, name, path, target=None):
        ours = name.split(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


if importlib.util.find_spec("transformer_engine") is None:
    sys.meta_path.append(_WithoutTransformerEngine())

from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec  # noqa: E402
from megatron.bridge.training import config as configs  # noqa: E402
from megatron.bridge.training import setup  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.comm_overlap import CommOverlapConfig  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402

from megatron_wlb import bridge  # noqa: E402

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
ALGORITHM_1 = {"packing": "paper:96,160", "max_tokens": 320}


SGD = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.9}
ADAM = {"optimizer": "adam", "lr": 1e-3, "adam_eps": 0.01}  # this epsilon keeps Adam smooth


def container(dataset, *, steps=2, optimizer=None, checkpoint=None, **model):
    decay = {"start_weight_decay": 0.01, "end_weight_decay": 0.01}
    return configs.ConfigContainer(
        model=GPTModelProvider(**MODEL | WITHOUT_FUSIONS | model),
        # A micro-batch of two windows and the mean over micro-batches, which a recipe has, are set.
        train=configs.TrainingConfig(train_iters=steps, global_batch_size=8, micro_batch_size=2),
        validation=configs.ValidationConfig(eval_interval=1, eval_iters=1),
        optimizer=configs.OptimizerConfig(min_lr=0.0, weight_decay=0.01, **optimizer or SGD),
        scheduler=configs.SchedulerConfig(lr_decay_style="constant", override_opt_param_scheduler=True, **decay),
        ddp=configs.DistributedDataParallelConfig(average_in_collective=True),
        dataset=configs.GPTDatasetConfig(
            random_seed=1234, seq_length=256, data_path=dataset, split="90,10,0", num_workers=0,
            **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        ),
        logger=configs.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=255),
        checkpoint=configs.CheckpointConfig(**checkpoint or {}),
        dist=configs.DistributedInitConfig(distributed_backend="gloo"),
        rng=configs.RNGConfig(seed=1234),
    )  # fmt: skip


def run(size, dataset, log, settings=(), **options):
    """As `tests.adapter.training.train`, by Bridge."""
    settings = ALGORITHM_1 | dict(settings) | {"log": str(log)}
    results = run_world(_run, size, dataset, settings, options)
    grads = [_merge([r["grads"][step] for r in results]) for step in range(len(results[0]["grads"]))]
    return results[-1] | {"grads": grads, "log": entries(log)}


def _run(dataset, settings, options):
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK="0")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    found, made = {"grads": [], "evaluations": []}, setup.setup_optimizer

    def setup_and_watch(*args, model, **rest):
        optimizer, scheduler = made(*args, model=model, **rest)
        set_parameters(model)
        optimizer.reload_model_params()
        step = optimizer.step

        def watched():
            found["grads"].append(_shards(model, lambda p: p.main_grad))
            return step()

        optimizer.step = watched
        return optimizer, scheduler

    class Watch(Callback):
        def on_train_end(self, context):
            found["tokens"] = context.state._flops_seqlen_sum * context.state.cfg.data_parallel_size

        def on_eval_end(self, context):
            found["evaluations"] += [float(loss) for loss in context.total_loss_dict.values()]

    setup.setup_optimizer = setup_and_watch
    bridge.pretrain(container(dataset, **options), [Watch()], **settings)
    return found


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """One process of Megatron-LM with these flags."""

    @functools.cache
    def run(flags):
        flags = f"--eval-iters 1 --eval-interval 1 {flags}".split()
        return train(1, dataset, *flags, log=tmp_path_factory.mktemp("megatron") / "log.jsonl")

    return run


PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}


EXPERTS = {
    **{"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"},
    **{"expert_model_parallel_size": 2, "moe_aux_loss_coeff": 0.0},
}


@pytest.mark.parametrize(
    ("size", "layout", "flags"),
    [
        (2, {"context_parallel_size": 2}, ""),
        (2, PP2, ""),
        (2, PP2 | {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}, ""),
        (2, {}, ""),
        (2, EXPERTS, MOE),
    ],
)
def test_equals_megatron_in_one_process(size, layout, flags, dataset, alone, tmp_path):
    got, megatron = run(size, dataset, tmp_path / "log.jsonl", **layout), alone(flags)
    compare(got, megatron)
    assert got["evaluations"] == pytest.approx(megatron["evaluations"], rel=1e-5)
    assert got["tokens"] == pytest.approx(got["log"][1]["tokens"], abs=size)


def test_resumes_in_another_layout(dataset, tmp_path):
    folder, adam = str(tmp_path / "checkpoints"), {"optimizer": ADAM, "context_parallel_size": 2}
    whole = run(2, dataset, tmp_path / "whole.jsonl", **adam)
    run(2, dataset, tmp_path / "first.jsonl", steps=1, checkpoint={"save": folder, "save_interval": 1}, **adam)
    assert state_path(folder, 1).exists()
    again = run(2, dataset, tmp_path / "second.jsonl", optimizer=ADAM, checkpoint={"load": folder}, **PP2)
    assert [e["step"] for e in again["log"]] == [2]
    assert again["log"][0]["lengths"] == whole["log"][1]["lengths"]
    assert again["log"][0]["loss"] == pytest.approx(whole["log"][1]["loss"], rel=1e-5)


def test_what_is_set_is_said(dataset, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = container(dataset, **tp2, cuda_graph_impl="local", attention_dropout=0.1)
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    stopped = patch.object(bridge.bridge, "GlobalState", side_effect=RuntimeError("configs are final"))
    with stopped, pytest.raises(RuntimeError, match="configs are final"):
        bridge.pretrain(config)
    said = capsys.readouterr().out
    assert config.model.calculate_per_token_loss and not config.ddp.average_in_collective
    assert "> wlb: sets --micro-batch-size 1 instead of 2: a micro-batch is one packed sequence" in said
    assert config.model.cuda_graph_impl == "none" and "> wlb: without --cuda-graph-impl local" in said
    assert not config.comm_overlap.tp_comm_overlap and "> wlb: without tp_comm_overlap: " in said
    assert config.model.attention_dropout == 0 and "sets --attention-dropout 0" in said
    config.model.attention_dropout = 0.2  # not the default, so it was asked for
    with pytest.raises(ValueError, match="--attention-dropout is 0.2.* are fields of the ConfigContainer"):
        bridge.pretrain(config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": object()}, "config.model is of object"),
        ({"model.mtp_num_layers": 1}, r"does not support model\.mtp_num_layers"),
        ({"model.experimental_attention_variant": "gdn"}, r"does not support model\.experimental_attention_variant"),
        ({"dist.use_decentralized_pg": True}, "does not support dist.use_decentralized_pg"),
        ({"dataset.full_validation": True}, "does not support dataset.full_validation"),
        ({"dataset": None}, "give a GPTDatasetConfig, not NoneType"),
    ],
)
def test_what_bridge_alone_has_is_refused(changed, message, dataset):
    config = container(dataset)
    for path, value in changed.items():
        owner, _, name = path.rpartition(".")
        setattr(getattr(config, owner) if owner else config, name, value)
    with pytest.raises(ValueError, match=message):
        bridge.pretrain(config)
