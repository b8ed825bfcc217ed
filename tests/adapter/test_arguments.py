"""Bad input gets a clear error - value, limit, remedy - before any process group is made."""

import contextlib
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import megatron.core
import pytest
import torch
from megatron.training.arguments import parse_args

from megatron_wlb.adapter import arguments, compat
from megatron_wlb.adapter.data import load_splits
from megatron_wlb.config import WlbConfig
from tests.adapter.datasets import write_index
from tests.adapter.training import MODEL

ROOT = Path(__file__).parents[2]


def check(monkeypatch, *flags, world_size=1):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *MODEL, "--data-path", "unused", "--wlb", *flags])
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    args = parse_args(arguments.add_wlb_arguments)
    config = arguments.config_from_args(args)
    arguments.check(args, config)
    return args, config


REFUSED = {
    "--wlb-packing best": "choose one of original, fixed, wlb, adaptive",
    "--wlb-cp-sharding ring": "choose one of per-sequence, per-document, ",
    "--wlb-attention-backend cudnn": "choose one of auto, aten, ",
    "--wlb-planner rust": "choose one of auto, native, python",
    "--wlb-outlier-thresholds 160,96": "increasing order",
    "--wlb-outlier-thresholds 96,96": "increasing order",
    "--wlb-outlier-thresholds 0,96": "at least 1",
    "--wlb-max-tokens 128": "is under --seq-length 256.*give at least 256",
    "--wlb-max-tokens 100000000": "up to 67108864 tokens",
    "--wlb-max-tokens 301": "give a multiple of 2, such as 302",
    "--wlb-memory-budget 0": "give GiB of a GPU, more than 0 and at most 1024",
    "--wlb-crossover 0": "from 1 to 34359738368",
    "--wlb-plan-ahead 0": "from 1 to 1024",
    "--wlb-digest-interval 0": "from 1 to",
    "--wlb-max-delay-steps 11": "--wlb-max-delay-steps is 11; it must be from 12 to",
    "--micro-batch-size 2": "--micro-batch-size is 2.*give 1",
    "--eval-micro-batch-size 2": "--eval-micro-batch-size 1",
    "--seq-length 254 --context-parallel-size 4": "--seq-length 254 cannot be shared.*multiple of 8",
    "--seq-length 254 --tensor-model-parallel-size 4 --sequence-parallel": "give a multiple of 4",
    "--global-batch-size 3": "--global-batch-size 3 cannot be shared by 2 data-parallel ranks",
    "--rampup-batch-size 2 2 100": "rampup-batch-size",
    "--enable-cuda-graph": "CUDA graphs",
    "--cuda-graph-impl local": "CUDA graphs",
    "--overlap-moe-expert-parallel-comm": "overlap-moe-expert-parallel-comm",
    "--tp-comm-overlap": "tp-comm-overlap",
    "--fine-grained-activation-offloading": "keeps host memory for every shape",
    "--heterogeneous-layers-config-path x": "heterogeneous layers",
    "--heterogeneous-layers-config-encoded-json {}": "heterogeneous layers",
    "--transformer-impl local --apply-layernorm-1p": "leave one of them out",
    "--rerun-mode report_stats": "give validate_results or disabled",
    "--mtp-num-layers 1": "mtp-num-layers",
    "--sequence-parallel --defer-embedding-wgrad-compute": "by the length of the first; leave it out",
    "--cpu-offloading-retain-pinned-cpu-buffers": "buffers of one shape",
    "--num-experts 4 --moe-token-dispatcher-type allgather": "give alltoall",
    "--use-ring-exchange-p2p": "fixed shapes",
    "--attention-backend local": "--wlb-attention-backend",
    "--use-megatron-fsdp": "use --use-torch-fsdp2 or --use-distributed-optimizer",
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2": "--use-torch-fsdp2 .*use --use-distributed-optimizer",
    "--use-torch-fsdp2 --use-distributed-optimizer": "--use-torch-fsdp2 .*use --use-distributed-optimizer",
    "--use-torch-fsdp2 --save x": "--use-torch-fsdp2 with --save or --load",
    "--use-torch-fsdp2 --load x": "--use-torch-fsdp2 with --save or --load",
    "--attention-dropout 0.1": "give --attention-dropout 0",
    "--window-size 128,128": "give LEFT,0",
    "--multi-latent-attention": "multi-latent",
    "--softmax-type learnable": "give vanilla",
    "--position-embedding-type mrope": "give rope, yarn",
    "--mock-data": "--data-path",
    "--sft": "--data-path",
    "--logits-load-dir x": "order of documents",
    "--logits-save-dir x": "order of documents",
    "--full-validation": "give --eval-iters",
    "--dataloader-type cyclic": "leave it out",
    "--non-persistent-save-interval 5": "use --save-interval",
    "--iterations-to-skip 3": "leave them out",
    "--result-rejected-tracker-filename x": "leave them out",
    "--save msc://bucket/run": "to object storage",
    "--load msc://bucket/run": "to object storage",
    "--seq-length 1032 --fp8-format hybrid": "--seq-length 1032 cannot be shared .*give a multiple of 16",
    "--qk-clip": "the largest logit",
    "--log-max-attention-logit": "the largest logit",
    "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-pad-expert-input-to-capacity": "ranks; leave it out",
    "--num-experts 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep": "give deepep",
    "--num-experts 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep": "first .*; give deepep",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication": (
        "leave --no-overlap-p2p-communication out"
    ),
}
SINCE = {"eval-micro-batch-size": 18, "logits": 19, "ncclep": 19}
"""Minor version of megatron-core that first has a flag, by a part of it."""


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags, monkeypatch):
    if any(part in flags and compat.minor() < since for part, since in SINCE.items()):
        pytest.skip("this megatron-core does not have the flag")
    with pytest.raises(ValueError, match=REFUSED[flags]) as error:
        check(monkeypatch, *flags.split(), world_size=2 if "global-batch" in flags else 1)
    assert "--" in str(error.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ("", 2),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4", 4),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel", 8),
        ("--fp8-format hybrid", 16),
        ("--fp8-format hybrid --fp8-recipe mxfp8 --context-parallel-size 2", 64),
        ("--fp8-format hybrid --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel", 128),
        ("--fp4-format e2m1 --fp4-recipe nvfp4 --context-parallel-size 2", 256),
    ],
)
def test_micro_batches_are_aligned_for_ranks_and_kernels(flags, unit, monkeypatch):
    args, _ = check(monkeypatch, *flags.split(), "--wlb-max-tokens", "1024")
    assert arguments.unit_tokens(args) == unit


