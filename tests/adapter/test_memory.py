"""What autograd keeps of one layer of upstream's model, against what `simulate.memory` predicts.

The prediction is for layers of TransformerEngine. On a CPU upstream runs its local ones (`--transformer-impl local`,
experts one after the other in `SequentialMLP`), which keep more in the few places that `_local_extra` names. What only
TransformerEngine has cannot be compared: `TEGroupedMLP` with `moe_act`, and `layernorm` recomputed by itself.
"""

import os
import weakref

import pytest
from megatron.core.utils import unwrap_model
from torch.autograd.graph import saved_tensors_hooks

from megatron_wlb.simulate.memory import depth_bytes, layer_bytes, layer_input_bytes
from tests.adapter.training import CP2, FULL, GQA, MODEL, SELECTIVE, TP2, WLB, _train, full, less
from tests.worlds import run_world

SIZES = "--hidden-size 256 --ffn-hidden-size 704 --kv-channels 32 --global-batch-size 1 --train-iters 1".split()
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear".split()
MOE = "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 352"
LATENT = """--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16
--v-head-dim 24 --qk-layernorm --rope-type rope"""
GPT = [flag for flag in MODEL if flag not in LLAMA]
MODELS = {"llama": MODEL, "gpt": GPT, "latent": [*less(MODEL, GQA), *LATENT.split()]}


class _Held:
    """A tensor that autograd has saved; nobody else keeps this."""

    def __init__(self, tensor):
        self.tensor = tensor


def _kept(argv):
    """Bytes that autograd keeps of the first micro-batch at the end of each layer and in all, its rows, and the job."""
    from megatron.training import get_args, training

    from megatron_wlb.adapter import jobs

    setup, ends, measured = training.setup_model_and_optimizer, [], []

    def setup_and_watch(*args, **kwargs):
        result = setup(*args, **kwargs)
        model, held = result[0][0], weakref.WeakSet()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            held.add(saved := _Held(tensor))
            return saved

        def note(*unused):
            storages = [saved.tensor.untyped_storage() for saved in held]
            ends.append(sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in weights}.values()))

        hooks = saved_tensors_hooks(pack, lambda saved: saved.tensor)

        def forward(*args, **kwargs):
            with hooks:
                output = run(*args, **kwargs)
            note()
            measured.append(([*ends], kwargs["packed_seq_params"].wlb.num_rows))
            model.forward = run
            return output

        run, model.forward = model.forward, forward
        for layer in unwrap_model(model).decoder.layers:
            layer.register_forward_hook(note)
        return result

    training.setup_model_and_optimizer = setup_and_watch
    _train(argv, {}, os.devnull, exits=False)
    return *measured[0], jobs.described(get_args()).job()


def _local_extra(job):
    """Bytes per token that upstream's local layers keep and those of TransformerEngine do not."""
    model, w, h = job.model, job.bytes_per_value, job.model.hidden_size
    sequence, tp = job.parallel.sequence_ranks, job.parallel.tp
    # Cosines and sines in the training dtype, for Q and for K; TE's rotation has the angles that all layers share.
    rotary = 0 if model.kv_lora_rank else 4 * w * model.kv_channels
    # torch's RMSNorm keeps its input and what comes of it in fp32, TE's its input.
    normed = 2 * h / sequence
    if model.kv_lora_rank:
        normed += (model.q_lora_rank + model.kv_lora_rank) / sequence
    elif model.qk_layernorm:
        normed += (model.query_size + model.key_size) / tp
    norms = (8 - w) * normed if model.gated_linear_unit else 0
    # Dropout on a CPU keeps its factors in the training dtype, on a GPU one byte.
    dropout = 2 * (w - 1) * h / sequence if job.hidden_dropout else 0
    # The norm before the MLP is not part of it, so that its output stays when the MLP is recomputed.
    mlp_input = w * h / sequence if "mlp" in job.recompute.modules else 0
    return rotary + norms + dropout + mlp_input


def _added(argv, size):
    """Bytes per token that the last of three layers adds, on average over ranks, and the job."""
    ranks = run_world(_kept, size, [*argv, "--num-layers", "3"])
    return sum(ends[2] - ends[1] for ends, _, _ in ranks) / sum(rows for _, rows, _ in ranks), ranks[0][-1]


CASES = [
    ("llama", 1, ""),
    ("llama", 2, f"--bf16 {TP2}"),
    ("llama", 1, f"--bf16 {FULL}"),
    ("llama", 1, f"--bf16 --qk-layernorm {SELECTIVE} core_attn mlp"),
    ("latent", 2, f"--bf16 {TP2}"),
    ("gpt", 1, "--bf16 --hidden-dropout 0.1"),
    ("llama", 2, f"--bf16 {MOE} {TP2} --moe-shared-expert-intermediate-size 352"),
    ("llama", 1, f"--bf16 {MOE} {SELECTIVE} moe"),
    *(full("latent", 1, f"--bf16 {SELECTIVE} {module}") for module in ("core_attn", "mla_up_proj")),
    full("llama", 1, f"--bf16 {MOE} {SELECTIVE} core_attn"),
    full("llama", 2, f"--bf16 {MOE} {TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"),
]


@pytest.mark.parametrize(("model", "size", "flags"), CASES)
def test_autograd_keeps_of_a_layer_what_is_predicted(model, size, flags, dataset):
    """On average over ranks, since experts are not sent equally many tokens."""
    added, job = _added(["pretrain_gpt.py", *MODELS[model], *WLB, *SIZES, *flags.split(), "--data-path", dataset], size)
    predicted = layer_input_bytes(job) if FULL in flags else layer_bytes(job) + _local_extra(job)
    assert predicted == pytest.approx(added, rel=0.02)


@pytest.mark.parametrize("flags", ["", full(f"{SELECTIVE} core_attn")])
def test_autograd_keeps_latents_that_travel(flags, dataset, profile):
    """Predicted as if both ranks saw all keys; one sees three quarters of them."""
    argv = ["pretrain_gpt.py", *MODELS["latent"], *WLB, *SIZES, "--bf16", *CP2.split(), *flags.split()]
    added, job = _added([*argv, *profile(0, 1e-9).split(), "--data-path", dataset], 2)
    assert job.cp_exchange == "latents"
    assert layer_bytes(job) + _local_extra(job) == pytest.approx(added, rel=0.02)


@pytest.mark.parametrize(("size", "flags"), [(2, f"--bf16 {TP2}"), full(1, f"--bf16 {FULL}")])
def test_autograd_keeps_of_an_mtp_layer_what_is_predicted(size, flags, dataset):
    """A second one adds what one keeps. Three norms of its own keep their inputs in fp32 here."""
    argv = ["pretrain_gpt.py", *MODELS["llama"], *WLB, *SIZES, *flags.split(), "--data-path", dataset]
    one, two = (run_world(_kept, size, [*argv, "--mtp-num-layers", str(count)]) for count in (1, 2))
    job = two[0][-1]
    added = sum(b[0][-1] - a[0][-1] for a, b in zip(one, two, strict=True)) / sum(rows for _, rows, _ in two)
    norms = 3 * (8 - job.bytes_per_value) * job.model.hidden_size / job.parallel.sequence_ranks
    extra = 0 if FULL in flags else _local_extra(job) + norms
    assert depth_bytes(job) + extra == pytest.approx(added, rel=0.02)
