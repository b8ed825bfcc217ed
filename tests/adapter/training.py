"""Runs upstream's real `pretrain()`, with `--wlb` or without, in a forked world; brings losses and gradients home.

Parameters are set from their global name, so that every layout starts from the same model, and gradients are put
together again from the shards of tensor-parallel ranks.
"""

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.worlds import HANGS_SECONDS, run_world

MODEL = """
--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --group-query-attention
--num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr-decay-style constant
--tokenizer-type NullTokenizer --vocab-size 255 --split 90,10,0 --eval-iters 0 --log-interval 1
--reset-attention-mask --reset-position-ids --num-workers 0 --train-iters 2 --seed 1234 --optimizer sgd --lr 0.5
""".split()

WLB = "--wlb --wlb-max-tokens 320".split()
ALGORITHM_1 = "--wlb-packing paper:96,160".split()
ADAM = "--optimizer adam --lr 1e-3".split()

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
BY_DOCUMENT = "--wlb-cp-sharding per-document"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
EP2 = "--expert-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"

MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64"
SHARED = "--moe-shared-expert-intermediate-size 64"
EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
LINEAR = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 16"
)
MAMBA = (
    "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--linear-key-head-dim 8 --linear-value-head-dim 16 --hybrid-layer-pattern"
)
SINKS = "--softmax-type learnable --window-size 16,0 --window-attn-skip-freq 2"
LATENT = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
QUERY_LATENT = "--q-lora-rank 24 --qk-layernorm --rope-type rope"
GQA = "--group-query-attention --num-query-groups"


def full(*values: Any) -> Any:
    """A case that takes minutes, or that others cover."""
    return pytest.param(*values, marks=pytest.mark.full)


def large(*values: Any) -> Any:
    """A case of many processes, which `.ci/run` has."""
    return pytest.param(*values, marks=pytest.mark.ci)


def each_version(*values: Any) -> Any:
    """A case that `.ci/run` trains with older versions of megatron-core, too."""
    return pytest.param(*values, marks=pytest.mark.each_version)


def named(cases: dict[str, Any]) -> list[Any]:
    """Cases as above, with their names as ids."""
    return [
        pytest.param(*getattr(case, "values", case), marks=getattr(case, "marks", ()), id=name)
        for name, case in cases.items()
    ]


def train(
    size: int,
    dataset: str,
    *flags: str,
    log: Path | None = None,
    wlb: bool = True,
    flags_of_rank: dict[int, list[str]] | None = None,
    timeout: float = HANGS_SECONDS,
    without: str = "",
    prints: Path | None = None,
    exits: bool = False,
) -> dict[str, Any]:
    """Train on `size` processes, with the flags of MODEL less those of `without` and their values, and with `flags`.

    Without `wlb`, upstream trains by itself (`upstream_script`). What the ranks print goes to the file `prints`.

    Returns {"grads": per optimizer step {global name: gradient of the whole parameter}, "params": the same after
    training, "losses" and "norms" of the gradient, by step, "log": the step log, "evaluations": validation losses,
    "sends": by rank, dtypes of all point-to-point sends, "compiled": how often torch.compile compiled each function of
    upstream, on rank 0 and after its warm-up}. `exits`: upstream ends the process, as at --exit-interval.
    """
    argv = ["pretrain_gpt.py", *less(MODEL, without), *(WLB if wlb else [])]
    argv += flags
    if dataset:
        argv += ["--data-path", *dataset.split()]
    if log is not None:
        argv += ["--wlb-log", str(log)]
    results = run_world(_train, size, argv, flags_of_rank or {}, str(prints or os.devnull), exits, timeout=timeout)
    return {
        "evaluations": results[-1]["evaluations"],
        "losses": results[-1]["losses"],
        "norms": results[-1]["norms"],
        "sends": [r["sends"] for r in results],
        "compiled": results[0]["compiled"],
        "grads": [_merge([r["grads"][step] for r in results]) for step in range(len(results[0]["grads"]))],
        "params": _merge([r["params"] for r in results]),
        "log": entries(log) if log is not None else None,
    }


