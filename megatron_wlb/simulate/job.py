"""What is simulated: known models, the hardware, and how the one runs on the other; with the source of every number."""

from dataclasses import dataclass, field

import numpy as np

from megatron_wlb.plan.workload import KernelModel, ModelShape, Profile, load_profile
from megatron_wlb.simulate.collectives import Network, load_network
from megatron_wlb.simulate.schedule import Schedule


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        padded_vocab_size=vocab,
    )


MODELS = {
    "550m": _shape(24, 1280, 3456, 10, 10, 32000),
    "llama2-7b": _shape(32, 4096, 11008, 32, 32, 32000),
    "30b": _shape(48, 7168, 19200, 56, 56, 32000),
    "llama2-70b": _shape(80, 8192, 28672, 64, 8, 32000),
    "llama3-405b": _shape(126, 16384, 53248, 128, 8, 128256),
}
"""llama2-7b, llama2-70b: Touvron et al. 2023 and the published configurations; llama3-405b: The Llama 3 Herd of Models,
table 3. The paper's 550M and 30B are internal models "scaled in layers and dimensions" of unpublished shape; ours are
assumed: 550m has 24 layers of 10 heads (558 M parameters), 30b the layers, width and heads of OPT-30B, both LLaMA's
feed-forward ratio of 8/3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the GPUs and the network do. Defaults: H100 SXM, with what they come from."""

    linear_tflops: float = 600.0
    """bf16 matrix products, achieved. Assumed: 61 % of the 989 TFLOP/s of the data sheet, for large matrices.
    Where `attention` states measured `linear_tflops`, those count."""
    memory_gb_per_s: float = 2700.0
    """Of what is bound by memory, achieved. Assumed: 80 % of the 3350 GB/s of the data sheet."""
    attention: Profile = field(default_factory=lambda: load_profile("h100-fa2"))
    """Attention kernels, in us. The shipped profile is fitted to measurements of DistCA."""
    attention_backward: float = 2.5
    """Backward time of attention per forward time, where the profile has only forward: 5 matrix products against 2."""
    network: Network = field(default_factory=load_network)

    def __post_init__(self) -> None:
        if self.attention.name == "flops":
            raise ValueError(
                "profile flops counts attended pairs; a simulation needs one in us, give h100-fa2 or one that "
                "`megatron-wlb profile` wrote"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, how it is parallelised, and on what. Ranks are numbered by TP, CP, DP, PP, as Megatron's default does.

    Sequence parallelism is on; optimizer states are sharded over DP and CP (distributed optimizer). Raises ValueError
    if the sizes do not divide.
    """

    model: ModelShape
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks per pipeline stage."""
    dp: int = 1
    group_size: int | None = None
    """Of the interleaved schedule; default: PP."""
    edge_layers: int = 0
    """1: the embedding and the loss count as a layer each where layers are dealt over stages
    (`--account-for-embedding-in-pipeline-split` and `--account-for-loss-in-pipeline-split`)."""
    cp_head_groups: int = 1
    """In which K and V are gathered, each while the one before computes; 1 hides nothing (as in the paper)."""
    cp_ring: bool = False
    """K and V go from rank to rank instead, all heads at once, in CP parts (`--cp-comm-type p2p`)."""
    gather_all: bool = False
    """Exchange K and V of all rows, as the paper and Megatron's all-gather do; else of documents that several ranks
    share."""
    recompute: bool = False
    """Full activation recomputation."""
    tp_overlap: float = 0.0
    """Share of tensor-parallel communication that hides behind matrix products."""
    dp_overlap: float = 0.9
    """Share of the exchange of gradients and parameters that hides behind passes. Assumed."""
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        model = self.model
        if (model.num_layers + 2 * self.edge_layers) % (self.pp * self.vpp):
            counted = f" and {2 * self.edge_layers} for the edges" if self.edge_layers else ""
            raise ValueError(
                f"{model.num_layers} layers{counted} do not divide over {self.pp} stages of {self.vpp} chunks; change "
                "one of them"
            )
        if model.num_attention_heads % self.tp:
            raise ValueError(
                f"{model.num_attention_heads} attention heads do not divide over {self.tp} ranks; change one of them"
            )

    @property
    def num_gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The pipeline schedule of each data-parallel rank."""
        return Schedule(
            num_stages=self.pp,
            num_chunks=self.vpp,
            num_micro_batches=num_micro_batches,
            group_size=self.group_size,
        )

    def layers(self) -> np.ndarray:
        """Layers of every chunk, int64 [stages, chunks]."""
        total = self.model.num_layers + 2 * self.edge_layers
        layers = np.full((self.pp, self.vpp), total // (self.pp * self.vpp))
        layers[0, 0] -= self.edge_layers
        layers[-1, -1] -= self.edge_layers
        return layers

    @property
    def exchange_parts(self) -> int:
        """Parts of K and V of which one computes while the next travels; each has launches of its own."""
        if self.cp == 1:
            return 1
        return self.cp if self.cp_ring else self.cp_head_groups

    def kernel(self, *, backward: bool) -> KernelModel:
        """Attention of one layer on one GPU in one direction, in us, communication aside."""
        profile = self.hardware.attention
        times, scale = profile.forward, 1.0
        if backward and profile.backward:
            times = profile.backward
        elif backward:
            scale = self.hardware.attention_backward
        return KernelModel(
            tile_rows=profile.tile_rows,
            launch=self.exchange_parts * times.launch * scale,
            tile=times.tile * scale,
            query_tile=times.query_tile * scale,
            heads=self.model.num_attention_heads // self.tp,
        )
