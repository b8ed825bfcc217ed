"""Activation memory of a pipeline stage under variable micro-batch lengths: what S_max costs, and which S_max fits.

Bytes per token and layer follow Korthikanti et al. (arXiv 2205.05198, section 4), with attention that saves no scores,
grouped key heads and gated MLPs: every tensor that some layer keeps for backward, in the training dtype.
"""

from dataclasses import dataclass, replace

from megatron_wlb.plan.workload import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationModel:
    """A model on one rank of its layout; see `peak_bytes`."""

    model: ModelShape
    dropout: bool
    """Hidden dropout keeps two masks a layer."""
    recompute_granularity: str | None = None
    """Upstream's, like the next three. full: a layer keeps its input only. selective: it drops `recompute_modules`."""
    recompute_method: str | None = None
    """block: `recompute_num_layers` of each chunk are recomputed. uniform: so many share an input and run at once."""
    recompute_num_layers: int | None = None
    recompute_modules: frozenset[str] = frozenset()
    """Of them "mlp", "moe", "moe_act" and "layernorm" save memory here."""
    bytes_per_value: int
    save_gathered_keys: bool = False
    """Layers keep K and V of all context-parallel ranks (`--wlb-save-gathered-kv`), at most."""
    tp_size: int
    sequence_parallel: bool
    cp_size: int
    pp_size: int
    vp_size: int = 1
    group_size: int = 0
    """Micro-batches per virtual stage group; 0: pp_size, as upstream."""

    def layer_input_bytes(self) -> float:
        """Of one layer, per token of the rank's shard of the sequence."""
        return self.bytes_per_value * self.model.hidden_size / (self.tp_size if self.sequence_parallel else 1)

    def layer_bytes(self) -> float:
        """Kept for backward by one layer that is not recomputed, per token of the rank's shard of the sequence."""
        model, h, w = self.model, self.model.hidden_size, self.bytes_per_value
        split = self.tp_size if self.sequence_parallel else 1
        # Split by sequence parallelism: inputs and outputs of both norms, dropout masks of one byte.
        dropped = self.recompute_modules if self.recompute_granularity == "selective" else frozenset()
        between = (2 if "layernorm" in dropped else 4) * w * h + (2 * h if self.dropout else 0)
        # Split by tensor parallelism: Q, K, V, the attention output, log-sum-exps; the MLP before and after activation.
        copies = 1 + self.cp_size if self.save_gathered_keys and self.cp_size > 1 else 1
        attention = w * (2 * model.query_size + 2 * copies * model.key_size) + 4 * model.num_attention_heads
        tensors = (3 if model.gated_linear_unit else 2) - ("moe_act" in dropped)
        mlp = 0 if dropped & {"mlp", "moe"} else w * model.ffn_hidden_size * tensors
        return between / split + (attention + mlp) / self.tp_size

    def in_flight(self, stage: int, num_micro_batches: int) -> int:
        """Forward passes of model chunks that a stage holds at most before it goes back through one (1F1B)."""
        if self.vp_size == 1:
            return min(num_micro_batches, self.pp_size - stage)
        group = self.group_size or self.pp_size
        warmup = 2 * (self.pp_size - stage - 1) + (self.vp_size - 1) * group
        return min(num_micro_batches * self.vp_size, warmup + 1)

    def peak_bytes(self, stage: int, max_tokens: int, num_micro_batches: int) -> float:
        """Activations at the peak of a stage, if every micro-batch in flight had `max_tokens` (S_max) tokens."""
        tokens = max_tokens / self.cp_size
        layers = self.model.num_layers / (self.pp_size * self.vp_size)
        whole = replace(self, recompute_granularity=None).layer_bytes()
        if self.recompute_granularity == "full":
            block = self.recompute_method == "block"
            recomputed = min(self.recompute_num_layers or 0, layers) if block else layers
            together = 1 if block else self.recompute_num_layers or 1
            kept = recomputed * self.layer_input_bytes() / together + (layers - recomputed) * whole
            at_once = together * whole
        else:
            # Backward recomputes one layer at a time.
            kept, at_once = layers * self.layer_bytes(), whole - self.layer_bytes()
        per_token = self.in_flight(stage, num_micro_batches) * kept + at_once
        if stage == self.pp_size - 1:
            # Input of the output layer, its logits, and their softmax in fp32.
            per_token += self.bytes_per_value * self.model.hidden_size
            per_token += (self.bytes_per_value + 4) * self.model.padded_vocab_size / self.tp_size
        return tokens * per_token

    def peak_bytes_of_stages(self, max_tokens: int, num_micro_batches: int) -> list[float]:
        """`peak_bytes` of every stage."""
        return [self.peak_bytes(stage, max_tokens, num_micro_batches) for stage in range(self.pp_size)]

    def largest_max_tokens(self, budget_bytes: float, num_micro_batches: int, unit: int) -> int:
        """The largest S_max, a multiple of `unit`, whose peak fits the budget on every stage; 0 if none does."""
        per_token = max(self.peak_bytes_of_stages(1, num_micro_batches))
        return int(budget_bytes / per_token) // unit * unit
