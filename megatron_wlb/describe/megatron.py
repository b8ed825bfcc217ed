"""Translates Megatron's arguments into a `Job`, for training and commands."""

from argparse import Namespace
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from megatron_wlb import layers
from megatron_wlb.describe import tiles
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import PlanSettings, RunSettings
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.shape import model_of
from megatron_wlb.job import Job, Packing, Parallel, Recompute, Sharding
from megatron_wlb.packing import policy_of
from megatron_wlb.pipeline.split import Split
from megatron_wlb.simulate.memory import DEVICE_SHARE, GRADIENT_BYTES, OPTIMIZER_BYTES, held_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A run by its flags: Megatron's arguments and the settings of --wlb."""

    arguments: MegatronArguments
    model: str | None = None
    """Name of a known model, which sizes among the arguments change."""
    packing: Packing
    sharding: Sharding
    settings: PlanSettings
    run_settings: RunSettings
    profile: str = "flops"
    """Name or file, where settings name none."""
    budget: float | None = None
    """Bytes for activations; None: not known."""
    bytes_per_value: int = 2
    recompute: Recompute | None = None
    """In the place of the arguments'."""

    @classmethod
    def of(cls, args: Namespace, arguments: MegatronArguments | None = None, **given: Any) -> Self:
        """Take flags as they were parsed; `given` are other fields. Raises ValueError for a value out of range."""
        settings = PlanSettings.from_args(args)
        return cls(
            run_settings=RunSettings.from_args(args),
            settings=settings,
            budget=settings.budget_bytes,
            packing=policy_of(args.wlb_packing),
            sharding=Sharding.from_args(args),
            arguments=arguments or MegatronArguments.of(vars(args)),
            **given,
        )

    def without_memory(self) -> Self:
        """Return the description where memory is not known yet."""
        longest = None if self.settings.max_tokens == "auto" else self.settings.max_tokens
        return replace(self, settings=replace(self.settings, memory_budget=None, max_tokens=longest), budget=None)

    def held_bytes(self, job: Job) -> float | None:
        """Return bytes of weights, gradients and optimizer on the fullest GPU in a job's layout; None: it cannot tell.

        Known of Adam and of layers with attention alone, as by upstream's formula.
        """
        a, model = self.arguments, job.model
        if a.optimizer != "adam" or not (model.is_whole and all(kind.is_all_matrices(a) for kind in layers.KINDS)):
            return None
        tied = not a.untie_embeddings_and_output_weights
        gradient, optimizer = bytes_of(a)
        of = held_bytes(job, divided=a.use_distributed_optimizer, tied=tied, gradient=gradient, optimizer=optimizer)
        return float(of.max())

    def budget_bytes(self, job: Job, gib: float | None = None) -> float | None:
        """Return the bytes that GPUs of `gib`, or of the profile, have for activations in a layout; None: as above."""
        held = self.held_bytes(job)
        return None if held is None else DEVICE_SHARE * (gib or job.profile.memory_gib) * 2**30 - held

    def job(self, **given: Any) -> Job:
        """Build the job; `given`, of `make_job`, takes precedence. Raises ValueError for contradictions."""
        a = self.arguments
        model = model_of(a, self.model)
        if a.num_layers is None:
            a = replace(a, num_layers=model.num_layers)
        parallel = parallel_of(a)
        if a.seq_length is None:
            raise ValueError("no --seq-length; give the context window in tokens")
        if a.global_batch_size is None and "global_batch_size" not in given:
            raise ValueError("no --global-batch-size; give the context windows of tokens that a step trains")
        multiple = row_multiple(a.fp8, a.fp8_recipe, a.fp4)
        details: dict[str, Any] = {
            "model": model,
            "parallel": parallel,
            "context_length": a.seq_length,
            "global_batch_size": a.global_batch_size,
            "packing": self.packing,
            "sharding": self.sharding,
            "settings": self.settings,
            "default_profile": self.profile,
            "budget_bytes": self.budget,
            "bytes_per_value": self.bytes_per_value,
            "precision": precision_of(a),
            "row_multiple": multiple,
            "hidden_dropout": a.hidden_dropout > 0,
            "overlap_transfers": parallel.vpp == 1 or a.overlap_p2p_comm,
            "recompute": self.recompute or recompute_of(a),
            "offloaded_layers": a.cpu_offloading_num_layers,
        }
        return make_job(**details | layers.settings(a) | tiles.settings(a, parallel, multiple) | given)


def of_megatron(a: MegatronArguments, job: Job) -> dict[str, Any]:
    """Return fields of `Job` by the arguments of a run without --wlb, where a `job` with it may have others."""
    return {
        "overlaps_experts": a.overlap_moe_expert_parallel_comm and (job.parallel.pp == 1 or job.parallel.vpp > 1),
        "tp_overlap": tiles.without_wlb(a, job),
        "moe_dispatcher": (job.model.is_mixture and a.moe_token_dispatcher_type) or job.moe_dispatcher,
        "recompute": recompute_of(a),
        "cuda_graphs": graphs_of(a),
        "fp8_attention": a.fp8_dot_product_attention,
    }


