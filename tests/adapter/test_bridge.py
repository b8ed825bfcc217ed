"""Megatron-Bridge's real `pretrain()` with the plugin, against Megatron's in one process: losses and all gradients."""

from unittest.mock import patch

import pytest
import torch

from megatron_wlb.adapter.plans import state_path
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.megatron import bytes_of
from tests.adapter.bridge_runs import ADAM, ALGORITHM_1, EXPERTS, PP2, CommOverlapConfig, LoRA, bridge, container, run
from tests.adapter.training import MOE
from tests.upstream.test_parity import compare


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
def test_equals_megatron_in_one_process(size, layout, flags, dataset, upstream, tmp_path):
    got = run(size, dataset, tmp_path / "log.jsonl", **layout)
    megatron = upstream(f"--eval-iters 1 --eval-interval 1 {flags}")
    compare(got, megatron)
    assert got["evaluations"] == pytest.approx(megatron["evaluations"], rel=1e-5)
    lengths = [length for each in got["log"][1]["lengths"] for length in each]
    assert got["tokens"] == pytest.approx(sum(lengths), abs=size)
    assert got["squares"] == pytest.approx(sum(length**2 for length in lengths), abs=size)


def test_resumes_in_another_layout(dataset, tmp_path):
    folder, adam = str(tmp_path / "checkpoints"), {"optimizer": ADAM, "context_parallel_size": 2}
    whole = run(2, dataset, tmp_path / "whole.jsonl", ALGORITHM_1, **adam)
    saved = {"save": folder, "save_interval": 1}
    run(2, dataset, tmp_path / "first.jsonl", ALGORITHM_1, steps=1, checkpoint=saved, **adam)
    assert state_path(folder, 1).exists()
    loaded = {"load": folder}
    again = run(2, dataset, tmp_path / "second.jsonl", ALGORITHM_1, optimizer=ADAM, checkpoint=loaded, **PP2)
    assert [e["step"] for e in again["log"]] == [2]
    assert again["log"][0]["lengths"] == whole["log"][1]["lengths"]
    assert again["log"][0]["loss"] == pytest.approx(whole["log"][1]["loss"], rel=1e-5)


def test_what_is_set_is_said(dataset, monkeypatch):
    made = []
    monkeypatch.setattr(bridge, "_Run", lambda *given, make=bridge._Run: made.append(make(*given)) or made[-1])
    monkeypatch.setenv("WORLD_SIZE", "2")
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = container(dataset, **tp2, cuda_graph_impl="local", attention_dropout=0.1)
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    stopped = patch.object(bridge.bridge, "GlobalState", side_effect=RuntimeError("configs are final"))
    with stopped, pytest.raises(RuntimeError, match="configs are final"):
        bridge.pretrain(config)
    said = "\n".join(made[0]._said)
    assert config.model.calculate_per_token_loss and not config.ddp.average_in_collective
    assert "> wlb: sets --micro-batch-size 1 instead of 2: a micro-batch is one packed sequence" in said
    assert config.model.cuda_graph_impl == "none" and "> wlb: without --cuda-graph-impl local" in said
    assert not config.comm_overlap.tp_comm_overlap and "> wlb: without tp_comm_overlap: " in said
    assert config.model.attention_dropout == 0 and "sets --attention-dropout 0" in said
    config.model.attention_dropout = 0.2  # not the default, so it was asked for
    with pytest.raises(ValueError, match="--attention-dropout is 0.2.* are fields of the ConfigContainer"):
        bridge.pretrain(config)


def test_gradients_take_the_bytes_in_which_they_are_reduced(dataset):
    """Whatever the optimizer makes of them, as Bridge's buffers do."""
    for in_fp32, main_grads, taken in ((True, torch.bfloat16, 4), (False, torch.float32, 2), (True, torch.float32, 4)):
        config = container(dataset, optimizer=ADAM | {"main_grads_dtype": main_grads})
        config.ddp.grad_reduce_in_fp32, config.data_parallel_size = in_fp32, 1
        assert bytes_of(MegatronArguments.of(bridge.arguments(config)))[0] == taken


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": object()}, "config.model is of object"),
        ({"model.mtp_num_layers": 1}, r"does not support model\.mtp_num_layers"),
        ({"model.experimental_attention_variant": "gdn"}, r"does not support model\.experimental_attention_variant"),
        ({"peft": LoRA()}, r"does not support peft, but for LoRA in finetune\(\)"),
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
