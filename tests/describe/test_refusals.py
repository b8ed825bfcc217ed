"""What training with --wlb refuses of Megatron's arguments; no version of Megatron is asked."""

import ast
import inspect
import re
from argparse import Namespace

import pytest

from megatron_wlb import packing
from megatron_wlb.describe import adapt, data, masks, refusals, same
from megatron_wlb.describe.arguments import ARGUMENTS, Refused, flag_of, rows
from megatron_wlb.describe.refusals import check
from megatron_wlb.layers import delta_net, experts, latent, linear, mamba

SERVED = {
    **{"seq_length": 1024, "micro_batch_size": 1, "calculate_per_token_loss": True, "attention_dropout": 0},
    **{f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "expert")},
    **{"context_parallel_size": 1, "untie_embeddings_and_output_weights": True, "swiglu": True},
}
MOE, FLEX = {"num_experts": 4}, {"num_experts": 4, "moe_token_dispatcher_type": "flex"}
LINEAR = {"experimental_attention_variant": "gated_delta_net"}
LATENT = {"multi_latent_attention": True}
VIRTUAL = {"num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm": False}


def test_what_is_served():
    """Other values of what is refused, and what only matters beside something else."""
    check(Namespace(**SERVED))
    for more in (
        {"window_size": (128, 0), "cuda_graph_impl": "none", "dataloader_type": "external", "rerun_mode": "disabled"},
        {"attention_backend": "AttnBackend.flash", "save": "dir", "load": "dir", "eval_micro_batch_size": 1},
        {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "quantile_balancing"},
        MOE | {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": ["aux_loss", "none"]},
        FLEX | {"moe_flex_dispatcher_backend": "deepep"},
        FLEX | {"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": True},
        LATENT | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "position_embedding_type": "rope"},
        VIRTUAL | {"pipeline_model_parallel_size": 4},
        {"hybrid_layer_pattern": "M*|-E", "hidden_size": 4096, "mamba_num_heads": 128, "context_parallel_size": 8},
        LINEAR | {"tensor_model_parallel_size": 4, "context_parallel_size": 4, "sequence_parallel": True},
        {"mtp_num_layers": 1, "defer_embedding_wgrad_compute": True},
    ):
        check(Namespace(**SERVED | more))


def test_refused_if_given_at_all():
    given = [name for name, row in rows(Refused) if row.when is bool]
    assert len(given) > 20
    for name in given:
        with pytest.raises(ValueError, match=f"^--wlb: --{name.replace('_', '-')} .*; (give|leave|use|pre-train|do) "):
            check(Namespace(**SERVED, **{name: [1]}))


