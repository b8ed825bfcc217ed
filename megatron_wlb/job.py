"""Describes a training job: its model, ranks, micro-batches and predictions.

`describe.megatron` builds it once, from final values; everything below `describe` takes it.
"""

import contextlib
import json
import math
from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from msgspec import Meta

import megatron_wlb._native as _native
from megatron_wlb.documents import Policy, document_work
from megatron_wlb.hardware.profile import Profile
from megatron_wlb.model import Matrix, ModelShape
from megatron_wlb.pipeline.schedule import Schedule, even_groups, nearest_counts
from megatron_wlb.pipeline.split import EVEN, Split
from megatron_wlb.settings import Count, Name, Settings, Share, Size, SizeOrNone, checked, printable, setting

MAX_TOKENS = _native.MAX_TOKENS
"""Longest micro-batch whose work is exact in 64 bits, with room for sums over a global batch."""
FP32 = 4
"""Bytes of an fp32 value, such as a gradient."""
NUM_TILES = 4
"""Sizes of tiles in which layers run, each half of the next larger one; see `Job.tiles`."""
STRATEGIES = {
    "per-sequence": ("per-sequence",),
    "per-document": ("per-document",),
    "hybrid": ("hybrid",),
    "paper": ("per-sequence", "per-document"),
    "auto": ("per-sequence", "hybrid"),
}
"""The shardings that each value of `Sharding.cp_sharding` compares."""


