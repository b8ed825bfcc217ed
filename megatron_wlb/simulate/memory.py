"""Activation memory of a pipeline stage with variable lengths, and the largest S_max that fits.

Bytes per token and layer follow Korthikanti et al. (arXiv 2205.05198, section 4), extended to attention that saves no
scores, grouped key heads, gated MLPs and experts. They count every tensor that a layer keeps for backward, in the
training dtype. The layer is upstream's TransformerEngine layer, which fuses norms into the following linear layer,
except for the norm before experts. `tests/adapter/test_memory.py` compares with what autograd keeps of upstream's layer
on a CPU.

Not counted: a few values per row of norms and routers, buffers of kernels other than FlashAttention-2, fragmentation.
"""

import math
from collections.abc import Collection

import numpy as np

from megatron_wlb.job import Job

DEVICE_SHARE = 0.9
"""Share of a GPU's memory to plan with; the rest is for the context, NCCL, kernels and fragmentation."""
H100_BYTES = 80 * 2**30
WEIGHT_BYTES, OPTIMIZER_BYTES = 6, 12
"""Bytes per parameter: the bf16 weight and its fp32 gradient; the states that the distributed optimizer divides."""


def weight_bytes(job: Job) -> float:
    """Bytes of weights, gradients and optimizer on the fullest GPU of a dense model, with the distributed optimizer."""
    p = job.parallel
    return float(stage_weights(job).max()) / p.tp * (WEIGHT_BYTES + OPTIMIZER_BYTES / (p.dp * p.cp))


def stage_weights(job: Job) -> np.ndarray:
    """Number of weights of every pipeline stage, over its tensor-parallel ranks, float64 [pp]."""
    model = job.model
    weights = job.layers().sum(axis=1) * float(model.layer_weights)
    weights[0] += model.vocabulary_weights
    weights[-1] += model.vocabulary_weights + model.mtp_num_layers * model.joining_weights
    if model.mtp_num_layers and job.parallel.pp > 1:
        weights[-1] += model.vocabulary_weights  # the last stage embeds, too
    return weights


def layer_input_bytes(job: Job) -> float:
    """Bytes of a layer's input, per token of a context-parallel rank."""
    return job.bytes_per_value * job.model.hidden_size / job.parallel.sequence_ranks


def layer_bytes(job: Job) -> float:
    """Bytes that a layer keeps for backward unless fully recomputed, per token of a CP rank."""
    return _attention_bytes(job) + _mlp_bytes(job, _dropped(job))


def mtp_bytes(job: Job) -> float:
    """Bytes that an MTP layer and its logits keep for backward, per token of a context-parallel rank."""
    if job.recompute.granularity == "full":
        return 2 * layer_input_bytes(job) + logits_bytes(job)
    # Inputs of three norms, and the outputs of two of them joined.
    return 5 * layer_input_bytes(job) + layer_bytes(job) + logits_bytes(job)


def logits_bytes(job: Job) -> float:
    """Bytes of logits and of their softmax in fp32, per token of a context-parallel rank."""
    return (job.bytes_per_value + 4) * job.model.padded_vocab_size / job.parallel.tp


def _dropped(job: Job) -> frozenset[str]:
    """Modules that are recomputed selectively."""
    return frozenset(job.recompute.modules if job.recompute.granularity == "selective" else ())


def _between_bytes(job: Job, norms: int) -> float:
    """Bytes of hidden-size tensors between attention and MLP; the dropout mask takes one byte per value."""
    h = job.model.hidden_size
    return (norms * job.bytes_per_value * h + (h if job.hidden_dropout else 0)) / job.parallel.sequence_ranks


def _attention_bytes(job: Job) -> float:
    """Bytes of the norm's input and output, of the norms of Q and K, and of what core attention keeps."""
    model = job.model
    if "core_attn" in _dropped(job):
        # Its inputs are kept, and the next layer keeps its output.
        heads = job.bytes_per_value * _attention_size(job) / job.parallel.tp
    else:
        heads = _core_attention_bytes(job)
    if "mla_up_proj" in _dropped(job):
        heads -= job.bytes_per_value * model.query_size / job.parallel.tp
    if model.kv_lora_rank:
        heads += _latent_bytes(job)
    elif model.qk_layernorm:
        heads += job.bytes_per_value * (model.query_size + model.key_size) / job.parallel.tp
    return _between_bytes(job, 2) + heads


