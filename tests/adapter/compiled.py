"""Upstream's compiled fusions in training: how often lengths that change make torch compile them.

Torch compiles what megatron decorates while it is imported, so pytest does not collect this file by itself:
`test_compiled.py` runs it in another process, with TORCHDYNAMO_DISABLE=0.
"""

from collections import Counter

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import bias_geglu_impl, quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from tests.adapter.training import FULL, MOE, full, train

EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
LOSS = "calculate_logits_max calculate_predicted_logits calculate_cross_entropy_loss calculate_gradients"
ADD = "bias_dropout_add_fused_train"
TRAINED = {
    "swiglu, recomputed": (FULL, "", f"swiglu swiglu_back {ADD}"),
    "experts": (f"{MOE} {EXPERT_BIAS}", "", f"weighted_swiglu weighted_swiglu_back _apply_expert_bias {ADD}"),
    "swiglu with bias, loss": (
        "--bf16 --cross-entropy-loss-fusion --eval-interval 1 --eval-iters 2",
        "--disable-bias-linear",
        f"bias_swiglu bias_swiglu_back {LOSS} {ADD} bias_dropout_add_fused_inference",
    ),
    "gelu with bias": ("--hidden-dropout 0.1", "--disable-bias-linear --swiglu", f"bias_gelu bias_gelu_back {ADD}"),
}

CALLED = {
    "squared relu": (squared_relu, ("values",)),
    "quick gelu": (quick_gelu, ("values",)),
    "geglu": (lambda values: bias_geglu_impl(values, None), ("values",)),
    "geglu with bias": (bias_geglu_impl, ("values", "bias")),
    "experts, quick geglu": (lambda y, w: weighted_bias_quick_geglu_impl(y, None, w), ("values", "weights")),
    "experts, quick geglu with bias": (weighted_bias_quick_geglu_impl, ("values", "bias", "weights")),
    "experts, squared relu": (weighted_squared_relu_impl, ("values", "weights")),
}
"""Fusions that no training here has; some need TransformerEngine, or flags that upstream lacks."""


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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", CALLED)
def test_in_calls(name):
    """Once for the first length and once for all others, that of the hidden size among them."""
    function, arguments = CALLED[name]
    bias = torch.randn(64, requires_grad=True)
    torch.compiler.reset()
    clear_compilation_metrics()
    for length in (40, 64, 2, 32, 128, 1000, 41, 39, 96, 3, 63, 65):
        given = {
            "values": torch.randn(length, 64, requires_grad=True),
            "bias": bias,
            "weights": torch.rand(length, 1, requires_grad=True),
        }
        function(*(given[a] for a in arguments)).sum().backward()
    counts = Counter(m.co_name for m in get_compilation_metrics() if m.co_name)  # the others are backward graphs
    assert counts and set(counts.values()) == {2}, counts
