"""Self-attention with Q, K and V of the hidden state, to all of a document or in a window."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megatron_wlb.job import FP32, MAX_TOKENS, Job
from megatron_wlb.layers.part import LAUNCHES_US, Part, Tensor, layer_input_bytes, mask_bytes, network_of_ranks, rates
from megatron_wlb.layers.pattern import chosen
from megatron_wlb.model import FULL, WINDOWED, ModelShape
from megatron_wlb.settings import short

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


def ignores_mask(a: Any) -> Any:
    """Whether attention without `--wlb` ignores the mask that --reset-attention-mask makes.

    TransformerEngine does (NVIDIA/Megatron-LM#2357). So do local layers with a fused softmax, which runs in bf16 and
    fp16, and with windows, which have a mask of their own.
    """
    fused = (a.bf16 or a.fp16) and a.masked_softmax_fusion is not False
    return a.transformer_impl != "local" or fused or a.window_size


def _keys_before(given: tuple[int, int] | str | None) -> int | None:
    """Return the keys that a query sees before its own; None: all. Raises ValueError for anything else."""
    if given is None:
        return None
    sides = re.fullmatch(r"[\[(]?(-?\d{1,9}), ?-?\d{1,9}[\])]?", str(given))
    if not sides or not -1 <= (left := int(sides[1])) <= MAX_TOKENS:
        raise ValueError(f"--window-size is {short(given)}; give LEFT,0, with LEFT from -1 (no window) to {MAX_TOKENS}")
    return None if left < 0 else left


class Attention(Part):
    letters = FULL + WINDOWED
    exchanges: ClassVar[tuple[str, ...]] = ("shared",)
    """Values of `Job.cp_exchange` that `--wlb` may choose; the first but where another is clearly faster."""
    modules: ClassVar[Mapping[str, float]] = {"attn": LAUNCHES_US}
    kernels = (4, 6)

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        window, kinds, frequency = _keys_before(a.window_size), sizes["pattern"], a.window_attn_skip_freq
        if window is None:
            return {}
        has = [1] * len(kinds) if frequency is None else chosen("--window-attn-skip-freq", frequency, len(kinds))
        pairs = zip(kinds, has, strict=True)
        return {"window": window, "pattern": [k.replace(FULL, WINDOWED) if each else k for k, each in pairs]}

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
            "log-sum-exps": Tensor(FP32 * model.num_attention_heads / tp, ("core_attn",)),
        }

    def values(self, job: Job) -> int:
        # Rotary embedding.
        return 2 * (job.model.query_size + job.model.key_size)

    @staticmethod
    def no_ring(model: ModelShape) -> str:
        """Return why upstream's ring cannot exchange K and V of a model, which it then gathers; "" if it can."""
        return "TransformerEngine's ring takes no sliding windows" if model.windows != (None,) else ""

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

    def rotary_bytes(self, job: Job) -> int:
        """Return bytes of a row of the rotary table, in fp32."""
        return FP32 * job.model.kv_channels

    def looked_up_bytes(self, job: Job) -> int:
        """Return bytes that every virtual stage keeps of a row, for all of its layers."""
        return self.rotary_bytes(job)
