"""WlbConfig: every setting of the plugin. The `--wlb-*` flags are generated from it (`adapter/arguments.py`)."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

MAX_TOKENS = 1 << 26
"""Longest micro-batch for which work stays exact in 64 bits, with room for sums over a global batch."""
PACKINGS = ("original", "fixed", "wlb", "adaptive")
PACKING_MODES = ("constant-tokens", "low-displacement")
CP_SHARDINGS = ("per-sequence", "per-document", "hybrid", "paper", "adaptive")
ATTENTION_BACKENDS = ("auto", "aten", "flash_attn", "flash_attn_3", "te", "triton", "cpu", "reference", "megatron")
PLANNERS = ("auto", "native", "python")
SHORTEST_DELAY_BOUND = 12
"""Of adaptive packing: under a tighter one, documents that came later would be forced to run before the first are."""
MAX_TOLERANCE = 1.0
"""Of adaptive packing: beyond twice the mean nothing is balanced any more."""

MAX_MEMORY_GIB = 1 << 10
"""Of a GPU: so that MiB are not taken for GiB."""


def _setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class WlbConfig:
    """Settings of WLB training. Lengths are in trained tokens. Raises ValueError on values that make no sense alone."""

    packing: str = _setting(
        "wlb",
        "How documents become micro-batches. original: concatenated and cut at --seq-length, as Megatron does. wlb: "
        "Algorithm 1 of WLB-LLM: equal work, variable length, very long documents wait until each micro-batch gets "
        "one. adaptive: equal work, variable length, a document waits until a step stays balanced with it, under a "
        "bound on its delay. fixed: the paper's baseline, greedy under the window over --wlb-global-batches.",
        PACKINGS,
    )
    outlier_thresholds: tuple[int, ...] | None = _setting(
        None,
        "Comma-separated L_1,L_2,...: documents of L_i <= length < L_{i+1} wait in queue i until there is one for "
        "every micro-batch. Default: a half and three quarters of --seq-length.",
    )
    packing_mode: str = _setting(
        "constant-tokens",
        "Of adaptive packing. constant-tokens: the same number of tokens in every step, reading ahead in the data. "
        "low-displacement: documents run when they come, tokens per step vary with --wlb-max-tokens.",
        PACKING_MODES,
    )
    max_delay_steps: int = _setting(
        30,
        "Of adaptive packing: no document runs later than this many steps after it arrives; at least "
        f"{SHORTEST_DELAY_BOUND}.",
    )
    balance_tolerance: float | None = _setting(
        None,
        "Of adaptive packing: a step is balanced if its largest micro-batch has at most 1 + this times the mean work. "
        "Default: 0.003 for constant-tokens, 0.015 for low-displacement.",
    )
    age_tolerance: float | None = _setting(
        None,
        "Of adaptive packing: added to --wlb-balance-tolerance for every step that the oldest document of a step is "
        "late. Default: 0.008 for constant-tokens, 0.035 for low-displacement.",
    )
    global_batches: int = _setting(1, "Of fixed packing: global batches that are packed together.")
    max_tokens: int | Literal["auto"] | None = _setting(
        None,
        "S_max: longest micro-batch in tokens, bounded by memory; at least --seq-length. auto: the largest whose "
        "activations fit --wlb-memory-budget. Default: 1.25 times --seq-length.",
    )
    memory_budget: float | None = _setting(
        None,
        "GiB that the activations of a pipeline stage may take, as predicted from S_max. Default: on GPUs with Adam "
        "nine tenths of the device's memory less weights and optimizer, else no limit.",
    )
    crossover: int | None = _setting(
        None,
        "Document length at which attention costs as much as everything else in a layer. Default: from --wlb-profile "
        "if it states one, else from the FLOPs of the model.",
    )
    cp_sharding: str = _setting(
        "adaptive",
        "How a micro-batch is divided over context-parallel ranks. hybrid: long documents per document, in tiles of "
        "the kernel, short ones whole. adaptive: whichever of the three has the fastest slowest rank for this "
        "micro-batch, by the kernel model of --wlb-profile. paper: the same without hybrid.",
        CP_SHARDINGS,
    )
    profile: str | None = _setting(
        None,
        "Kernel model: a shipped profile or a JSON file. Default: h100-fa2 on GPUs, flops (counts attended pairs) "
        "without.",
    )
    attention_backend: str = _setting(
        "auto",
        "Kernels under context-parallel attention. aten: torch's own FlashAttention. flash_attn, flash_attn_3, te: the "
        "packages flash-attn 2, FlashAttention-3, TransformerEngine. triton: ours. auto: on GPUs the first of these "
        "that passes a small test, in the order aten, flash_attn_3, flash_attn, te, triton; cpu without. megatron: "
        "TransformerEngine's attention and context parallelism instead of ours, as without --wlb, for comparison.",
        ATTENTION_BACKENDS,
    )
    cp_head_groups: int = _setting(
        2,
        "Groups of key heads in which context-parallel attention gathers K and V, each while the one before computes; "
        "1 hides no communication.",
    )
    save_gathered_kv: bool = _setting(
        False, "Keep gathered K and V for backward instead of gathering them again: faster, for memory in every layer."
    )
    planner: str = _setting(
        "auto",
        "Packing core: native (C++), python (the reference), or auto: native if it was built; the start of the run "
        "says which.",
        PLANNERS,
    )
    plan_ahead: int = _setting(4, "Steps that the planner thread may be ahead of training.")
    digest_interval: int = _setting(
        16, "Every this many steps all ranks compare a digest of their plans; the first step always is compared."
    )
    check_shapes: bool = _setting(
        False,
        "Debug: exchange tensor shapes between pipeline stages as upstream does, and compare them with the plan.",
    )
    weight_gradients: bool = _setting(
        False,
        "Multiply the gradient of a step by its tokens over the mean (N x --seq-length), so that every token weighs "
        "the same however many its step has. Without, every step weighs the same, as upstream has it.",
    )
    restart_packing: bool = _setting(
        False,
        "Where the packer state of the loaded checkpoint is missing or does not fit (another dataset, window or "
        "policy), begin with the data anew instead of stopping.",
    )
    document_log: str | None = _setting(
        None,
        "Append which documents every step trained to this file, a few bytes each; `megatron-wlb audit` checks that "
        "none was lost or doubled over restarts.",
    )
    log: str | None = _setting(None, "Append one JSON object a step to this file: loss, tokens, work, delays, shards.")

    def __post_init__(self) -> None:
        for f in fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices:
                raise ValueError(f"--wlb-{_dashes(f.name)} is {value!r}; choose one of {', '.join(choices)}")
        thresholds = self.outlier_thresholds
        if thresholds is not None and (min(thresholds, default=0) < 1 or list(thresholds) != sorted(set(thresholds))):
            raise ValueError(
                f"--wlb-outlier-thresholds is {','.join(map(str, thresholds))!r}; give lengths of at least 1 in "
                "increasing order, such as 32768,65536"
            )
        for name, least, most in (
            ("max_delay_steps", SHORTEST_DELAY_BOUND, 1 << 31),
            ("global_batches", 1, 1 << 10),
            ("crossover", 1, 1 << 35),
            ("cp_head_groups", 1, 1 << 10),
            ("plan_ahead", 1, 1 << 10),
            ("digest_interval", 1, 1 << 31),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"--wlb-{_dashes(name)} is {value}; it must be from {least} to {most}")
        for name in ("balance_tolerance", "age_tolerance"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_TOLERANCE:
                raise ValueError(f"--wlb-{_dashes(name)} is {value}; it must be from 0 to {MAX_TOLERANCE:g}")
        if self.memory_budget is not None and not 0 < self.memory_budget <= MAX_MEMORY_GIB:
            raise ValueError(
                f"--wlb-memory-budget is {self.memory_budget}; give GiB of a GPU, more than 0 and at most "
                f"{MAX_MEMORY_GIB}"
            )
        if isinstance(self.max_tokens, int) and self.max_tokens > MAX_TOKENS:
            raise ValueError(
                f"--wlb-max-tokens is {self.max_tokens}; work is exact up to {MAX_TOKENS} tokens, give at most that"
            )

    def thresholds_for(self, context_length: int) -> tuple[int, ...]:
        """L_1, L_2, ... for a context window."""
        if self.outlier_thresholds is not None:
            return self.outlier_thresholds
        return tuple(sorted({max(2, context_length // 2), max(2, 3 * context_length // 4)}))

    def policy_settings(self, context_length: int) -> dict[str, Any]:
        """What `plan.make_packer` is told of the settings of policies, whichever runs."""
        return {
            "outlier_thresholds": self.thresholds_for(context_length),
            "mode": self.packing_mode,
            "max_delay_steps": self.max_delay_steps,
            "balance_tolerance": self.balance_tolerance,
            "age_tolerance": self.age_tolerance,
            "num_global_batches": self.global_batches,
        }

    def max_tokens_for(self, context_length: int, unit: int, fitting: int | None = None) -> int:
        """S_max for a context window, a multiple of `unit`; `fitting` is the largest that memory has room for, or None.

        Raises ValueError if the setting is under the window, not a multiple of the unit, or more than fits.
        """
        if fitting is not None and fitting < context_length:
            raise ValueError(
                f"micro-batches of at most {fitting} tokens fit into memory, less than --seq-length {context_length}; "
                "recompute activations, use more pipeline, context or tensor parallelism, or raise --wlb-memory-budget"
            )
        if self.max_tokens == "auto":
            if fitting is None:
                raise ValueError("--wlb-max-tokens auto needs to know the memory: give --wlb-memory-budget in GiB")
            return min(fitting, MAX_TOKENS // unit * unit)
        chosen = self._max_tokens(context_length, unit)
        if fitting is not None and chosen > fitting:
            raise ValueError(
                f"micro-batches of {chosen} tokens (S_max) need more memory for activations than there is; give "
                f"--wlb-max-tokens {fitting} or auto, recompute activations, or raise --wlb-memory-budget"
            )
        return chosen

    def _max_tokens(self, context_length: int, unit: int) -> int:
        if not isinstance(self.max_tokens, int):
            return math.ceil(1.25 * context_length / unit) * unit
        if self.max_tokens < context_length:
            raise ValueError(
                f"--wlb-max-tokens {self.max_tokens} is under --seq-length {context_length}: a document of a full "
                f"window would fit nowhere; give at least {context_length}"
            )
        if self.max_tokens % unit:
            raise ValueError(
                f"--wlb-max-tokens {self.max_tokens} cannot be shared by the context- and sequence-parallel ranks; "
                f"give a multiple of {unit}, such as {math.ceil(self.max_tokens / unit) * unit}"
            )
        return self.max_tokens


def _dashes(name: str) -> str:
    return name.replace("_", "-")
