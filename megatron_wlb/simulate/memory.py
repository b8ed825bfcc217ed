"""Activation memory of a pipeline stage, and the largest S_max that fits.

Bytes per token and layer follow Korthikanti et al. (arXiv 2205.05198, section 4), extended to attention that saves no
scores, grouped key heads, gated MLPs and experts. They count every tensor that upstream's TransformerEngine layer keeps
for backward, in the training dtype; it fuses norms into the next linear layer, except before experts.
`tests/adapter/test_memory.py` compares with the tensors that autograd keeps of upstream's layer on a CPU.

Not counted: a few values per row of norms and routers, buffers of kernels other than FlashAttention-2, fragmentation.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_wlb.cost.tiles import gathered_bytes, overlap_bytes
from megatron_wlb.job import FP32, Job
from megatron_wlb.layers import DEPTH, attention_of, part_of
from megatron_wlb.layers.part import Tensor, layer_input_bytes
from megatron_wlb.model import FULL

DEVICE_SHARE = 0.9
"""Share of a GPU's memory to plan with; the rest is for the context, NCCL, kernels and fragmentation."""
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes per parameter: of a bf16 weight, its fp32 gradient, and the states that the distributed optimizer divides."""


def weight_bytes(job: Job, stage: int | None = None) -> float:
    """Return bytes of weights, gradients, optimizer, rotary table and user buffers on a GPU.

    TransformerEngine keeps an empty gradient for every shape of a weight, too (`get_dummy_wgrad`). `stage`: its
    pipeline stage; None: the fullest.
    """
    p, w = job.parallel, job.bytes_per_value
    shapes = {matrix.shape(np.ones(1), p.dividing(matrix))[1:] for matrix in job.model.matrices}
    kept = np.full(p.pp, w * sum(outputs * inputs for outputs, inputs in shapes))
    kept[-1] += w * job.model.vocabulary_weights / p.tp
    kept += held_bytes(job)
    rotary = job.context_length * attention_of(job.model).rotary_bytes(job)
    return float(kept.max() if stage is None else kept[stage]) + rotary + overlap_bytes(job)


def held_bytes(
    job: Job,
    *,
    divided: bool = True,
    tied: bool = False,
    gradient: float = GRADIENT_BYTES,
    optimizer: float = OPTIMIZER_BYTES,
) -> np.ndarray:
    """Return bytes of weights, gradients and Adam's states on a GPU of every stage, float64 [pp].

    `divided`: by the distributed optimizer. `tied`: the output layer has the weights of the embedding. `gradient` and
    `optimizer`: bytes per parameter.
    """
    weights, parallel = gpu_weights(job), job.parallel
    if tied and parallel.pp == 1:
        weights[0] -= job.model.vocabulary_weights / parallel.tp
    ranks = np.array(parallel.copies if divided else (1, 1))[:, None]
    found: np.ndarray = (weights * (WEIGHT_BYTES + gradient + optimizer / ranks)).sum(axis=0)
    return found


def gpu_weights(job: Job) -> np.ndarray:
    """Return the weights of a GPU of every stage, float64 [2, pp], as `ModelShape.held_weights_of` has them."""
    model, parallel = job.model, job.parallel
    held = np.array([model.held_weights_of(kind) for kind in model.kinds], float)  # [kinds, 2]
    weights, pooled = held.T @ job.layers_by_kind().sum(axis=2)
    weights[0] += model.vocabulary_weights
    weights[-1] += model.vocabulary_weights + DEPTH.weights(job)
    return np.stack([each / ranks for each, ranks in zip((weights, pooled), parallel.shards, strict=True)])


def tensors(job: Job, part: str) -> dict[str, Tensor]:
    """Return the tensors that a part of a layer keeps for backward."""
    return part_of(job.model, part).kept(job)


def _mlp_tensors(job: Job) -> dict[str, Tensor]:
    return tensors(job, job.model.feed_forward)


def _kept(job: Job, of: Mapping[str, Tensor]) -> float:
    """Bytes of the tensors that are not recomputed selectively."""
    return sum(tensor.bytes for tensor in of.values() if not set(job.dropped) & set(tensor.modules))


def layer_bytes(job: Job, kind: str = FULL) -> float:
    """Bytes that a layer of a kind keeps for backward unless fully recomputed."""
    return sum(_kept(job, tensors(job, part)) for part in job.model.parts_of(kind))


def depth_bytes(job: Job) -> float:
    """Bytes that a depth (`ModelShape.depths`), its layer and its logits keep for backward."""
    if job.runs_layers_again:
        return 2 * layer_input_bytes(job) + logits_bytes(job)
    return _kept(job, DEPTH.kept(job)) + layer_bytes(job) + logits_bytes(job)


def logits_bytes(job: Job) -> float:
    """Bytes of logits and of their softmax in fp32."""
    return (job.bytes_per_value + FP32) * job.model.padded_vocab_size / job.parallel.tp


def mlp_backward_bytes(job: Job) -> float:
    """Bytes that backward of one MLP adds to the kept ones.

    It holds recomputed tensors and gradients (`Part.gradient_rows`). Add two tensors, before and after a product, an
    activation or an exchange. The largest such tensor is the activation's, the rows that experts are sent, or those
    that sequence-parallel ranks gather, without user buffers.
    """
    kept, row = _mlp_tensors(job), layer_input_bytes(job)
    again = sum(tensor.bytes for tensor in kept.values()) - _kept(job, kept)
    largest = max(gathered_bytes(job), *(kept[name].bytes for name in ("sent", "activation") if name in kept))
    return again + row * part_of(job.model, job.model.feed_forward).gradient_rows(job) + 2 * largest


Moved = tuple[float, float]
"""Rows of K and V that a context-parallel rank receives and sends, per row that it holds."""


def one_document(job: Job, window: int | None = None) -> Moved:
    """Return the rows that move if a single document is on all ranks.

    The rank with its beginning and end sees all keys, and sends its first half to all others. In a window, a rank sees
    and sends one before each half.
    """
    others = job.parallel.cp - 1
    near = others if window is None else min(others, 2 * window * job.parallel.cp / job.context_length)
    return near, min(near, others / 2)


def attention_backward_bytes(job: Job, moved: Moved | None = None) -> float:
    """Bytes that backward of one attention adds to the kept ones; `moved`: by default as for `one_document`.

    It holds recomputed tensors, and gradients. On top comes the largest of three phases: (1) a kernel with received K
    and V and with dK and dV in fp32, (2) dK and dV being sent, cast before they are concatenated unless sent in fp32,
    (3) those that come back, cast again. If exchanged latents are kept: K and V expanded again, and dK and dV before
    their cast.

    Assumes one stage, half of the rank's rows per call, and FlashAttention-2 kernels, which hold dQ in fp32, and dK and
    dV for every query head.
    """
    model, p, w, kept = job.model, job.parallel, job.bytes_per_value, tensors(job, FULL)
    received, sent = moved or one_document(job, model.widest)
    q, out, kv = model.query_size / p.tp, model.output_size / p.tp, model.kv_values_per_rank(p.tp)
    of_core, dropped = "core_attn" in job.dropped, set(job.dropped)
    again = ["q", "kv"] * (of_core or bool(dropped & {*kept["kv"].modules})) + ["log-sum-exps"] * of_core
    held = sum(kept[name].bytes for name in again) + layer_input_bytes(job) + w * (q + out + kv)
    expanded = q + out if model.query_size > model.key_size else 0
    kernel = (w + FP32) * q / min(p.cp, 2) + w * (1 + received) * (kv + expanded)
    if p.cp == 1:
        return held + kernel
    keys = (1 + received) * kv
    if job.keeps_exchanged:
        return held + (w * keys if job.expands_again else 0) + FP32 * keys + max(w * keys, kernel)
    value, back, is_cast = job.cp_gradient_bytes, sent * kv, job.cp_gradient_bytes < FP32
    leaving = FP32 * kv + value * (received * kv + max(is_cast * keys, back))
    summed = FP32 * kv + value * (received * kv + back) + is_cast * FP32 * back
    return held + max(FP32 * keys + max(leaving, w * keys + kernel), summed)


def peak_bytes(job: Job, stage: int | None = None, max_tokens: int | None = None) -> float:
    """Return peak bytes of a stage (None: of the fullest) with `max_tokens` (None: S_max) in every micro-batch.

    Tokens are capped by a data-parallel rank's most in a step. The peak comes when the last layer of a stage begins its
    backward: in the MLP, while K and V of attention arrive, or in attention, with the MLP freed.
    """
    longest = job.max_tokens if max_tokens is None else max_tokens
    if stage is None:
        return max(peak_bytes(job, each, longest) for each in range(job.parallel.pp))
    kept, running = kept_bytes(job, stage), running_bytes(job, stage)
    return (most_kept(job, stage, longest, kept) + longest * running) / job.parallel.cp


def step_peak_bytes(job: Job, stage: int, rows: np.ndarray, moved: Sequence[Moved]) -> float:
    """Return peak activation bytes of a stage in a step; `rows` of its micro-batches on a rank: float64 [M]."""
    kept, running = kept_bytes(job, stage), np.array([running_bytes(job, stage, each) for each in moved])
    schedule = job.schedule(len(rows))
    ops, begins_pair = schedule.ops(stage), schedule.begins_pair(stage)
    backward, chunk, size = ops["backward"], ops["chunk"], rows[ops["micro_batch"]]
    change = np.where(backward, -1, 1) * kept[chunk] * size
    level = change.cumsum()
    outputs = backward & (stage == job.parallel.pp - 1) & (chunk == job.parallel.vpp - 1)
    at_output = _output_bytes(job) if outputs.any() else 0
    # A backward pass still has what it frees; logits are gone when layers begin.
    in_layers = kept[chunk] + running[ops["micro_batch"]] - at_output
    most = np.maximum(in_layers, (kept[chunk] + at_output + _moving_bytes(job)) * outputs)
    # Of a pair, the forward pass fills while the backward pass frees.
    level -= np.minimum(np.roll(begins_pair * change, 1), -change * backward)
    return float((level + backward * most * size)[~begins_pair].max())


def most_kept(job: Job, stage: int, longest: int, kept: np.ndarray) -> float:
    """Return most bytes that a stage keeps at once, times CP.

    `kept`: bytes that a pass through each virtual stage keeps per token, float64 [vpp]. Every pass in flight may have
    `longest` tokens, but each micro-batch of the rank is in flight at most once per virtual stage.
    """
    return min(job.schedule().in_flight(stage, kept) * longest, _most_rank_tokens(job, longest) * float(kept.sum()))


def _most_rank_tokens(job: Job, longest: int) -> float:
    """Largest number of tokens of a step on a rank, with the padding of micro-batches."""
    return job.most_rank_tokens(longest) + job.micro_batches_per_rank * job.unit_tokens


def largest_max_tokens(job: Job, budget_bytes: float) -> int:
    """Return the largest S_max, in units, that fits every stage; 0 if none."""
    budget, unit, fitting = job.parallel.cp * budget_bytes, job.unit_tokens, []
    for stage in range(job.parallel.pp):
        kept, running = kept_bytes(job, stage), running_bytes(job, stage)
        fits = budget / (job.schedule().in_flight(stage, kept) + running)
        none, one = (kept.sum() * _most_rank_tokens(job, longest) for longest in (0, 1))  # linear in S_max
        if math.isfinite(none):
            fits = max(fits, (budget - none) / (one - none + running))
        fitting.append(int(max(0, fits)) // unit * unit)
    return min(fitting)


def kept_bytes(job: Job, stage: int) -> np.ndarray:
    """Return the bytes that a pass keeps in each virtual stage of a stage, per token, float64 [vpp]."""
    # As in TransformerEngine's `OffloadSynchronizer`; older versions offload only what their own modules save.
    layers = job.decoder_layers()[stage].astype(float) - job.offloaded_layers
    by_kind = job.layers_by_kind()[:, stage]
    in_layer = np.array([layer_bytes(job, kind) for kind in job.model.kinds])
    each = (in_layer[:, None] * (by_kind / np.maximum(1, by_kind.sum(axis=0)))).sum(axis=0)
    again, at_once = job.layers_again(layers)
    kept = np.ceil(again / at_once) * layer_input_bytes(job) + (layers - again) * each
    return kept + attention_of(job.model).looked_up_bytes(job)


def running_bytes(job: Job, stage: int, moved: Moved | None = None) -> float:
    """Return the bytes that a running backward pass adds to the kept ones, per token; `moved`: by default as for
    `one_document`."""
    model, parallel = job.model, job.parallel
    received, _ = moved or one_document(job, model.widest)
    arrives = parallel.cp > 1 and not job.keeps_exchanged and "core_attn" not in job.dropped
    prefetched = arrives * job.bytes_per_value * (1 + received) * model.kv_values_per_rank(parallel.tp)
    running = max(
        mlp_backward_bytes(job) + prefetched, attention_backward_bytes(job, moved) - _kept(job, _mlp_tensors(job))
    )
    largest = max(layer_bytes(job, kind) for kind in model.kinds)
    if job.runs_layers_again:
        _, at_once = job.layers_again(job.decoder_layers()[stage])
        running += at_once * largest
    if job.schedule().by_turns:
        running += largest  # of the forward pass that runs by turns
    return running + _moving_bytes(job) + _output_bytes(job) * (stage == parallel.pp - 1)


def _moving_bytes(job: Job) -> float:
    """Return bytes of inputs received before their group runs, and sent outputs of as many micro-batches as stages."""
    if job.parallel.vpp == 1:
        return 0
    sent = job.parallel.pp if job.overlap_transfers else 0
    return (job.schedule().group - job.parallel.pp + sent) * layer_input_bytes(job)


def _output_bytes(job: Job) -> float:
    """Return bytes that the last stage holds for a loss: rows before and after a norm, these gathered, and logits."""
    gathered = job.bytes_per_value * job.model.hidden_size * (job.parallel.sequence_ranks > 1)
    return 2 * layer_input_bytes(job) + gathered + logits_bytes(job) + job.model.depths * depth_bytes(job)
