"""Upstream's compiled fusions in training: how often lengths that change make torch compile them.

Torch compiles what megatron decorates while it is imported, so pytest does not collect this file by itself:
`test_compiled.py` runs it in another process, with TORCHDYNAMO_DISABLE=0.
"""

import pytest
import torch

from tests.adapter.training import EXPERT_BIAS, FULL, MOE, full, train

LOSS = "calculate_logits_max calculate_predicted_logits calculate_cross_entropy_loss calculate_gradients"
ADD = "bias_dropout_add_fused_train"
TRAINED = {
    "swiglu and experts, recomputed": (
        f"{FULL} {MOE} --moe-layer-freq [0,1]*2 {EXPERT_BIAS}",
        "",
        f"swiglu swiglu_back weighted_swiglu weighted_swiglu_back _apply_expert_bias {ADD}",
    ),
    "swiglu with bias, loss": (
        "--bf16 --cross-entropy-loss-fusion --eval-interval 1 --eval-iters 2",
        "--disable-bias-linear",
        f"bias_swiglu bias_swiglu_back {LOSS} {ADD} bias_dropout_add_fused_inference",
    ),
    "gelu with bias": ("--hidden-dropout 0.1", "--disable-bias-linear --swiglu", f"bias_gelu bias_gelu_back {ADD}"),
}


@pytest.fixture(params=["eager", full("inductor")])
def backend(request):
    """Dynamo decides what is compiled, whatever compiles it; only the guards of inductor need inductor."""
    with torch.compiler.set_stance("default", force_backend=request.param):
        yield


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("model", TRAINED)
def test_in_training(model, dataset):
    """Original packing has micro-batches of one length; for what it compiles, changing lengths compile one more each.

    One length, too, compiles a function with and without gradients, and for experts without tokens or with one.
    """
    flags, without, functions = TRAINED[model]
    one, changing = (
        train(1, dataset, *flags.split(), "--wlb-packing", packing, without=without)["compiled"]
        for packing in ("megatron", "paper")
    )
    assert set(functions.split()) <= one.keys() == changing.keys()
    assert all(changing[name] <= 2 * one[name] for name in one), (one, changing)