def _latent_bytes(job: Job) -> float:
    """Bytes of latents before and after their norms, and of a layer's sines and cosines.

    If latents are exchanged, the latents of all keys are kept. If they are expanded again, the key part that heads
    share is kept instead of the norms' outputs.
    """
    model, norm, shared = job.model, 2 if job.model.qk_layernorm else 1, 4 * job.model.qk_pos_emb_head_dim
    keys = norm * model.kv_lora_rank
    if job.expands_again:
        keys, shared = job.parallel.cp * model.kv_lora_rank, shared + job.parallel.cp * model.qk_pos_emb_head_dim
    elif job.cp_exchange == "latents":
        keys *= job.parallel.cp
    return job.bytes_per_value * ((norm * model.q_lora_rank + keys) / job.parallel.sequence_ranks + shared)


def _attention_size(job: Job) -> int:
    """Values of Q, K, V and the output of attention that are kept per token.

    K and V count for the rank's own rows. If latents are exchanged, they count for all keys, or not at all if expanded
    again.
    """
    model, keys = job.model, job.model.key_size + job.model.value_size
    if job.cp_exchange != "latents":
        return model.attention_size
    return model.query_size + model.output_size + (0 if job.expands_again else job.parallel.cp * keys)


def _core_attention_bytes(job: Job) -> float:
    """Bytes of Q, K, V, the output of attention, and its log-sum-exps."""
    model, cp = job.model, job.parallel.cp
    gathered = job.sharding.save_gathered_kv and cp > 1 and job.cp_exchange != "latents"
    values = _attention_size(job) + (cp * (model.key_size + model.value_size) if gathered else 0)
    return (job.bytes_per_value * values + 4 * model.num_attention_heads) / job.parallel.tp


def _mlp_bytes(job: Job, dropped: Collection[str]) -> float:
    """Bytes of the norm's input and output, tokens sent to experts, and the MLP before and after its activation."""
    model = job.model
    if model.moe_router_topk:
        outputs, whole, activation = "layernorm" not in dropped, "moe", "moe_act" not in dropped
    else:
        # The norm is part of the MLP and recomputed with it; no other part of the MLP can be recomputed alone.
        outputs, whole, activation = "mlp" not in dropped, "mlp", True
    kept = _between_bytes(job, 1 + outputs)
    if whole in dropped:
        return kept
    tensors = (2 if model.gated_linear_unit else 1) + activation
    return kept + _expert_input_bytes(job) + tensors * _mlp_values_bytes(job)


def _mlp_values_bytes(job: Job) -> float:
    """Bytes of the MLP after its activation."""
    return job.bytes_per_value * job.model.ffn_hidden_size / job.parallel.tp


def _expert_input_bytes(job: Job) -> float:
    """Bytes of a token at `moe_router_topk` experts, on each of their tensor-parallel ranks."""
    return layer_input_bytes(job) * job.model.moe_router_topk * job.parallel.expert_tp


def mlp_backward_bytes(job: Job) -> float:
    """Bytes that backward of one MLP adds to the kept ones, per token of a CP rank.

    It holds what it recomputes and the gradient of its output; with experts also that gradient as sent. Add two
    tensors, before and after a matrix product, an activation or an exchange. The largest such tensor is the
    activation's, the rows that sequence-parallel ranks gather, or the rows that experts are sent.
    """
    recomputed = _mlp_bytes(job, ()) - _mlp_bytes(job, _dropped(job))
    rows = _expert_input_bytes(job)
    if job.parallel.sequence_ranks > 1:
        rows = max(rows, layer_input_bytes(job) * job.parallel.sequence_ranks)
    outputs = layer_input_bytes(job) * (1 + job.model.moe_router_topk)
    return recomputed + outputs + 2 * max(rows, _mlp_values_bytes(job))


