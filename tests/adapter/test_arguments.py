"""Bad input gets a clear error - value, limit, remedy - before any process group is made; good input becomes a job."""

import contextlib
import os
import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import megatron.core
import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.training import training
from megatron.training.arguments import parse_args, validate_args
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_wlb.adapter import cpu, data, jobs
from megatron_wlb.adapter.layers import check_stack
from megatron_wlb.adapter.layers.attention import WlbCoreAttention
from megatron_wlb.adapter.sources import datasets
from megatron_wlb.adapter.sources.windows import TextOfWindows
from megatron_wlb.adapter.training import _of_step
from megatron_wlb.adapter.upstream import legacy
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.versions import check_version
from megatron_wlb.describe.arguments import MegatronArguments, Refused, rows
from megatron_wlb.describe.flags import add_wlb_arguments
from megatron_wlb.describe.megatron import Description, bytes_of
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.plan.samples import windows
from megatron_wlb.simulate.memory import DEVICE_SHARE
from tests.adapter.datasets import write_lengths
from tests.adapter.specs import DOUBTFUL
from tests.adapter.training import MODEL, VPP2, less, train
from tests.cli.analyses import run
from tests.jobs import job


@pytest.fixture
def parse(monkeypatch):
    def parsed(*flags, world_size=1, model=MODEL):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *model, "--data-path", "unused", "--wlb", *flags])
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        args = parse_args(add_wlb_arguments)
        args.wlb_frozen = False
        return args

    return parsed


MOE = "--num-experts 4 --moe-token-dispatcher-type"
REFUSED = {
    "--step-batch-size-schedule 300:4": "first schedule entry must have threshold 0.*; give another, such as '0:512",
    "--step-batch-size-schedule 0:4 --wlb-micro-batches 8": "--step-batch-size-schedule has several; leave it out",
    "--step-batch-size-schedule 0:4,1K:7": "7 micro-batches per step cannot be shared by 2 data-parallel",
    f"--full-validation --multiple-validation-sets {VPP2}": "--multiple-validation-sets with virtual stages",
    "--spec no.such layer": "--spec no.such layer: No module named 'no'; give a module on PYTHONPATH",
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec": "a layer with no self-attention",
    "--spec tests.adapter.specs DOUBTFUL": "the layer's is DoubtfulAttention, not Megatron's DotProductAttention",
    "--hybrid-layer-pattern M* --spec tests.adapter.specs doubtful_layer": "--spec names no Mamba layers, and",
    "--wlb-profile h200": "no profile 'h200': give a JSON file",
    "--wlb-max-tokens 128": "is 128; it must be from 256, the context window",
    "--wlb-max-tokens 301 --context-parallel-size 2": "give a multiple of 4",
    "--seq-length 254 --tensor-model-parallel-size 4 --sequence-parallel": "give a multiple of 4",
    "--seq-length 1032 --fp8-format hybrid": "give a multiple of 16",
    "--wlb-micro-batches 8 --global-batch-size 7": "--global-batch-size is 7, by which .*; give a multiple of 2",
    "--transformer-impl local --apply-layernorm-1p": "leave one of them out",
    "--wlb-sft-skip long": "--wlb-sft-skip has no effect without --sft; give both, or neither",
    "--wlb-mock-lengths F2": "--wlb-mock-lengths has no effect without --mock-data; give both, or neither",
    "--window-size 128,128": "give LEFT,0",
    f"{MOE} alltoall --moe-router-load-balancing-type quantile_balancing": "divide by the experts",
}
"""By their flags, as upstream parses them; `tests/describe` has all refusals by their arguments."""


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags, parse):
    args = parse(*flags.split(), world_size=2 if "batch" in flags else 4 if "parallel-size" in flags else 1)
    with pytest.raises(ValueError, match=REFUSED[flags]) as error:
        jobs.check(args)
    assert "--" in str(error.value)
    assert not torch.distributed.is_initialized()


