"""Activation memory of a pipeline stage under variable micro-batch lengths: what S_max costs, and which S_max fits.

Bytes per token and layer follow Korthikanti et al. (arXiv 2205.05198, section 4), with attention that saves no scores,
grouped key heads and gated MLPs: every tensor that some layer keeps for backward, in the training dtype.
"""

from dataclasses import replace

from megatron_wlb.job import Job, Recompute
from megatron_wlb.pipeline.schedule import schedule_of


def layer_input_bytes(job: Job) -> float:
    """The input of one layer, per token of a rank's part of the sequence."""
    return job.bytes_per_value * job.model.hidden_size / job.parallel.sequence_ranks


def layer_bytes(job: Job) -> float:
    """What one layer that is not wholly recomputed keeps for backward, per token of a rank's part of the sequence."""
    model, h, w, cp = job.model, job.model.hidden_size, job.bytes_per_value, job.parallel.cp
    dropped = frozenset(job.recompute.modules if job.recompute.granularity == "selective" else ())
    # Split by sequence parallelism: inputs and outputs of both norms, dropout masks of one byte.
    between = (2 if "layernorm" in dropped else 4) * w * h + (2 * h if job.hidden_dropout else 0)
    # Split by tensor parallelism: Q, K, V, the attention output, log-sum-exps; the MLP before and after activation.
    copies = 1 + cp if job.save_gathered_kv and cp > 1 else 1
    attention = w * (2 * model.query_size + 2 * copies * model.key_size) + 4 * model.num_attention_heads
    tensors = (3 if model.gated_linear_unit else 2) - ("moe_act" in dropped)
    mlp = 0 if dropped & {"mlp", "moe"} else w * model.ffn_hidden_size * tensors
    return between / job.parallel.sequence_ranks + (attention + mlp) / job.parallel.tp


def peak_bytes(job: Job, stage: int, max_tokens: int | None = None) -> float:
    """Activations at the peak of a stage, if every micro-batch in flight had `max_tokens` (default: S_max) tokens."""
    model, parallel, recompute = job.model, job.parallel, job.recompute
    layers = (model.num_layers + 2 * parallel.edge_layers) / (parallel.pp * parallel.vpp)
    whole = layer_bytes(replace(job, recompute=Recompute()))
    if recompute.granularity == "full":
        block = recompute.method == "block"
        recomputed = min(recompute.num_layers or 0, layers) if block else layers
        together = 1 if block else recompute.num_layers or 1
        kept = recomputed * layer_input_bytes(job) / together + (layers - recomputed) * whole
        at_once = together * whole
    else:
        # Backward recomputes one layer at a time.
        kept, at_once = layers * layer_bytes(job), whole - layer_bytes(job)
    per_token = schedule_of(job).in_flight(stage) * kept + at_once
    if stage == parallel.pp - 1:
        # Input of the output layer, its logits, and their softmax in fp32.
        per_token += job.bytes_per_value * model.hidden_size
        per_token += (job.bytes_per_value + 4) * model.padded_vocab_size / parallel.tp
    return (job.max_tokens if max_tokens is None else max_tokens) / parallel.cp * per_token


def largest_max_tokens(job: Job, budget_bytes: float) -> int:
    """The largest S_max, a multiple of the job's unit, whose peak fits the budget on every stage; 0 if none does."""
    per_token = max(peak_bytes(job, stage, 1) for stage in range(job.parallel.pp))
    return int(budget_bytes / per_token) // job.unit_tokens * job.unit_tokens
