"""Errors of the part that is plugged into Megatron; its refusals of flags are all here, each with the flags' values."""

import copy
import functools
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import torch

import tests.adapter.conftest  # noqa: F401  # makes Megatron importable without a GPU

# isort: split
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.training import training
from megatron.training.arguments import parse_args

from megatron_wlb import run
from megatron_wlb.adapter import arguments, checkpoint, compat, cpu, data, job, memory, pretrain
from megatron_wlb.adapter.job import WlbJob
from megatron_wlb.adapter.model import WlbCoreAttention
from megatron_wlb.adapter.p2p import PlannedP2PCommunicator
from megatron_wlb.adapter.resume import resume
from megatron_wlb.adapter.thd import ThdShard
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan import native
from megatron_wlb.plan.sharding import per_document
from tests.adapter.datasets import write_lengths
from tests.adapter.training import MODEL
from tests.errors.case import At, Case


@functools.cache
def parsed():
    before = sys.argv
    sys.argv = ["pretrain_gpt.py", *MODEL, "--wlb"]
    try:
        return parse_args(arguments.add_wlb_arguments)
    finally:
        sys.argv = before


def args_with(**changes):
    return Namespace(**(vars(copy.copy(parsed())) | changes))


def refused(config=None, **changes):
    """What upstream's flags must be, where these are given."""
    return lambda at: arguments.check(args_with(**changes), config or WlbConfig())


def attend(at: At):
    """In a batch of upstream's."""
    WlbCoreAttention.forward(SimpleNamespace(), None, None, None, None)


def compare_shapes(at: At):
    communicator = object.__new__(PlannedP2PCommunicator)
    communicator.pp_group, communicator._check_shapes = SimpleNamespace(rank=lambda: 0), True
    communicator._forward = communicator._backward = iter(())
    at.patch.setattr(P2PCommunicator, "_communicate_shapes", lambda self, *tensors: ([1, 1, 8], [0, 0, 0]))
    communicator._communicate_shapes(None, None, False, False)


def no_training_split(at: At):
    prefix = write_lengths(at.folder / "corpus", np.ones(5, np.int64))
    data.load_splits(args_with(data_path=[prefix]))


def no_validation_split(at: At):
    prefix = write_lengths(at.folder / "corpus", np.full(9, 9, np.int64))
    data.load_splits(args_with(data_path=[prefix], split="100,0,0", eval_iters=100))


def save_in_a_file(at: At):
    (at.folder / "file").touch()
    checkpoint.save_state(str(at.folder / "file"), 3, {"step": 3}, {})


def load_state(write):
    """Of iteration 3, after `write` has written its file."""

    def call(at: At):
        write(checkpoint.state_path(str(at.folder), 3))
        checkpoint.load_state(str(at.folder), 3)

    return call


def too_large(path):
    with path.open("wb") as file:
        file.truncate(checkpoint.MAX_STATE_BYTES + 1)


def other_step(at: At):
    checkpoint.save_state(str(at.folder), 3, {"step": 7}, {})
    resume(None, Namespace(load=str(at.folder)), WlbConfig(), 3, {})


def without_native(at: At):
    at.patch.setattr(native, "AVAILABLE", False)
    at.patch.setattr(memory, "activation_model", lambda args, config: None)
    at.patch.setattr(data, "load_splits", lambda args: {})
    at.patch.setattr(memory, "fitting_tokens", lambda *given: None)
    WlbJob(args_with(data_parallel_size=1), WlbConfig(planner="native", profile="flops", crossover=5))


def apart(at: At):
    batches = iter([SimpleNamespace(step=0, split="train"), SimpleNamespace(step=1, split="train")])
    first = next(batches)
    list(job._of_step(first, first, batches, 2))


def too_large_for_the_gpu(at: At):
    at.patch.setattr(torch.cuda, "is_available", lambda: True)
    at.patch.setattr(torch.cuda, "current_device", lambda: 0)
    at.patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    at.patch.setattr(compat, "weight_and_optimizer_bytes", lambda args: 90.5 * 2**30)
    memory.fitting_tokens(None, WlbConfig(), None, 1, 1)


def other_plan(at: At):
    """Another rank has digest 6."""
    planner = SimpleNamespace(get=lambda step: SimpleNamespace(digest=5))
    at.patch.setattr(torch.distributed, "all_reduce", lambda extremes, op: extremes[0].fill_(6))
    WlbJob._compare_digests(SimpleNamespace(_planners={"train": planner}, _device="cpu"), 3)


def replace(name, *parameters):
    def call(at: At):
        with compat.replaced(training, name, lambda original: None, parameters):
            pass

    return call


def with_version(minor, call):
    def patched(at: At):
        at.patch.setattr(compat, "minor", lambda: minor)
        call()

    return patched