def test_without_a_batch_size_every_data_parallel_rank_has_a_window(parse):
    """As upstream has it; not one of each GPU."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --wlb-micro-batches"
    jobs.check(parse(*flags.split(), "6", model=less(MODEL, "--global-batch-size"), world_size=12))
    with pytest.raises(ValueError, match="8 micro-batches per step cannot be shared by 3 data-parallel"):
        jobs.check(parse(*flags.split(), "8", model=less(MODEL, "--global-batch-size"), world_size=12))


def test_a_hybrid_stack_with_a_core_attention_of_its_own_is_refused():
    stack = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    check_stack(stack)
    doubtful = replace(stack, submodules=replace(stack.submodules, attention_layer=DOUBTFUL))
    with pytest.raises(ValueError, match="the layer's is DoubtfulAttention, not Megatron's DotProductAttention; leave"):
        check_stack(doubtful)


def test_what_is_refused_if_given_at_all_is_off_by_default(parse):
    """Some of it only in other versions."""
    args = vars(parse())
    refused = {name for name, row in rows(Refused) if row.when is bool}
    assert refused & args.keys() and not any(args.get(name) for name in refused)


def job_of(args):
    args.kv_channels = None
    validate_args(args, {})
    args.padded_vocab_size = 256
    return jobs.described(args).job()


LATENT = "--multi-latent-attention --no-rope-fusion --kv-lora-rank 32 --qk-head-dim 16 --v-head-dim 24"


@pytest.mark.parametrize("flags", ["", LATENT, f"{LATENT} --q-lora-rank 40", f"{MOE} alltoall --moe-router-topk 2"])
def test_a_job_has_the_operations_that_upstream_counts(flags, parse):
    """Of weights and attended tokens; upstream counts norms of latents, too, as a weight for each of their values."""
    base = less(MODEL, "--group-query-attention --num-query-groups") if LATENT in flags else MODEL
    args = parse(*flags.split(), "--transformer-impl", "local", model=base)
    model, lengths = job_of(args).model, np.array([250, 3, 77])
    counted = training.num_floating_point_operations(
        args, 1, seqlen_squared_sum_in_batch=(lengths**2).sum(), total_real_tokens_in_batch=lengths.sum()
    )
    layer = model.layer_weights * lengths.sum() + (model.query_size + model.output_size) / 2 * (lengths**2).sum()
    expected = 6 * (model.num_layers * layer + model.vocabulary_weights * lengths.sum())
    norms = 6 * model.num_layers * (model.kv_lora_rank + model.q_lora_rank) * lengths.sum()
    assert counted == pytest.approx(expected + norms, rel=1e-9)


def test_interleaving_is_refused_with_the_nearest_numbers_that_fit(parse, monkeypatch):
    """Of training and of evaluation."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --transformer-impl local"
    groups = "--microbatch-group-size-per-virtual-pipeline-stage 2"
    args = parse(*flags.split(), *groups.split(), "--wlb-micro-batches", "12", world_size=4)
    job = job_of(args)
    assert (job.num_micro_batches, job.global_batch_size, job.micro_batches_per_rank) == (12, 8, 6)
    args.eval_global_batch_size = 6
    with pytest.raises(ValueError, match=r"evaluation \(--eval-global-batch-size\): 6 .* give 4 or 8$"):
        jobs.evaluation_job(job, args)
    args.microbatch_group_size_per_vp_stage = None
    free, args.eval_global_batch_size = jobs.described(args).job(), 8
    assert free.schedule().group == 3  # of the 6 micro-batches that a rank has in training, and of 4 below
    short = replace(free, parallel=replace(free.parallel, group_size=2))  # as where memory is tight
    assert jobs.evaluation_job(free, args).schedule().group == jobs.evaluation_job(short, args).schedule().group == 4


@pytest.mark.parametrize(("whole", "windows"), [(False, 8), (True, 4)])
def test_evaluation_is_megatrons_sample_by_sample(whole, windows):
    """With --full-validation upstream's micro-batches are of one window."""
    args = {"eval_global_batch_size": 8, "wlb_eval_windows_per_micro_batch": 2, "full_validation": whole}
    given = job(pp=2, vpp=2, num_micro_batches=6, max_tokens=99, packing=AdaptivePacking())
    expected = {"parallel": replace(given.parallel, group_size=2), "packing": MegatronPacking()}
    found = jobs.evaluation_job(given, SimpleNamespace(microbatch_group_size_per_vp_stage=2, **args))
    assert found == replace(given, **expected, global_batch_size=windows, num_micro_batches=windows)