def entries(log: Path) -> list[dict[str, Any]]:
    """The lines of a step log."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def less(flags: list[str], names: str) -> list[str]:
    """Flags without those of `names` and their values."""
    for name in names.split():
        first = flags.index(name)
        flags = flags[:first] + flags[first + (1 if flags[first + 1].startswith("--") else 2) :]
    return flags


def _train(argv: list[str], flags_of_rank: dict[int, list[str]], prints: str, exits: bool) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import get_args, training

    from megatron_wlb.adapter import cpu, script
    from megatron_wlb.adapter.upstream import scripts
    from megatron_wlb.adapter.upstream.versions import upstream

    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK="0")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # Upstream prints hundreds of lines; they matter only when a test fails, and then pytest shows the exception.
    sys.stdout = open(prints, "a", buffering=1)  # noqa: SIM115
    sys.argv = [*argv, *flags_of_rank.get(dist.get_rank(), []), "--distributed-backend", "gloo", *cpu.FLAGS]
    out: dict[str, Any] = {"grads": [], "evaluations": [], "sends": [], "losses": [], "norms": [], "chunks": []}
    setup, evaluate, isend = training.setup_model_and_optimizer, training.evaluate, dist.isend
    training_log = training.training_log
    bound = inspect.signature(training_log).bind

    @functools.wraps(training_log)
    def log_and_keep(*args: Any, **kwargs: Any) -> Any:
        said = bound(*args, **kwargs).arguments
        if "lm loss" in said["loss_dict"]:
            out["losses"].append(float(said["loss_dict"]["lm loss"]))
        out["norms"].append(float(said["grad_norm"] or 0))
        return training_log(*args, **kwargs)

    def evaluate_and_keep(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        out["evaluations"] += [float(loss) for loss in result[0].values()]
        return result

    def isend_and_count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out["sends"].append(str(tensor.dtype))
        return isend(tensor, *args, **kwargs)

    training.evaluate, training.training_log = evaluate_and_keep, log_and_keep
    dist.isend = dist.distributed_c10d.isend = isend_and_count  # both, since a P2POp takes the module's own only

    def setup_and_watch(*args: Any, **kwargs: Any) -> Any:
        clear_compilation_metrics()
        chunks, optimizer, scheduler = setup(*args, **kwargs)
        if get_args().iteration == 0 and not get_args().finetune:
            set_parameters(chunks)
            optimizer.reload_model_params()
        step = optimizer.step

        def watched() -> Any:
            if not get_args().use_distributed_optimizer:  # then no rank has whole gradients
                out["grads"].append(_shards(chunks, lambda p: getattr(p, "main_grad", p.grad)))
            return step()

        optimizer.step = watched
        out["chunks"] = chunks
        return chunks, optimizer, scheduler

    training.setup_model_and_optimizer = setup_and_watch
    if "--save" in argv:
        # Upstream's checkpoint writer starts this server by spawning, that is, by importing torch anew in every rank.
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    script.patch_upstream()
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        if "--wlb" in argv and not upstream().passes_functions:
            script.train()
        else:
            from tests.adapter import upstream_script

            scripts.NEEDED.clear()  # its data and loss are its own
            upstream_script.main()
    out["params"] = _shards(out.pop("chunks"), lambda p: p.data)
    frames = [(m.co_name, str(m.co_filename)) for m in get_compilation_metrics()]
    out["compiled"] = Counter(name for name, file in frames if "/megatron/core/" in file)
    return out


def _parameters(chunks: list[Any]) -> Any:
    """(global name, parameter) of every model chunk; layers and experts count over the whole model."""
    from megatron.core import mpu
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    for net in (m for chunk in chunks for m in chunk.modules() if isinstance(m, GatedDeltaNet)):
        net.in_proj.weight.partition_sizes = net.in_proj_split_sections  # as upstream says it of Mamba layers
        net.conv1d.weight.partition_sizes = net.in_proj_split_sections[:3]

    for chunk in chunks:
        module = chunk.module
        model = module.module if hasattr(module, "module") else module
        for name, parameter in model.named_parameters():
            if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
                number = model.decoder.layers[int(match[1])].layer_number
                name = f"layer{number}.{match[2]}"
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                if model.mtp_process:
                    continue  # this stage has the embedding, too, and does not use the copy
                name = "embedding.word_embeddings.weight"  # the last stage has a copy
            if match := re.match(r"(.*local_experts\.)(\d+)(\..*)", name):
                first = mpu.get_expert_model_parallel_rank() * model.config.num_moe_experts
                number = first // mpu.get_expert_model_parallel_world_size() + int(match[2])
                name = f"{match[1]}{number}{match[3]}"
            yield name, parameter


def _split(name: str, parameter: Any) -> tuple[int, int, int, tuple[int, ...]]:
    """Dimension that tensor parallelism divides (-1: none), rank, size, and a rank's rows of each part, all divided."""
    from megatron.core import mpu

    if getattr(parameter, "allreduce", True):
        size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    else:  # of an expert
        size, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    divided = getattr(parameter, "tensor_model_parallel", False) and size > 1
    if not divided:
        return -1, rank, size, ()
    rows = parameter.shape[parameter.partition_dim]
    parts = (rows // 2, rows // 2) if "linear_fc1" in name and "linear_in" not in name else (rows,)  # [gate, up]
    return parameter.partition_dim, rank, size, tuple(getattr(parameter, "partition_sizes", parts))


def initial(name: str, shape: Sequence[int]) -> torch.Tensor:
    """What a whole parameter of this global name starts with."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    scale, shift = {1: (0.1, 1.0), 2: (0.05, 0.0), 3: (0.5, 0.0)}[len(shape)]
    shift -= 4.0 * name.endswith("A_log")  # states decay over tens of tokens
    return torch.randn(*shape, generator=generator) * scale + shift


def set_parameters(chunks: list[Any]) -> None:
    """Set every parameter from its global name, whatever the layout."""
    for name, parameter in _parameters(chunks):
        dim, rank, size, rows = _split(name, parameter)
        whole = initial(name, [n * size if i == dim else n for i, n in enumerate(parameter.shape)])
        if dim >= 0:
            parts = whole.split([n * size for n in rows], dim)
            whole = torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
        if isinstance(parameter, DTensor):  # of FSDP
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(whole)


def _shards(chunks: list[Any], value: Any) -> dict[str, Any]:
    shards = {}
    for name, parameter in _parameters(chunks):
        if (tensor := value(parameter)) is None:
            continue  # frozen
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        shards[name] = (tensor.float().clone(), *_split(name, parameter))
    return shards


def _merge(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the shards of all ranks; replicas must agree to rounding."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    splits: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    for shards in ranks:
        for name, (tensor, dim, rank, size, rows) in shards.items():
            known = found.setdefault(name, {}).setdefault(rank if dim >= 0 else 0, tensor)
            torch.testing.assert_close(
                tensor, known, rtol=1e-4, atol=1e-6, equal_nan=True, msg=f"replicas of {name} differ"
            )
            splits[name] = (dim, size, rows)
    merged = {}
    for name, parts in found.items():
        dim, size, rows = splits[name]
        if dim < 0:
            merged[name] = parts[0]
            continue
        each = zip(*(parts[r].split(rows, dim) for r in range(size)), strict=True)
        merged[name] = torch.cat([shard for part in each for shard in part], dim)
    return merged


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest error of any parameter, relative to the norm of that parameter."""
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).norm() / want[n].norm().clamp_min(1e-12)) for n in want)