class Place(NamedTuple):
    """Of a rank among all of a job."""

    stage: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The parallel layout. Ranks are numbered by TP, CP, DP and PP, or as `stages_before_dp` says."""

    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    vpp: Count = 1
    """Virtual stages (model chunks) of a pipeline stage; more than one means interleaved 1F1B."""
    dp: Count = 1
    ep: Count = 1
    etp: Count | None = None
    """Tensor-parallel ranks of an expert; None: TP."""
    sequence_parallel: bool = True
    """Tensor-parallel ranks divide the sequence between attention and MLP."""
    group_size: Count | None = None
    """`--microbatch-group-size-per-virtual-pipeline-stage`; None: `even_groups`. Megatron's default is PP."""
    split: Split = EVEN
    stages_before_dp: bool = False
    """`--use-tp-pp-dp-mapping`: ranks are numbered by TP, CP, PP and DP."""

    def __post_init__(self) -> None:
        checked(self)
        if self.tp * self.cp * self.dp % self.expert_ranks:
            raise ValueError(
                f"{self.ep} expert-parallel x {self.expert_tp} expert-tensor-parallel ranks do not divide tp x cp "
                f"x dp = {self.tp} x {self.cp} x {self.dp}; change one of them"
            )

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    def dividing(self, matrix: Matrix) -> int:
        """Return the tensor-parallel ranks that divide a matrix."""
        return self.expert_tp if matrix.part == "experts" else self.tp

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage that divide a layer's experts, and exchange tokens in it."""
        return self.ep * self.expert_tp

    @property
    def shards(self) -> tuple[int, int]:
        """Ranks of a stage that divide weights: outside of experts, and all experts of a layer."""
        return self.tp, self.expert_ranks

    @property
    def copies(self) -> tuple[int, int]:
        """Ranks that have the same weights and divide their optimizer: outside of experts, and of an expert."""
        return self.dp * self.cp, self.dp * self.cp * self.tp // self.expert_ranks

    @property
    def pooling_ranks(self) -> int:
        """Neighbouring data-parallel ranks that pool parts of a layer: experts, of which each has some.

        They do equal shares of all the work there, and in every layer wait for the one that comes last. Megatron
        divides the TP x CP x DP ranks of a stage into runs of `expert_ranks`.
        """
        return math.lcm(self.expert_ranks, self.tp * self.cp) // (self.tp * self.cp)

    @property
    def sequence_ranks(self) -> int:
        return self.tp if self.sequence_parallel else 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stage_stride(self) -> int:
        """Ranks from a stage to the next."""
        return self.tp * self.cp * (1 if self.stages_before_dp else self.dp)

    def rank(self, stage: int, dp: int, cp: int, tp: int) -> int:
        """Return the number of a rank among all."""
        outer = dp * self.pp + stage if self.stages_before_dp else stage * self.dp + dp
        return (outer * self.cp + cp) * self.tp + tp

    def place(self, rank: int) -> Place:
        """Return where a rank is among all, by its number; the inverse of `rank`."""
        outer, inner = divmod(rank, self.tp * self.cp)
        last, first = divmod(outer, self.pp if self.stages_before_dp else self.dp)
        stage, dp = (first, last) if self.stages_before_dp else (last, first)
        return Place(stage, dp, *divmod(inner, self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation, by the names and values of Megatron's flags."""

    granularity: Annotated[str, Meta(pattern=r"\A(full|selective)\Z")] | None = None
    """full: a layer keeps its input only. selective: it drops `modules`. None: nothing is recomputed."""
    method: Annotated[str, Meta(pattern=r"\A(block|uniform)\Z")] | None = None
    """block: recompute `num_layers` of each virtual stage; uniform: `num_layers` at a time from a shared input."""
    num_layers: SizeOrNone | None = None
    modules: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        checked(self)

    @property
    def flags(self) -> str:
        """Megatron's flags for it, "" for none."""
        selects = self.granularity == "selective"
        named = {"granularity": self.granularity, "method": self.method, "num-layers": self.num_layers}
        given = [f"--recompute-{name} {value}" for name, value in named.items() if value is not None]
        return " ".join([*given, *(["--recompute-modules", *self.modules] if self.modules and selects else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding(Settings):
    """Settings of context parallelism."""

    cp_sharding: str = setting(
        "auto",
        "How a micro-batch is divided over context-parallel ranks. hybrid: each document on as few ranks as balance "
        "needs, in tiles of the kernel. auto: hybrid or per-sequence, whichever has the fastest slowest rank for this "
        "micro-batch, by the kernel times of --wlb-profile. paper: per-sequence or per-document, as in WLB-LLM.",
        choices=tuple(STRATEGIES),
    )
    cp_gradients: str = setting(
        "fp32",
        "Dtype in which dK and dV travel between context-parallel ranks, which add them up in fp32. model: the dtype "
        "of activations, half the bytes where it is bf16, at the price of one more rounding.",
        choices=("fp32", "model"),
    )


class Packing:
    """A packing policy and its parameter (`--wlb-packing NAME:PARAMETER`), in its file and in `packing.POLICIES`."""

    __slots__ = ()
    name: ClassVar[str]
    help: ClassVar[str]
    keeps_order: ClassVar[bool] = False
    """Micro-batches keep their places."""
    fixed_length: ClassVar[bool] = False
    """Micro-batches are one context window long, instead of up to S_max."""
    steady_tokens: ClassVar[bool] = False
    """Steps hold N * C tokens whatever M is, so M can be chosen for time alone (`--wlb-micro-batches auto`)."""

    @classmethod
    def of(cls, parameter: str) -> "Packing":
        """Return the policy of a parameter, "" for none. Raises ValueError."""
        if parameter:
            raise ValueError(f"{cls.name} packing has no parameter {parameter!r}; leave it out")
        return cls()

    @property
    def parameter(self) -> str:
        """The parameter, "" if it is the default."""
        return ""

    def __str__(self) -> str:
        return f"{self.name}:{self.parameter}" if self.parameter else self.name

    @property
    def same_steps(self) -> bool:
        """Whether every step trains the documents of Megatron's; else they may wait for a later one."""
        return True

    def most_step_tokens(self, job: "Job") -> int | None:
        """Most tokens that a step holds, whatever S_max is; None: as many as fit."""
        return job.batch_tokens if self.fixed_length else None

    @abstractmethod
    def policy(self, job: "Job") -> Policy:
        """Return the policy, empty. Raises ValueError if it cannot pack this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job; lengths in trained tokens. Raises ValueError for its sizes."""

    model: ModelShape
    parallel: Parallel = Parallel()
    context_length: Size
    """The context window C (`--seq-length`): longer documents are cut there."""
    num_micro_batches: Count
    """M, micro-batches of a step, over all data-parallel ranks."""
    global_batch_size: Size
    """N: a step trains N context windows of tokens on average."""
    max_tokens: Size
    """S_max, the longest micro-batch; at least the context window."""
    crossover_tokens: Annotated[int, Meta(ge=1, le=1 << 62)]
    """Lc, the document length at which attention costs as much as everything else in a layer without a window."""
    packing: Packing
    sharding: Sharding = Sharding()
    reorder: bool = True
    """Place and order micro-batches by work. False keeps the order of packing, as Megatron does."""
    cp_exchange: Annotated[str, Meta(pattern=r"\A(shared|latents|all|ring)\Z")] = "shared"
    """Which K and V context-parallel ranks exchange. shared: needed rows of documents on several ranks, in rounds.
    latents: the same rows as latents, before attention. all: all documents by one all-gather, as in the paper. ring:
    all documents from rank to rank (`--cp-comm-type p2p`)."""
    overlap_transfers: bool = True
    """Transfers between interleaved stages overlap passes (`pipeline.Schedule`). Off by Megatron's defaults."""
    overlaps_experts: bool = False
    """A forward and a backward pass run by turns (`pipeline.Schedule`): `--overlap-moe-expert-parallel-comm`."""
    profile: Profile
    tp_overlap: Share = 0.0
    """Share of tensor-parallel communication that overlaps matrix products: `--tp-comm-overlap`."""
    tp_tile_rows: SizeOrNone = 0
    """Rows of the largest tile, over tensor-parallel ranks, see `tiles`; 0: communication overlaps in any rows."""
    bytes_per_value: Annotated[int, Meta(ge=1, le=8)] = 2
    """Of the activations."""
    precision: Name = "bf16"
    """Of a layer's products: bf16, `--fp8-recipe`, or nvfp4; see `Profile.gain`."""
    fp8_attention: bool = False
    """`--fp8-dot-product-attention`."""
    moe_dispatcher: Annotated[str, Meta(pattern=r"\A(allgather|alltoall|flex)\Z")] = "alltoall"
    """`--moe-token-dispatcher-type`: allgather, alltoall or flex."""
    fused_experts: bool = False
    """`--use-transformer-engine-op-fuser`: products of experts, activation and quantization are one kernel."""
    cuda_graphs: tuple[Name, ...] = ()
    """Modules that CUDA graphs replay (`--cuda-graph-modules`), or "full": all of them."""
    row_multiple: Count = 1
    """Row alignment of FP8 and FP4 kernels on a rank."""
    hidden_dropout: bool = False
    recompute: Recompute = Recompute()
    offloaded_layers: SizeOrNone = 0
    """Layers whose activations are in host memory until backward (`--cpu-offloading-num-layers`)."""

    def __post_init__(self) -> None:
        checked(self)
        self._check_offloading()
        self._check_tokens()
        self._check_micro_batches()
        self._check_packing()
        # Upper bound of a step: all passes of all stages run one after the other.
        passes = 3 * self.num_micro_batches * self.parallel.pp * self.parallel.vpp
        if passes * self.max_tokens * (self.context_length + self.crossover_tokens) >= 1 << 63:
            raise ValueError(
                f"the work of {self.num_micro_batches} micro-batches of {self.max_tokens} tokens at a crossover of "
                f"{self.crossover_tokens} overflows 64 bits; lower one of them"
            )
        if self.keeps_exchanged and not self.model.compressed:
            raise ValueError("cp_exchange is 'latents', and the model has none; choose another")

    def _check_offloading(self) -> None:
        if not 0 <= self.offloaded_layers < self.model.num_layers:
            raise ValueError(
                f"offloaded_layers is {self.offloaded_layers}; it must be less than {self.model.num_layers}, all layers"
            )
        if self.offloaded_layers and (self.parallel.pp > 1 or self.recompute.granularity):
            raise ValueError(
                f"offloaded_layers is {self.offloaded_layers}; Megatron offloads neither with pipeline stages nor "
                "with recomputation; leave one of them out"
            )

    def _check_tokens(self) -> None:
        unit = self.unit_tokens
        for name, flag in (("context_length", "--seq-length"), ("max_tokens", "--wlb-max-tokens")):
            if getattr(self, name) % unit:
                raise ValueError(
                    f"{name} ({flag}) is {getattr(self, name)}, which {self.parallel.cp} context-parallel and "
                    f"{self.parallel.tp} tensor-parallel ranks cannot share; give a multiple of {unit}"
                )
        if not self.least_max_tokens <= self.max_tokens <= MAX_TOKENS:
            least = "the context window"
            if self.least_max_tokens > self.context_length:
                least = f"an even share of {self.global_batch_size} windows"
            raise ValueError(
                f"max_tokens (--wlb-max-tokens) is {self.max_tokens}; it must be from {self.least_max_tokens}, "
                f"{least}, to {MAX_TOKENS}"
            )

    def _check_micro_batches(self) -> None:
        dp, count = self.parallel.dp, self.num_micro_batches
        flag = "" if count == self.global_batch_size else " (--wlb-micro-batches)"
        if count % dp:
            raise ValueError(
                f"{count} micro-batches per step cannot be shared by {dp} data-parallel ranks; give a multiple of "
                f"{dp}{flag}"
            )
        stages, rank_count = self.parallel.pp, count // dp
        group = self.parallel.group_size or even_groups(rank_count, stages)
        nearest = nearest_counts(rank_count, stages, group) if self.parallel.vpp > 1 else (rank_count,)
        if rank_count not in nearest:
            raise ValueError(
                f"{count} micro-batches per step, {rank_count} of a data-parallel rank, cannot be interleaved over "
                f"{stages} pipeline stages in groups of {group}; give {' or '.join(str(n * dp) for n in nearest)}{flag}"
            )
        self.schedule()

    def _check_packing(self) -> None:
        count = self.num_micro_batches
        if self.packing.fixed_length and count != self.global_batch_size:
            raise ValueError(
                f"{count} micro-batches for {self.global_batch_size} windows per step: micro-batches of "
                f"{self.packing.name} packing are one window long; give as many"
            )

    @property
    def unit_tokens(self) -> int:
        """Tokens that micro-batches are a multiple of, for CP chunks and SP rows."""
        p = self.parallel
        rows = p.sequence_ranks * self.row_multiple
        return p.cp * math.lcm(2, rows) if p.cp > 1 else rows

    @property
    def cp_gradient_bytes(self) -> int:
        """Bytes of a value of dK and dV between context-parallel ranks."""
        return FP32 if self.sharding.cp_gradients == "fp32" else self.bytes_per_value

    @property
    def exchanges_needed(self) -> bool:
        """Whether context-parallel ranks exchange only rows that they need."""
        return self.cp_exchange in ("shared", "latents")

    @property
    def keeps_exchanged(self) -> bool:
        """Whether exchanged values, before attention, are kept for backward: latents."""
        return self.cp_exchange == "latents"

    @property
    def expands_again(self) -> bool:
        """Whether backward expands K and V of all keys from latents again."""
        return self.keeps_exchanged and not self.runs_layers_again

    @property
    def dropped(self) -> tuple[str, ...]:
        """Modules that drop their tensors in forward, and run again in backward."""
        return self.recompute.modules if self.recompute.granularity == "selective" else ()

    @property
    def runs_layers_again(self) -> bool:
        """Whether layers keep their input alone, and run again as a whole: `layers_again`, and all of depths."""
        return self.recompute.granularity == "full"

    def layers_again(self, layers: np.ndarray) -> tuple[np.ndarray, int]:
        """Return how many `layers` of virtual stages run again as a whole, and how many of them from one input."""
        if not self.runs_layers_again:
            return np.zeros(np.shape(layers)), 1
        count = self.recompute.num_layers
        if self.recompute.method == "block":
            return np.minimum(count or 0, layers), 1
        return np.asarray(layers, float), min(count or 1, max(1, int(np.max(layers))))

    def on_one_stage(self) -> "Job":
        """Return the job of one micro-batch with all layers on one stage, as many of which run again, and TP alone."""
        recompute = self.recompute
        if recompute.method == "block":  # of every virtual stage
            with contextlib.suppress(ValueError):  # of uneven ones
                again, _ = self.layers_again(self.decoder_layers())
                recompute = replace(recompute, num_layers=int(again.sum()))
        return replace(
            self,
            recompute=recompute,
            parallel=Parallel(tp=self.parallel.tp, sequence_parallel=self.parallel.sequence_parallel),
            num_micro_batches=1,
            global_batch_size=1,
        )

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Return the work of documents of `lengths`, int64 [n]: `document_work`, less the pairs beyond windows."""
        return document_work(lengths, self.crossover_tokens) - self.model.pairs_beyond(lengths)

    @property
    def pooled_crossover_tokens(self) -> int:
        """The part of `crossover_tokens` that is pooled (`Parallel.pooling_ranks`)."""
        return self.crossover_tokens * self.model.expert_weights // self.model.token_weights

    @property
    def tiles(self) -> tuple[int, ...]:
        """Rows of the tiles, over tensor-parallel ranks, in which communication overlaps (`adapter.tiles`); () if in
        any rows."""
        return tuple(self.tp_tile_rows >> i for i in range(NUM_TILES)) if self.tp_tile_rows else ()

    @property
    def micro_batches_per_rank(self) -> int:
        return self.num_micro_batches // self.parallel.dp

    @property
    def batch_tokens(self) -> int:
        """Tokens of a global batch, N * C: the mean of steps."""
        return self.global_batch_size * self.context_length

    @property
    def least_max_tokens(self) -> int:
        """Smallest valid S_max: a window, and enough for a global batch."""
        mean = -(-self.batch_tokens // (self.num_micro_batches * self.unit_tokens)) * self.unit_tokens
        return max(self.context_length, mean)

    def most_rank_tokens(self, longest: int) -> float:
        """Return the most tokens of a step on a rank; inf: as many as fit."""
        most, ranks = self.packing.most_step_tokens(self), self.parallel.dp
        if most is None:
            return math.inf
        if self.packing.fixed_length:
            return most / ranks
        return (most + (ranks - 1) * longest) / ranks if self.reorders else most

    @property
    def reorders(self) -> bool:
        """Whether micro-batches are reordered by work."""
        return self.reorder and not self.packing.keeps_order

    def schedule(self, micro_batches_per_rank: int | None = None) -> Schedule:
        """Return the pipeline schedule of a data-parallel rank; None: of this job's micro-batches."""
        count = self.micro_batches_per_rank if micro_batches_per_rank is None else micro_batches_per_rank
        return Schedule(
            num_stages=self.parallel.pp,
            num_chunks=self.parallel.vpp,
            micro_batches_per_rank=count,
            group_size=self.parallel.group_size,
            overlap_transfers=self.overlap_transfers and self.parallel.vpp > 1,
            by_turns=self.overlaps_experts,
        )

    def of_step(self, count: int, tokens: int) -> "Job":
        """Return the job of a step of `count` micro-batches that hold `tokens`."""
        if count == self.num_micro_batches:
            return self
        return replace(self, num_micro_batches=count, global_batch_size=max(1, tokens // self.context_length))

    def sharded(self, **settings: Any) -> "Job":
        """Return the job with other settings of context parallelism."""
        return replace(self, sharding=replace(self.sharding, **settings))

    def decoder_layers(self) -> np.ndarray:
        """Return layers by virtual stage, int64 [pp, vpp]. Raises ValueError if uneven."""
        return self.parallel.split.layers(self.model.num_layers, self.parallel.pp, self.parallel.vpp)

    def layers(self) -> np.ndarray:
        """Return `decoder_layers`, and on the last virtual stage a layer for every depth (`ModelShape.depths`)."""
        layers = self.decoder_layers()
        layers[-1, -1] += self.model.depths
        return layers

    def layers_by_kind(self) -> np.ndarray:
        """Return `layers` of every kind, int64 [kinds, pp, vpp], in the order of `ModelShape.kinds`."""
        stages, kinds = self.decoder_layers().T, np.array(self.model.layer_kinds)
        ends, found = np.cumsum(stages).reshape(stages.shape), []
        for kind in self.model.kinds:
            counts = np.append(0, np.cumsum(kinds == kind))
            found.append(counts[ends] - counts[ends - stages])
            found[-1][-1, -1] += self.model.depth_kinds.count(kind)
        return np.array(found).swapaxes(1, 2)

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON types, for logs and checkpoints."""
        return asdict(self) | {"packing": {"name": self.packing.name, **asdict(self.packing)}}  # type: ignore[call-overload]


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """List changes between two `to_json`, as "parallel.tp 2 -> 4"; of profiles of two names the names."""
    changes = []
    for name, value in now.items():
        old = before.get(name) if isinstance(before, dict) else None
        if name == "profile":
            names = [each.get("name") if isinstance(each, dict) else each for each in (old, value)]
            if names[0] != names[1]:
                old, value = names
        if isinstance(value, dict):
            changes += differences(old if isinstance(old, dict) else {}, value, f"{prefix}{name}.")
        elif json.dumps(old) != json.dumps(value):  # in which tuples are lists
            changes.append(printable(f"{prefix}{name} {old} -> {value}"))  # of a file, maybe
    return changes