@pytest.mark.parametrize(
    ("count", "schedule", "budget", "chosen"),
    [("auto", None, 2.0, True), ("auto", None, None, False), (8, None, 2.0, None), ("auto", "0:4", 2.0, None)],
)
def test_the_number_is_chosen_by_the_data_that_are_left(count, schedule, budget, chosen, monkeypatch):
    """As far as memory is known, if nothing else says it."""
    asked = []
    monkeypatch.setattr(
        jobs.alternatives, "predictions", lambda *given, **how: asked.append((given[2], how)) or ("best", ["tried"])
    )
    described = SimpleNamespace(
        job=lambda packing=None: "first",
        budget=budget,
        packing=AdaptivePacking(),
        settings=SimpleNamespace(micro_batches=count),
    )
    args = SimpleNamespace(step_batch_size_schedule=schedule, seq_length=64)
    found = jobs.best_job(args, described, SimpleNamespace(samples="samples", first_sample=40))
    assert found == (("first", []) if chosen is None else ("best", ["tried"]))
    assert asked == ([] if chosen is None else [("samples", {"memory_known": chosen, "first_sample": 40})])


@pytest.mark.parametrize(
    ("schedule", "sizes", "begins"),
    [
        ("0:4,2560:8,2816:12,8192:16", [4, 4, 4, 12, 12, 16, 16], [(0, 4), (3, 12), (5, 16)]),
        ("0:4,2048:8,4096:16", [4, 4, 8, 16], [(0, 4), (2, 8), (3, 16)]),  # steps end on thresholds
    ],
)
def test_the_batch_size_of_a_step_is_upstreams(schedule, sizes, begins, parse):
    """By samples that were trained before it; a threshold that a step passes by is never reached."""
    flags = f"--step-batch-size-schedule {schedule} --transformer-impl local"
    args = parse(*flags.split(), model=less(MODEL, "--global-batch-size"))
    whole = job_of(args)
    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, args.step_batch_size_schedule, args.seq_length)
    samples, expected = 0, []
    for step in range(len(sizes)):
        args.consumed_train_samples = samples
        made = jobs.jobs_by_step(args, whole, step)
        assert made[0][0] == step
        calculator.update(samples, consistency_check=False)
        expected.append(calculator.current_global_batch_size)
        assert made[0][1].global_batch_size == made[0][1].num_micro_batches == expected[-1]
        samples += expected[-1]
    args.consumed_train_samples = 0
    assert [(at, job.global_batch_size) for at, job in jobs.jobs_by_step(args, whole, 0)] == begins
    assert expected == sizes and whole.global_batch_size == 16


def test_versions_of_megatron_core():
    for version in ("0.17.1", "0.21.0", "1.19.2"):
        match = f"core {version} is not supported; install 0.18.x, 0.19.x, take .* itself 0.20, or a newer"
        with pytest.raises(ValueError, match=match):
            check_version(version)
    for version in ("0.18.2", "0.19.0", "0.20.0+d98e", megatron.core.__version__):
        check_version(version)


def test_dev_is_known_by_what_only_dev_has(monkeypatch):
    name = "megatron.core.context_parallel_layout"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=ModuleSpec(name, None)))
    with pytest.raises(ValueError, match="is of the branch dev, whose model config.* take a checkout of main, or inst"):
        check_version("0.19.0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", None),
        ("--rampup-batch-size 2 2 64", "--rampup-batch-size is not planned.*; leave it out"),
        (f"{MOE} flex --moe-flex-dispatcher-backend hybridep", "hybridep needs equal lengths .*0.19; give deepep"),
    ],
)
def test_what_is_refused_before_019(parse, flags, message):
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        legacy.check(parse(*flags.split()))


def test_replacing_a_name_that_upstream_moved_fails():
    def replace(name, parameters):
        with replaced(training, name, lambda original: None, parameters):
            assert getattr(training, name) is None

    original = training.training_log
    replace("training_log", ("loss_dict",))
    with pytest.raises(ZeroDivisionError), replaced(training, "training_log", lambda original: None, ()):
        raise ZeroDivisionError
    assert training.training_log is original
    with pytest.raises(RuntimeError, match="no_such_function does not exist"):
        replace("no_such_function", ())
    with pytest.raises(RuntimeError, match="lacks color_map"):
        replace("training_log", ("color_map",))


@pytest.mark.parametrize(
    ("split", "evaluation"),
    [("100,0,0", 100), ("99,1,0", 0)],
)
def test_an_empty_validation_split_is_refused(split, evaluation, tmp_path):
    """Where it would be evaluated, and where upstream would wait for ever: if there is a share of no document."""
    prefix = write_lengths(tmp_path / "corpus", np.full(40, 100))
    flags = f"--train-iters 1 --num-layers 1 --global-batch-size 2 --eval-iters {evaluation} --split {split}".split()
    with pytest.raises(RuntimeError, match=f"validation split is empty, and --eval-iters is {evaluation}; give"):
        train(1, prefix, *flags)