def test_per_token_loss_is_required(monkeypatch):
    flags = [f for f in MODEL if f != "--calculate-per-token-loss"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags, "--wlb"])
    args = parse_args(arguments.add_wlb_arguments)
    with pytest.raises(ValueError, match="--calculate-per-token-loss is missing"):
        arguments.check(args, arguments.config_from_args(args))


def test_every_setting_is_a_flag_with_help_and_the_default_of_the_config(monkeypatch):
    args, config = check(monkeypatch)
    assert config == WlbConfig()
    for field in fields(WlbConfig):
        assert getattr(args, f"wlb_{field.name}") == getattr(config, field.name)
        assert len(field.metadata["help"]) > 20


def test_help_explains_the_flags(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        parse_args(arguments.add_wlb_arguments)
    text = capsys.readouterr().out
    assert all(f"--wlb-{f.name.replace('_', '-')}" in text for f in fields(WlbConfig))


def test_flags_reach_the_config(monkeypatch):
    flags = "--wlb-packing original --wlb-outlier-thresholds 8,16 --wlb-max-tokens 512 --wlb-check-shapes --wlb-log x"
    _, config = check(monkeypatch, *flags.split())
    assert config == WlbConfig(
        packing="original", outlier_thresholds=(8, 16), max_tokens=512, check_shapes=True, log="x"
    )


@pytest.mark.parametrize("version", ["0.12.1", "0.17.0", "0.18.0", "0.20.0", "1.17.1"])
def test_unsupported_megatron_core_names_the_supported_ones(version):
    """0.17.0 and 0.18.0 exist and are not tested."""
    with pytest.raises(
        ValueError, match=f"megatron-core {version} is not supported; install 0.17.1 or a later 0.17, 0.1"
    ):
        compat.check_version(version)


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.18.3+a1b2", "0.19.0", "0.19.2", megatron.core.__version__])
def test_supported_megatron_core(version):
    compat.check_version(version)


@pytest.mark.parametrize(
    ("flag", "since"),
    [
        ("spec", 19),
        ("yaml_cfg", 19),
        ("heterogeneous_layers_config_path", 19),
        ("hybrid_context_parallel", 18),
        ("use_torch_fsdp2", 19),
    ],
)
def test_what_an_older_megatron_core_lacks_is_refused(flag, since, monkeypatch):
    for minor in (17, 18, 19):
        monkeypatch.setattr(compat, "minor", lambda minor=minor: minor)
        reason = f"--{flag.replace('_', '-')} is not supported with megatron-core .* install 0.{since} or later"
        refused = pytest.raises(ValueError, match=reason) if minor < since else contextlib.nullcontext()
        with refused:
            compat.check_flags(Namespace(**{flag: "given"}))
        compat.check_flags(Namespace(**{flag: None}))


@pytest.mark.parametrize("flag", ["use_legacy_models", "inprocess_restart"])
@pytest.mark.parametrize("minor", [17, 18, 19])
def test_what_no_megatron_core_can_do_is_refused(flag, minor, monkeypatch):
    monkeypatch.setattr(compat, "minor", lambda: minor)
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} is not supported .*; leave it out, or train"):
        compat.check_flags(Namespace(**{flag: True}))