def with_gpu(there):
    def call(at: At):
        at.patch.setattr(torch.cuda, "is_available", lambda: there)
        cpu.install()

    return call


def script(at: At):
    at.patch.setattr(sys, "argv", ["megatron_wlb.run", "none.py"])
    run.main()


def one_line(at: At):
    at.patch.setattr(sys, "argv", ["pretrain_gpt.py"])
    at.patch.delenv("RANK", raising=False)
    with pretrain.one_line():
        WlbConfig(packing="best")


FSDP = {"use_torch_fsdp2": True, "untie_embeddings_and_output_weights": True}

CASES: list[Case] = [
    # model.py, cpu.py, p2p.py, data.py
    (
        "--wlb supports self attention, not <cross> attention; leave --wlb out",
        lambda at: WlbCoreAttention(None, 1, None, "cross", None),
    ),
    (
        "this model was built with --wlb and needs its batches; the batch carries <no shard>, train by pretrain() or "
        "leave --wlb out",
        attend,
    ),
    ("this machine has <a GPU>; run Megatron on it", with_gpu(True)),
    ("<megatron> was imported before adapter.cpu.install(); import it afterwards", with_gpu(False)),
    (
        "pipeline rank 0: the plan says shapes <([0, 0, 0], [0, 0, 0])>, its neighbours sent <([1, 1, 8], [0, 0, 0])>;"
        " report it, with the flags",
        compare_shapes,
    ),
    (
        "--wlb: <no dataset>; give --data-path PREFIX (or --train-data-path ...)",
        lambda at: data.load_splits(args_with(data_path=None)),
    ),
    (
        "--wlb: the training split is <empty>: no document of at least <2> tokens; check --split",
        no_training_split,
    ),
    (
        "--wlb: the validation split is empty, and --eval-iters is <100>; give --eval-iters <0>, or another --split",
        no_validation_split,
    ),
    # checkpoint.py, resume.py
    (
        "[Errno …] cannot save the packer state <…iter_0000003.wlb.json>: …; earlier checkpoints are as they were, "
        "free space or make the folder writable, and resume from the last one",
        save_in_a_file,
    ),
    (
        "the checkpoint of iteration <3> in … has no packer state iter_0000003.wlb.json: it was saved without --wlb, "
        "or copied without this file; copy the file",
        load_state(lambda path: None),
    ),
    (
        "packer state … has <268435457> bytes, where no state has over <268435456>; restore it or resume an older one",
        load_state(too_large),
    ),
    (
        "packer state <…> is damaged (its digest is not that of its contents); restore it or resume an older one",
        load_state(lambda path: path.write_text('{"step": 7}')),
    ),
    (
        "packer state <…> is damaged (its layout does not map names to numbers and texts); restore it or resume an "
        "older one",
        load_state(lambda path: checkpoint.save_state(str(path.parent), 3, {"step": 3}, {"CP": None})),
    ),
    (
        "the packer state is of step <7>, not of iteration <3>; copy that one's; or begin with the data anew by "
        "--wlb-restart-packing",
        other_step,
    ),
    # arguments.py
    ("<'9,x'> must be <integers>, such as 32768,65536", lambda at: arguments._integers("9,x")),
    ("<'many'> must be <a number of tokens>, or auto", lambda at: arguments._integer_or_auto("many")),
    (
        "--wlb: --seq-length <254> cannot be shared by <4> context-parallel and 1 tensor-parallel ranks; give a "
        "multiple of <8>",
        refused(seq_length=254, context_parallel_size=4),
    ),
    (
        "--wlb: --global-batch-size <3> cannot be shared by <2> data-parallel ranks; give a multiple",
        refused(global_batch_size=3, world_size=2),
    ),
    (
        "<--wlb-attention-backend megatron> with --transformer-impl <local>, whose attention knows no packed "
        "documents; leave --transformer-impl out",
        refused(WlbConfig(attention_backend="megatron"), transformer_impl="local"),
    ),
    (
        "--wlb-attention-backend megatron cuts every document over <2> context-parallel ranks, and --wlb-cp-sharding "
        "is <adaptive>; give <per-document>",
        refused(
            WlbConfig(attention_backend="megatron"),
            transformer_impl="transformer_engine",
            context_parallel_size=2,
            world_size=2,
        ),
    ),
    (
        "--wlb-attention-backend megatron: a document of <9> tokens does not divide into <2 * CP = 4> equal chunks; "
        "choose another backend, or data whose documents divide (tokens less one)",
        lambda at: ThdShard.build(per_document(np.array([8, 9, 4]), 2), 0),
    ),
    ("--wlb: <--seq-length> is missing; give the context window", refused(seq_length=None)),
    (
        "--wlb: <--mtp-num-layers> would predict across the boundaries of packed documents and CP shards; leave it "
        "out; flags of the checkpoint count, too (--use-checkpoint-args)",
        lambda at: arguments.checked_with_checkpoint(lambda args, load_arg: vars(args).update(mtp_num_layers=1))(
            args_with()
        ),
    ),
    (
        "--wlb: <--defer-embedding-wgrad-compute> with --sequence-parallel gathers all micro-batches by the length of "
        "the first; leave it out",
        refused(defer_embedding_wgrad_compute=True, sequence_parallel=True),
    ),
    (
        "--wlb: <--cpu-offloading-retain-pinned-cpu-buffers> keeps buffers of one shape, and micro-batches vary in "
        "length; leave it out",
        refused(cpu_offloading_retain_pinned_cpu_buffers=True),
    ),
    (
        "--wlb: <--logits-load-dir and --logits-save-dir> go by the order of documents of a run without --wlb; leave "
        "them out",
        refused(logits_load_dir="x"),
    ),
    (
        "--wlb: --moe-flex-dispatcher-backend <ncclep> sizes its buffers by the first micro-batch; give <deepep>",
        refused(num_experts=4, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ncclep"),
    ),
    (
        "--wlb: --micro-batch-size is <2>; a micro-batch is one packed sequence, give <1> (and --eval-micro-batch-size "
        "<1> or none)",
        refused(micro_batch_size=2),
    ),
    (
        "--wlb: <--calculate-per-token-loss> is missing; give it, since without it every micro-batch would weigh the "
        "same, whatever its length",
        refused(calculate_per_token_loss=False),
    ),
    (
        "--wlb: a global batch size that changes (<--rampup-batch-size, --step-batch-size-schedule>) is not supported; "
        "give a fixed --global-batch-size",
        refused(rampup_batch_size=[2, 2, 100]),
    ),
    (
        "--wlb: <CUDA graphs> need fixed shapes, and micro-batches vary in length; leave --cuda-graph-impl out",
        refused(cuda_graph_impl="local"),
    ),
    (
        "--wlb: <--overlap-moe-expert-parallel-comm> replaces the pipeline schedule; leave it out",
        refused(overlap_moe_expert_parallel_comm=True),
    ),
    ("--wlb: <--tp-comm-overlap> has buffers of fixed size; leave it out", refused(tp_comm_overlap=True)),
    (
        "--wlb: <--fine-grained-activation-offloading> keeps host memory for every shape that it has met, and "
        "micro-batches vary in length; leave it out",
        refused(fine_grained_activation_offloading=True),
    ),
    (
        "--wlb: <heterogeneous layers> are not supported; leave --heterogeneous-layers-config-path and "
        "--heterogeneous-layers-config-encoded-json out",
        refused(heterogeneous_layers_config_path="x"),
    ),
    (
        "--wlb: <--apply-layernorm-1p> is not supported with --transformer-impl local; leave one of them out",
        refused(transformer_impl="local", layernorm_zero_centered_gamma=True),
    ),
    (
        "--wlb: <--mtp-num-layers> would predict across the boundaries of packed documents and CP shards; leave it out",
        refused(mtp_num_layers=1),
    ),
    (
        "--wlb: --moe-token-dispatcher-type <allgather> needs equal lengths on all ranks; give <alltoall>",
        refused(num_experts=4, moe_token_dispatcher_type="allgather"),
    ),
    (
        "--wlb: with <two pipeline ranks and virtual stages> the next rank is also the previous one, and messages of "
        "one batch would be mixed up; leave --no-overlap-p2p-communication out",
        refused(
            pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, overlap_p2p_comm=False, world_size=2
        ),
    ),
    (
        "--wlb: <--use-ring-exchange-p2p> needs fixed shapes; leave it out",
        refused(use_ring_exchange_p2p=True),
    ),
    (
        "--wlb: --attention-backend <local> would replace the attention of --wlb; choose with --wlb-attention-backend",
        refused(attention_backend="local"),
    ),
    (
        "--wlb: <--use-torch-fsdp2> does not go with pipeline or expert parallelism, tied embeddings or the "
        "distributed optimizer; leave it out and use --use-distributed-optimizer",
        refused(**FSDP, use_distributed_optimizer=True),
    ),
    (
        "--wlb: <--use-torch-fsdp2> with --save or --load: upstream does not bring back the optimizer state, in either "
        "--ckpt-format; use --use-distributed-optimizer",
        refused(**FSDP, save="x"),
    ),
    (
        "--wlb: <--use-megatron-fsdp> is not supported yet; use --use-torch-fsdp2 or --use-distributed-optimizer",
        refused(use_megatron_fsdp=True),
    ),
    (
        "--wlb: --attention-dropout is <0.1>; packed attention has none, give --attention-dropout <0>",
        refused(attention_dropout=0.1),
    ),
    (
        "--wlb: <multi-latent attention> and experimental variants are not supported; use plain attention",
        refused(multi_latent_attention=True),
    ),
    (
        "--wlb: --window-size is <(128, 128)>; causal attention sees nothing to its right, give <LEFT,0>",
        refused(window_size=(128, 128)),
    ),
    (
        "--wlb: --softmax-type <learnable> (attention sinks) is not supported; give <vanilla>",
        refused(softmax_type="learnable"),
    ),
    (
        "--wlb: --position-embedding-type <mrope> is not supported; give <rope, yarn, learned_absolute or none>",
        refused(position_embedding_type="mrope"),
    ),
    (
        "--wlb: only pre-training on .bin/.idx datasets is supported (--data-path); leave <--sft, --mock-data, "
        "--fim-data, --perform-rl-step and --hybrid-context-parallel> out",
        refused(mock_data=True),
    ),
    (
        "--wlb: <--full-validation> and --multiple-validation-sets are not supported; give --eval-iters",
        refused(full_validation=True),
    ),
    (
        "--wlb: --dataloader-type <cyclic> would replace the sampler of --wlb; leave it out",
        refused(dataloader_type="cyclic"),
    ),
    (
        "--wlb: <--non-persistent-save-interval> is not supported, its checkpoints would lack the packer state; use "
        "--save-interval",
        refused(non_persistent_save_interval=5),
    ),
    ("--wlb: <--spec> and --yaml-cfg are not supported; give flags", refused(spec=["x"])),
    (
        "--wlb: --rerun-mode <report_stats>: upstream takes the flag and fails at its start, since it calls this mode "
        "otherwise inside; give <validate_results or disabled>",
        refused(rerun_mode="report_stats"),
    ),
    (
        "--wlb: <--iterations-to-skip> and --result-rejected-tracker-filename are not supported; leave them out",
        refused(iterations_to_skip=[3]),
    ),
    (
        "--wlb: --save and --load to <object storage> are not supported, the packer state is a file beside the "
        "checkpoint; give a folder",
        refused(save="msc://bucket/run"),
    ),
    (
        "--wlb: <--qk-clip> and --log-max-attention-logit need the largest logit, which packed attention does not "
        "report; leave them out",
        refused(qk_clip=True),
    ),
    (
        "--wlb: <--moe-pad-expert-input-to-capacity> needs equal lengths on all ranks; leave it out",
        refused(moe_pad_expert_input_to_capacity=True),
    ),
    (
        "--wlb: --moe-flex-dispatcher-backend <hybridep> needs equal lengths on all ranks; give deepep, or from "
        "megatron-core 0.19 on --moe-hybridep-pad-uneven-dispatch-inputs",
        refused(num_experts=4, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"),
    ),
    # job.py
    (
        "--wlb-planner <native>, but the native core was not built; reinstall with a C++ compiler",
        without_native,
    ),
    (
        "micro-batches of train step <1> in train step <0>: the data iterators are apart; report it, with the flags",
        apart,
    ),
    (
        "weights and optimizer take <90.5> GiB by upstream's formula, more than <90%> of this GPU's <80.0>; use more "
        "tensor or pipeline parallelism or --use-distributed-optimizer, or give --wlb-memory-budget if you know better",
        too_large_for_the_gpu,
    ),
    (
        "ranks planned step <3> differently (this rank 0000000000000005; lowest <0000000000000005>, highest "
        "<0000000000000006>): check that all nodes have the same dataset files, flags and megatron_wlb version",
        other_plan,
    ),
    # compat.py
    (
        "megatron-core <0.12.1> is not supported; install <0.17.1 or a later 0.17, …>",
        lambda at: compat.check_version("0.12.1"),
    ),
    (
        "megatron.training.training.<no_such_name> does not exist in this megatron-core; adapt megatron_wlb",
        replace("no_such_name"),
    ),
    (
        "megatron.training.training.training_log(…) lacks <colour>; adapt megatron_wlb",
        replace("training_log", "colour"),
    ),
    (
        "--<spec> is not supported with megatron-core …; leave it out, install <0.19> or later, or train with "
        "upstream's own pretrain_gpt.py",
        with_version(17, lambda: compat.check_flags(Namespace(spec="x"))),
    ),
    (
        "--wlb: the script builds its model with <mine>; with megatron-core before <0.19> only gpt_builder of "
        "upstream's pretrain_gpt.py is supported, use that or install <0.19>",
        with_version(
            18, lambda: compat.model_of_script(Namespace(), {"model_provider": functools.partial(print, "mine")})
        ),
    ),
    # run.py, pretrain.py
    (
        "megatron_wlb.run: error: <none.py> is not a file; give the path of pretrain_gpt.py in a Megatron-LM checkout, "
        "then its flags",
        script,
    ),
    ("pretrain_gpt.py: error: --wlb-packing is <'best'>; choose one of <original, …>", one_line),
]