def test_no_dataset_is_refused(parse):
    args = parse()
    args.data_path, args.wlb_sft = None, False
    with pytest.raises(ValueError, match="no dataset; give --data-path PREFIX"):
        datasets.source_of(args).check()


def test_a_token_that_is_none_and_a_file_that_is_cut_off_are_named(tmp_path):
    prefix, lengths = write_lengths(tmp_path / "corpus", np.full(30, 10)), np.full(30, 10)
    tokens = np.fromfile(f"{prefix}.bin", "<i4")
    tokens[74] = 999
    tokens.tofile(f"{prefix}.bin")
    cut = windows(lengths, 50, seed=None)
    config = SimpleNamespace(tokenizer=SimpleNamespace(eod=254), eod_mask_loss=False)
    dataset = SimpleNamespace(dataset=IndexedDataset(prefix, mmap=False), config=config, _pad_token_id=-1)
    text = TextOfWindows(cut, dataset)
    reader = data.SampleReader(
        split="train", datasets=[text], context_length=50, samples_per_micro_batch=1, vocabulary=256
    )
    first, eighth = cut.documents(np.arange(5))[[0, 7]]
    assert reader.rows(first, 0, 10)[0][0].tolist() == tokens[:10].tolist()
    with pytest.raises(ValueError, match="token 999 near place 4 of document 7 of dataset 0 of the train blend is not"):
        reader.rows(eighth, 1, 5)
    os.truncate(f"{prefix}.bin", 300)
    with pytest.raises(ValueError, match="corpus.bin was cut off since the run began: it has 300 bytes instead of"):
        reader.rows(first, 0, 10)
    dataset.dataset.path_prefix = "s3://bucket/corpus"
    assert TextOfWindows(cut, dataset).size == 0  # no file is here