ROWS = [
    ({"seq_length": None}, "--seq-length is missing; give "),
    ({"multiple_validation_sets": True}, "upstream wants --full-validation with it; give both"),
    ({"attention_dropout": 0.1}, "--attention-dropout is 0.1; .*give --attention-dropout 0"),
    (MOE | {"moe_router_load_balancing_type": ["none", "quantile_balancing"]}, "divide by the experts"),
    (MOE | {"moe_router_load_balancing_type": "quantile_balancing"}, "divide by the experts"),
    (MOE | {"mlp_chunks_for_training": 2}, "--mlp-chunks-for-training routes .*leave it out"),
    (
        {"moe_flex_dispatcher_backend": "hybridep", "moe_expert_rank_capacity_factor": 1.5},
        "--moe-expert-rank-capacity-factor reads .*leave it out",
    ),
    (VIRTUAL | {"pipeline_model_parallel_size": 2}, "leave --no-overlap-p2p-communication out"),
    ({"attention_backend": "AttnBackend.local"}, "--attention-backend AttnBackend.local runs no packed"),
    ({"window_size": (128, 128)}, r"--window-size is \(128, 128\); .*give LEFT,0"),
    ({"window_size": "128,10"}, "--window-size is 128,10; .*give LEFT,0"),
    (LATENT | {"position_embedding_type": "yarn"}, "give rope, and --rope-type yarn"),
    (LATENT | {"tensor_model_parallel_size": 2}, "give --sequence-parallel"),
    ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope is not supported; give rope, yarn"),
    ({"position_embedding_type": "relative"}, "--position-embedding-type relative is not supported"),
    ({"transformer_impl": "local", "layernorm_zero_centered_gamma": True}, "leave one of them out"),
    ({"experimental_attention_variant": "dsa"}, "-variant dsa is not supported; give gated_delta_net"),
    (LINEAR | {"linear_num_key_heads": 6, "context_parallel_size": 4}, "--linear-num-key-heads .*give fewer ranks"),
    (LINEAR | {"context_parallel_size": 32}, "--linear-num-key-heads .*give fewer ranks"),
    ({"linear_cp_mode": "chunkwise"}, "--linear-cp-mode chunkwise .*give headwise"),
    (LINEAR | {"fp8": "hybrid"}, "FP8 and FP4 are untested .*out"),
    (LINEAR | {"deterministic_mode": True}, "--deterministic-mode has no gated delta nets .*leave it out"),
    (LINEAR | {"swiglu": False}, "no activation but SiLU.*; give --swiglu"),
    ({"hybrid_layer_pattern": "MG*-", "swiglu": False}, "no activation but SiLU.*; give --swiglu"),
    (LINEAR | {"mtp_num_layers": 1}, "--mtp-num-layers with .*leave it out"),
    ({"hybrid_layer_pattern": "M*", "mtp_num_layers": 1}, "--mtp-num-layers with .*leave it out"),
    (LINEAR | {"tensor_model_parallel_size": 2}, "gradients of norms .*give --sequence-parallel"),
    ({"hybrid_layer_pattern": "MG", "tensor_model_parallel_size": 2}, "gradients of norms .*--sequence-parallel"),
    ({"hybrid_layer_pattern": "M", "mamba_num_heads": 6, "context_parallel_size": 4}, "--mamba-num-heads .*fewer"),
    ({"hybrid_layer_pattern": "M", "hidden_size": 96, "context_parallel_size": 2}, "--mamba-num-heads .*fewer"),
    ({"hybrid_layer_pattern": "M+-"}, r"--hybrid-layer-pattern M\+- has latent .*give one of M, G"),
    ({"hybrid_layer_pattern": "M*-/*"}, "or MTP layers .*give one of M, G"),
    ({"hybrid_layer_pattern": "M*"} | LATENT, "--multi-latent-attention is untested; leave one"),
    ({"hybrid_layer_pattern": "M*", "use_mamba_mem_eff_path": False}, "--disable-mamba-mem-eff-path .*leave it"),
    ({"log_interval": 0}, "--log-interval is 0, .*; give 1 or more"),
    ({"rerun_mode": "report_stats"}, "give validate_results or disabled"),
    ({"wlb_sft_skip": ("long",)}, "--wlb-sft-skip has no effect without --sft; give both"),
    ({"mock_data": True, "sft": True}, "--wlb has no mock conversations; leave one"),
    ({"wlb_mock_lengths": "F2"}, "--wlb-mock-lengths has no effect without --mock-data; give both"),
    ({"save": "msc://bucket/run", "wlb_packing": "paper"}, "to object storage are not supported with delay"),
    ({"load": "msc://bucket/run", "wlb_packing": "adaptive:20"}, "to object storage are not supported with delay"),
    ({"phase_transition_iterations": [5], "wlb_packing": "paper"}, "--phase-transition-iterations begins with other"),
    ({"sft": True, "wlb_packing": "paper"}, "rows of --sft fill them in part; give adaptive or megatron"),
]
"""Arguments that a row of the table or a rule refuses, and what is said; `SERVED` are those beside them."""


@pytest.mark.parametrize(("arguments", "message"), ROWS)
def test_refused_for_its_value_or_beside_another(arguments, message):
    with pytest.raises(ValueError, match=f"^--wlb: .*{message}"):
        check(Namespace(**SERVED | arguments))


def test_a_value_is_refused_by_itself_or_beside_others():
    assert refusals.refuses("attention_dropout", 0.1) and refusals.refuses("attention_dropout", "some")
    assert refusals.refuses("seq_length", None, seq_length=64) and not refusals.refuses("seq_length", 64)
    sharded = {"name": "tensor_model_parallel_size", "value": 2}
    assert refusals.refuses(**sharded, **LATENT) and not refusals.refuses(**sharded)


def test_every_argument_of_a_refusal_counts():
    """With one less, the same is not said."""
    for arguments, message in ROWS:
        for name in arguments:
            fewer = {other: value for other, value in arguments.items() if other != name}
            said = refusals.refusals(Namespace(**SERVED | fewer))
            assert not [each for each in said if re.search(message, each)], (arguments, name)


def test_every_row_and_every_rule_refuses_once_and_serves_once():
    said = [*refusals.refusals(Namespace(**SERVED))]
    assert not said
    for arguments, _ in ROWS:
        said += refusals.refusals(Namespace(**SERVED | arguments))
    valued = [(flag_of(name), row) for name, row in rows(Refused) if row.when is not bool]
    for flag, row in valued:
        assert any(each.startswith(flag) and each.endswith(row.reason.rpartition("; ")[2]) for each in said), flag
    assert not [message for message in refusals.RULES if message not in said]


@pytest.mark.parametrize(
    "module", [adapt, data, masks, packing, refusals, same, delta_net, experts, latent, linear, mamba]
)
def test_rules_name_arguments_of_the_table(module):
    tree = ast.parse(inspect.getsource(module))
    named = {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in ("a", "args")
    }
    assert named
    assert not [name for name in named if name not in ARGUMENTS and not name.startswith("wlb_")]