def attention_backward_bytes(job: Job) -> float:
    """Bytes that backward of one attention adds to the kept ones, per token of a CP rank.

    It holds what it recomputes, and gradients. On top comes the larger of two phases: a kernel with received K and V
    and with dK and dV in fp32; or dK and dV being sent, cast before they are concatenated unless sent in fp32. If
    latents are exchanged: K and V expanded again, and dK and dV before their cast.

    Assumes a single document on all ranks, in one stage. The rank with its beginning and end sees all keys, runs half
    of its rows per call, and sends its first half to all other ranks. Assumes FlashAttention-2 kernels, which hold dQ
    in fp32, and dK and dV for every query head.
    """
    model, p, w = job.model, job.parallel, job.bytes_per_value
    q, out, kv = model.query_size / p.tp, model.output_size / p.tp, (model.key_size + model.value_size) / p.tp
    recomputed = _core_attention_bytes(job) - w * out if "core_attn" in _dropped(job) else 0
    gradients = layer_input_bytes(job) + w * (q + out + kv)
    expanded = q + out if model.query_size > model.key_size else 0
    kernel = (w + 4) * q / min(p.cp, 2) + w * p.cp * (kv + expanded)
    if p.cp == 1:
        return recomputed + gradients + kernel
    keys, arrived = p.cp * kv, arrived_bytes(job)
    if job.cp_exchange == "latents":
        again = w * keys if job.expands_again else 0
        return recomputed + gradients + again + 4 * keys + max(w * keys, kernel)
    sent = job.cp_gradient_bytes
    leaving = 4 * kv + sent * (keys - kv + ((p.cp - 1) / 2 * kv if sent == 4 else keys))
    return recomputed + gradients + 4 * keys + max(leaving, arrived + kernel)


def arrived_bytes(job: Job) -> float:
    """Bytes of received K and V for backward of one attention, per token of a context-parallel rank.

    Counted for the same case as `attention_backward_bytes`.
    """
    model, p = job.model, job.parallel
    if p.cp == 1 or job.sharding.save_gathered_kv or job.cp_exchange == "latents":
        return 0
    return job.bytes_per_value * p.cp * (model.key_size + model.value_size) / p.tp


def peak_bytes(job: Job, stage: int, max_tokens: int | None = None) -> float:
    """Peak activation bytes of a stage if every micro-batch in flight had `max_tokens` (S_max).

    Tokens are capped by what a data-parallel rank can hold in a step. The peak comes when the last layer of a stage
    begins its backward: in the MLP, while K and V of attention arrive, or in attention, with the MLP freed.
    """
    kept, at_once = _token_bytes(job, stage)
    longest = job.max_tokens if max_tokens is None else max_tokens
    return (most_kept(job, stage, longest, kept) + longest * at_once) / job.parallel.cp


def most_kept(job: Job, stage: int, longest: int, kept: np.ndarray) -> float:
    """Most bytes that a stage keeps at once, times CP, with micro-batches of up to `longest` tokens.

    `kept` is what a pass through each virtual stage keeps per token, float64 [vpp]. Every pass in flight may have
    `longest` tokens, but each micro-batch of the rank is in flight at most once per virtual stage.
    """
    return min(job.schedule().in_flight(stage, kept) * longest, _most_rank_tokens(job, longest) * float(kept.sum()))


def _most_rank_tokens(job: Job, longest: int) -> float:
    """Largest number of tokens of a step on a rank, with the padding of micro-batches."""
    return job.most_rank_tokens(longest) + job.micro_batches_per_rank * job.unit_tokens