def test_weights_and_optimizer_are_shared_as_flags_say(parse):
    """18 bytes a parameter, of which the distributed optimizer shares 12; Adam's only. Flags choose other dtypes."""

    def held(*flags, optimizer="adam"):
        args = parse("--expert-tensor-parallel-size", "1", "--optimizer", optimizer, *flags)
        args.kv_channels, args.ffn_hidden_size, args.padded_vocab_size = 16, 256, 512
        args.data_parallel_size = args.context_parallel_size = 2
        args.virtual_pipeline_model_parallel_size, args.world_size = None, 4 * args.pipeline_model_parallel_size
        run_of_args = Description.of(args)
        return run_of_args.held_bytes(run_of_args.job(global_batch_size=8))

    whole = held()
    assert whole % 18 == 0
    assert held("--use-distributed-optimizer") == whole * 9 / 18
    divided = "--use-distributed-optimizer", "--use-precision-aware-optimizer"  # over 4 ranks
    assert held(*divided) == whole * (2 + 4 + 10 / 4) / 18
    halves = "--main-grads-dtype", "bf16", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp8"
    assert held(*divided, *halves) == whole * (2 + 2 + 5 / 4) / 18
    assert held(*divided, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5") == whole * (6 + 6 / 4) / 18
    assert held(optimizer="sgd") is held("--use-distributed-optimizer", optimizer="muon") is None
    pipeline = "--pipeline-model-parallel-size", "2", "--num-layers"
    uneven = held(*pipeline, "4", "--decoder-last-pipeline-num-layers", "1")
    assert uneven == held(*pipeline, "6") > held(*pipeline, "4")
    moe = "4 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq ([0]+[1]*3)".split()
    assert held(*pipeline, *moe, "--decoder-first-pipeline-num-layers", "3") > held(*pipeline, *moe)


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_is_not_known_where_adapters_alone_are_trained(frozen, parse, monkeypatch):
    monkeypatch.setattr(jobs, "_budget_bytes", lambda run: 1.0)
    args = parse()
    args.kv_channels, args.wlb_frozen = None, frozen
    validate_args(args, {})
    args.padded_vocab_size = 256
    assert jobs.described(args).budget == (None if frozen else 1.0)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_an_offloaded_optimizer_leaves_as_many_bytes_on_a_gpu_as_upstreams(fraction, monkeypatch):
    """Of bf16 weights on a GPU, without memory: fp32 copies and fp32 states of what it does not offload."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    kinds = dict.fromkeys(("cpu_optimizer_cls", "gpu_optimizer_cls"), torch.optim.AdamW)
    with FakeTensorMode() as mode:
        empty = torch.empty(64, dtype=torch.bfloat16, device="meta")
        weights = [torch.nn.Parameter(FakeTensor(mode, empty, torch.device("cuda", 0))) for _ in range(10)]
        upstreams = HybridDeviceOptimizer(
            [{"params": weights}],
            **kinds,
            offload_fraction=fraction,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=False,
            lr=1e-3,
        )
        kept = [each for group in upstreams.gpu_param_groups for each in group["params"]]
        for each in kept:
            each.grad = torch.empty_like(each)
        if kept:
            upstreams.gpu_optimizer.step()
            states = [
                state for each in kept for state in upstreams.gpu_optimizer.state[each].values() if state.numel() > 1
            ]
            kept += states
    given = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
    a = MegatronArguments(**given, optimizer_offload_fraction=fraction, exp_avg_dtype="bf16")
    assert sum(each.numel() * each.element_size() for each in kept) == pytest.approx(640 * bytes_of(a)[1])


def test_activations_get_what_weights_and_optimizer_leave_of_a_gpu(parse, monkeypatch):
    described = Description.of(parse())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    for held, budget in ((None, None), (60 << 30, 12 << 30)):
        monkeypatch.setattr(Description, "held_bytes", lambda self, job, held=held: held)
        assert jobs._budget_bytes(described) == budget
    monkeypatch.setattr(Description, "held_bytes", lambda self, job: 90 << 30)
    with pytest.raises(RuntimeError, match="this machine has a GPU; run Megatron on it"):
        cpu.install()
    with pytest.raises(ValueError, match="take 90.0 GiB, over 90% of this GPU's 80; use"):
        jobs._budget_bytes(described)


@pytest.mark.parametrize(
    ("device", "capability", "profile", "said"),
    [
        ("NVIDIA B200", (10, 0), "b200-cudnn-2025", ""),
        ("NVIDIA H800", (9, 0), "h100-cudnn", "is NVIDIA H800: measure it by megatron-wlb profile"),
        ("NVIDIA A10", (8, 6), "a100-fa2", "is NVIDIA A10: measure it by megatron-wlb profile"),
        (None, None, "flops", ""),
    ],
)
def test_the_device_chooses_the_profile(device, capability, profile, said, parse, monkeypatch):
    """Or the nearest one, with a warning."""
    args = parse("--wlb-memory-budget", "60")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    job = job_of(args)
    misfit = job.profile.misfit(device, job.precision)
    assert job.profile.name == profile and bool(misfit) == bool(said) and said in misfit


def _apart():
    first, second = (SimpleNamespace(step=step, split="train") for step in (0, 1))
    list(_of_step(first, first, iter([second]), 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WlbCoreAttention(None, 1, None, "cross", None), "not cross attention; leave --wlb out"),
        (lambda: WlbCoreAttention.forward(None, *[None] * 4), "the batch carries no shard, train by pretrain()"),
        (cpu.install, "megatron was imported before adapter.cpu.install(); import it afterwards"),
        (_apart, "micro-batches of train step 1 in train step 0: the data iterators are apart; report it"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("", 1),
        ("--use-distributed-optimizer", 1),
        (
            "--use-distributed-optimizer --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 "
            "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 256",
            1,
        ),
        (
            "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16",
            (2 + 2 + 8 / 4) / 9,
        ),
        ("--use-distributed-optimizer --grad-reduce-in-bf16", (2 + 2 + 12 / 4) / 9),
    ],
)
def test_weights_and_optimizer_leave_activations_what_upstreams_formula_does(flags, share, parse):
    """On GPUs of 80 GiB: but for norms and routers, and for the `share` that other dtypes take."""
    size = "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --vocab-size 32000 "
    size += "--swiglu --group-query-attention --num-query-groups 2 --pipeline-model-parallel-size 2 --seq-length 256 "
    size += f"--global-batch-size 8 --bf16 {flags}"
    args = parse("--expert-tensor-parallel-size", "1", "--optimizer", "adam", *size.split())
    args.world_size, args.data_parallel_size, args.padded_vocab_size, args.kv_channels = 8, 4, 32000, 128
    args.virtual_pipeline_model_parallel_size = None
    held = share * compute_weight_and_optimizer_memory(args)
    of_analyze = run(f"-- torchrun --nproc-per-node 8 pretrain_gpt.py {size}").on_device().budget
    assert DEVICE_SHARE * 80 * 2**30 - of_analyze == pytest.approx(held, rel=0.02)