def bytes_of(a: MegatronArguments) -> tuple[float, float]:
    """Return bytes per parameter of gradients, and of Adam's states and main parameters on a GPU.

    By upstream's `validate_args`, `OptimizerConfig` and `HybridDeviceOptimizer`, and by TransformerEngine's FusedAdam,
    which of fp32 parameters keeps the 16 bits that bf16 weights lack. Other recipes of FP8 have theirs in Megatron.
    """
    halved = a.grad_reduce_in_bf16 or not (a.accumulate_allreduce_grads_in_fp32 or _bytes(a.main_grads_dtype) == 4)
    gradient = 2 if halved else GRADIENT_BYTES
    if a.optimizer_cpu_offload:  # what is left is fp32, whatever dtypes are given
        return gradient, OPTIMIZER_BYTES * (1 - a.optimizer_offload_fraction)
    if not a.use_precision_aware_optimizer:
        return gradient, OPTIMIZER_BYTES
    main = _bytes(a.main_params_dtype)
    if main == 4 and not (a.fp8 and a.fp8_recipe != "delayed"):
        main = 2
    return gradient, main + _bytes(a.exp_avg_dtype) + _bytes(a.exp_avg_sq_dtype)


def _bytes(dtype: str) -> int:
    return 4 if dtype.endswith("32") else 1 if dtype.endswith("8") else 2


def has_graphs(a: Any) -> bool:
    """Whether CUDA graphs replay the layers."""
    return a.cuda_graph_impl not in (None, "none") or a.enable_cuda_graph or a.external_cuda_graph


def graphs_of(a: MegatronArguments) -> tuple[str, ...]:
    """Return the modules that CUDA graphs replay without --wlb, see `Job.cuda_graphs`."""
    modules = {*(a.cuda_graph_modules or a.cuda_graph_scope or ["full"])}
    whole = a.cuda_graph_impl == "full_iteration" or modules & {"full", "full_iteration"}
    return (("full",) if whole else tuple(sorted(modules))) if has_graphs(a) else ()


def parallel_of(a: MegatronArguments) -> Parallel:
    """Return the parallel layout. Raises ValueError if something does not divide."""
    tp, cp, pp = a.tensor_model_parallel_size, a.context_parallel_size, a.pipeline_model_parallel_size
    ranks = a.model_parallel_size
    world = a.world_size or ranks
    if world % ranks:
        raise ValueError(
            f"{world} GPUs are no multiple of tensor x context x pipeline parallel sizes {tp} x {cp} x {pp} = {ranks}; "
            "change one of them"
        )
    of_layers = layers.ranks(a)
    split = Split(**{f.name: getattr(a, f.name) for f in fields(Split)})
    return Parallel(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=_virtual_stages(a, split),
        dp=world // ranks,
        sequence_parallel=a.sequence_parallel,
        group_size=a.microbatch_group_size_per_vp_stage,
        split=split,
        stages_before_dp=a.use_tp_pp_dp_mapping,
        **of_layers,
    )


def _virtual_stages(a: MegatronArguments, split: Split) -> int:
    pp, layers = a.pipeline_model_parallel_size, a.num_layers_per_virtual_pipeline_stage
    stages = split.num_virtual_stages
    given = a.virtual_pipeline_model_parallel_size or a.num_virtual_stages_per_pipeline_rank
    if given is not None or (layers is None and stages is None):
        return given or 1
    if stages is not None:
        if stages % pp:
            raise ValueError(
                f"--pipeline-model-parallel-layout {a.pipeline_model_parallel_layout} has {stages} virtual stages, no "
                f"multiple of {pp} pipeline stages; change one of them"
            )
        return stages // pp
    if split.has_ends:
        raise ValueError(
            "--num-layers-per-virtual-pipeline-stage with a number of layers of the first or last stage; give "
            "--num-virtual-stages-per-pipeline-rank"
        )
    assert layers is not None
    counted = (a.num_layers or 0) + split.edges
    stages, rest = divmod(counted, pp * layers)
    if rest or not stages:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x {pp} pipeline stages do not divide {counted} layers; "
            "change one of them"
        )
    return stages


def recompute_of(a: MegatronArguments) -> Recompute:
    granularity = a.recompute_granularity or ("selective" if a.recompute_activations else None)
    modules = a.recompute_modules
    if modules is None:
        modules = ("core_attn",) if granularity == "selective" else ()
    return Recompute(
        granularity=granularity,
        method=a.recompute_method,
        num_layers=a.recompute_num_layers,
        modules=tuple(sorted(set(modules))),
    )


def precision_of(a: MegatronArguments) -> str:
    """Return the precision of a layer's products: bf16, the recipe of FP8, or nvfp4."""
    return "nvfp4" if a.fp4 else a.fp8_recipe if a.fp8 else "bf16"


def row_multiple(fp8: Any, fp8_recipe: Any, fp4: Any) -> int:
    """Return the row alignment of FP8 and FP4 kernels, as Megatron does."""
    if fp8:
        return 32 if fp8_recipe == "mxfp8" else 16
    return 128 if fp4 else 1