def test_replacing_a_name_that_upstream_moved_fails():
    from megatron.training import training

    def replace(name, parameters):
        with compat.replaced(training, name, lambda original: None, parameters):
            assert getattr(training, name) is None

    original = training.training_log
    replace("training_log", ("loss_dict",))
    assert training.training_log is original
    with pytest.raises(RuntimeError, match="no_such_function does not exist"):
        replace("no_such_function", ())
    with pytest.raises(RuntimeError, match="lacks colour"):
        replace("training_log", ("colour",))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.with_suffix(".idx").unlink(), r"\.idx does not exist; give --data-path the prefix"),
        (lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:40]), "is truncated"),
        (lambda p: p.with_suffix(".bin").write_bytes(b"1234"), "is truncated, build it again"),
        (lambda p: write_index(p.with_suffix(".idx"), torch.zeros(0).numpy()), "holds no document"),
        (lambda p: write_index(p.with_suffix(".idx"), torch.ones(5).numpy()), "no document of at least 2 tokens"),
    ],
    ids=["missing", "truncated", "short bin", "empty", "too short"],
)
def test_bad_dataset(damage, message, monkeypatch, tmp_path):
    prefix = tmp_path / "corpus"
    prefix.with_suffix(".bin").write_bytes(bytes(400))
    write_index(prefix.with_suffix(".idx"), torch.full((10,), 10).numpy())
    args, _ = check(monkeypatch)
    args.data_path = [str(prefix)]
    assert len(load_splits(args)["train"].indices[0]) == 10
    damage(prefix)
    with pytest.raises(ValueError, match=message):
        load_splits(args)


@pytest.mark.parametrize(("documents", "split"), [(100, "100,0,0"), (40, "99,1,0")])
def test_an_empty_validation_split_is_refused_where_it_would_be_evaluated(documents, split, monkeypatch, tmp_path):
    write_index(tmp_path / "corpus.idx", torch.full((documents,), 10).numpy())
    (tmp_path / "corpus.bin").write_bytes(bytes(40 * documents))
    args, _ = check(monkeypatch, "--split", split, "--data-path", str(tmp_path / "corpus"))
    assert not load_splits(args)["valid"].sources
    args.eval_iters = 100  # upstream's default
    with pytest.raises(ValueError, match="--eval-iters is 100; give --eval-iters 0, or another --split"):
        load_splits(args)
    args.split = "90,10,0"
    assert load_splits(args)["valid"].sources


def test_the_entry_point_prints_one_line_and_ends_with_status_2(tmp_path):
    flags = [*MODEL, "--data-path", str(tmp_path / "nothing"), "--wlb"]
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags], capture_output=True, text=True, cwd=ROOT, env=_env(), check=False
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pretrain_gpt.py: error: dataset file")
    assert "does not exist" in last
    assert "Traceback" not in done.stderr


def _env():
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def test_weights_and_optimizer_are_shared_as_flags_say(monkeypatch):
    """By upstream's own formula: 18 bytes a parameter, of which the distributed optimizer shares 12; Adam's only."""

    def held(*flags, optimizer="adam"):
        args, _ = check(monkeypatch, "--expert-tensor-parallel-size", "1", "--optimizer", optimizer, *flags)
        args.kv_channels, args.ffn_hidden_size, args.padded_vocab_size = 16, 256, 512
        args.data_parallel_size = args.context_parallel_size = 2
        return compat.weight_and_optimizer_bytes(args)

    whole = held()
    assert whole % 18 == 0
    assert held("--use-distributed-optimizer") == whole * 9 / 18
    assert held("--use-precision-aware-optimizer") is None
    assert held(optimizer="sgd") is held("--use-distributed-optimizer", optimizer="muon") is None
    if compat.minor() >= 19:
        assert held("--use-torch-fsdp2", "--untie-embeddings-and-output-weights") == whole / 4
