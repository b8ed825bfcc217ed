"""Self-attention with Q, K and V of the hidden state, to all of a document or in a window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.job import Job
from megatron_wlb.layers.part import LAUNCHES_US, Part, Tensor, layer_input_bytes, mask_bytes, rates
from megatron_wlb.model import FULL, WINDOWED, ModelShape

Directions = tuple[np.ndarray, np.ndarray]
"""Forward and backward of one layer, in us, float64 [M] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeModel:
    """Time of an exchange in us: `latency`, plus a time per row of the busiest rank."""

    latency: float
    arrive: float
    """Per row of K and V."""
    leave: float
    """Per row of their gradients."""
    prefetch: float
    """By which backward's first K and V are prefetched, per row of a rank: products for input gradients of MLP and
    output projection."""

    def times(self, rows: np.ndarray) -> Directions:
        """Return times in which K and V arrive and gradients leave the busiest rank."""
        arrive, leave = (np.where(rows > 0, self.latency + rows * each, 0.0) for each in (self.arrive, self.leave))
        return arrive, leave


class Attention(Part):
    letters = FULL + WINDOWED
    exchanges: ClassVar[tuple[str, ...]] = ("shared",)
    """Values of `Job.cp_exchange` that `--wlb` may choose; the first but where another is clearly faster."""
    modules: ClassVar[Mapping[str, float]] = {"attn": LAUNCHES_US}
    kernels = (4, 6)

    def kept(self, job: Job) -> dict[str, Tensor]:
        model, tp = job.model, job.parallel.tp
        normed = model.query_size / tp + model.heads_per_rank(tp)[1] * model.kv_channels
        return self.common(job) | {"qk norms": Tensor(model.qk_layernorm * job.bytes_per_value * normed)}

    def common(self, job: Job) -> dict[str, Tensor]:
        """Return the tensors that attention keeps however it makes Q, K and V."""
        model, tp, w = job.model, job.parallel.tp, job.bytes_per_value
        return {
            "input": Tensor(layer_input_bytes(job)),
            "norm": Tensor(layer_input_bytes(job)),
            "dropout": Tensor(mask_bytes(job)),
            "q": Tensor(w * model.query_size / tp),
            "kv": Tensor(w * model.kv_values_per_rank(tp)),
            "out": Tensor(w * model.output_size / tp),
            "log-sum-exps": Tensor(4 * model.num_attention_heads / tp, ("core_attn",)),
        }

    def values(self, job: Job) -> int:
        # Rotary embedding.
        return 2 * (job.model.query_size + job.model.key_size)

    @staticmethod
    def no_ring(model: ModelShape) -> str:
        """Return why upstream's ring cannot exchange K and V of a model, which it then gathers; "" if it can."""
        return "TransformerEngine's ring takes no sliding windows" if model.windowed_share else ""

    def exchange(self, job: Job) -> ExchangeModel:
        """Return the exchange between context-parallel ranks, by a profile that has a unit of it."""
        tp, (latency, byte) = job.parallel.tp, network_of_ranks(job)
        value = job.model.kv_values_per_rank(tp) * byte
        before = 0 if "core_attn" in job.dropped else job.model.weights_of(FULL) - job.model.qkv_weights
        prefetch = 2 * before / tp / rates(job)[1] / 1e6
        arrive, leave = value * job.bytes_per_value, value * job.cp_gradient_bytes
        return ExchangeModel(latency=latency, arrive=arrive, leave=leave, prefetch=prefetch)

    def expands_us(self, job: Job) -> float:
        """Return us in which backward expands K and V of a row again, where `Job.expands_again`."""
        return 0.0

    def looked_up_bytes(self, job: Job) -> int:
        """Return bytes that every virtual stage keeps of a row: of the rotary table, in fp32."""
        return 4 * job.model.kv_channels


def network_of_ranks(job: Job) -> tuple[float, float]:
    """Return latency and time of a byte between context-parallel ranks, us."""
    return job.profile.network.all_to_all(Group(size=job.parallel.cp, stride=job.parallel.tp))