def largest_max_tokens(job: Job, budget_bytes: float) -> int:
    """Largest S_max, a multiple of the job's unit, that fits the budget on every stage; 0 if none."""
    budget, unit, fitting = job.parallel.cp * budget_bytes, job.unit_tokens, []
    for stage in range(job.parallel.pp):
        kept, at_once = _token_bytes(job, stage)
        fits = budget / (job.schedule().in_flight(stage, kept) + at_once)
        none, one = (kept.sum() * _most_rank_tokens(job, longest) for longest in (0, 1))  # linear in S_max
        if math.isfinite(none):
            fits = max(fits, (budget - none) / (one - none + at_once))
        fitting.append(int(max(0, fits)) // unit * unit)
    return min(fitting)


def weight_gradient_bytes(job: Job) -> tuple[float, float]:
    """Bytes that deferred weight gradients hold for a layer, and for the output layer.

    Per token of a context-parallel rank. They hold inputs and output gradients of the weights in
    `passes.deferrable_weights`, as TransformerEngine does: gathered where tensor-parallel ranks divide the sequence.
    """
    model, p = job.model, job.parallel
    hidden, divided = 1 + max(1, model.moe_router_topk), model.output_size + model.ffn_hidden_size
    latents = 2 * model.latent_size if p.tp == 1 else model.latent_size
    if p.tp == 1 or latents:
        hidden += 1
    if p.tp == 1:
        # Received latents count, too.
        keys = p.cp if job.cp_exchange == "latents" else 1
        divided += model.query_size + keys * (model.key_size + model.value_size)
        latents += (keys - 1) * model.kv_lora_rank
    if p.tp == 1 or model.moe_router_topk:
        hidden += max(1, model.moe_router_topk)
        divided += model.ffn_hidden_size * (2 if model.gated_linear_unit else 1)
    layer = hidden * model.hidden_size + latents + divided / p.tp
    return job.bytes_per_value * layer, job.bytes_per_value * (model.hidden_size + model.padded_vocab_size / p.tp)


def kept_bytes(job: Job, stage: int) -> np.ndarray:
    """Bytes that a pass through each virtual stage keeps until its backward ends, float64 [vpp].

    Per token of a context-parallel rank.
    """
    return _token_bytes(job, stage)[0]


def deferral_limits(job: Job) -> list[float]:
    """Bytes per stage that may be kept for backward and held for weight gradients.

    This is the memory for activations, minus what one running micro-batch takes. If the memory is unknown, or less than
    the fullest stage's predicted peak, that peak replaces it: deferring then raises no stage's peak above it.
    """
    most = max(job.activation_bytes or 0, *(peak_bytes(job, stage) for stage in range(job.parallel.pp)))
    return [most - job.max_tokens * _token_bytes(job, stage)[1] / job.parallel.cp for stage in range(job.parallel.pp)]


def _token_bytes(job: Job, stage: int) -> tuple[np.ndarray, float]:
    """Bytes per token that a stage keeps in each virtual stage, float64 [vpp], and holds for one running
    micro-batch."""
    model, parallel, recompute = job.model, job.parallel, job.recompute
    # Offloading as in TransformerEngine's `OffloadSynchronizer`. Older versions offload only what their own modules
    # save.
    layers = job.decoder_layers()[stage].astype(float) - job.offloaded_layers
    ahead = 0 if "core_attn" in _dropped(job) else arrived_bytes(job)
    at_once = max(mlp_backward_bytes(job) + ahead, attention_backward_bytes(job) - _mlp_bytes(job, _dropped(job)))
    if recompute.granularity == "full":
        block = recompute.method == "block"
        recomputed = np.minimum(recompute.num_layers or 0, layers) if block else layers
        together = 1 if block else recompute.num_layers or 1
        kept = recomputed * layer_input_bytes(job) / together + (layers - recomputed) * layer_bytes(job)
        at_once += together * layer_bytes(job)
    else:
        kept = layers * layer_bytes(job)
    if parallel.vpp > 1:
        # Inputs received before their group runs, and sent outputs of as many micro-batches as there are stages.
        sent = parallel.pp if job.hidden_transfers else 0
        at_once += (job.schedule().group - parallel.pp + sent) * layer_input_bytes(job)
    if stage == parallel.pp - 1:
        at_once += job.bytes_per_value * model.hidden_size + logits_bytes(job)
        at_once += model.mtp_num_layers * mtp_bytes(job)
    return kept, at_once
