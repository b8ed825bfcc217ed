"""What Megatron's arguments mean for a job, by hand; upstream's own parser is asked in `tests/adapter`."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import PlanSettings, RunSettings
from megatron_wlb.describe.megatron import (
    Description,
    bytes_of,
    graphs_of,
    of_megatron,
    parallel_of,
    recompute_of,
    row_multiple,
)
from megatron_wlb.describe.shape import model_of
from megatron_wlb.job import Parallel, Recompute, Sharding
from megatron_wlb.model import MODELS, ModelShape
from megatron_wlb.packing import policy_of
from megatron_wlb.pipeline.split import Split
from megatron_wlb.simulate.memory import largest_max_tokens

H, HEADS, FFN = 64, 8, 256
SIZES = {"num_layers": 12, "hidden_size": H, "num_attention_heads": HEADS}
DENSE = ModelShape(
    **SIZES, ffn_hidden_size=FFN, num_query_groups=HEADS, padded_vocab_size=0, kv_channels=8, gated_linear_unit=False
)
JOB = SIZES | {"seq_length": 1024, "global_batch_size": 8}


def arguments(**stated):
    return MegatronArguments.of(SIZES | stated)


def description(stated, **changes):
    """A run by arguments, with the defaults of all settings."""
    settings = {"packing": policy_of(None), "sharding": Sharding(), "settings": PlanSettings()}
    return Description(arguments=MegatronArguments.of(stated), **settings | {"run_settings": RunSettings()} | changes)


def job_of(stated, profile="flops", **given):
    return description(stated, profile=profile).job(**given)


PRECISION_AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, (4, 12)),
        ({"grad_reduce_in_bf16": True}, (2, 12)),
        (PRECISION_AWARE, (4, 2 + 4 + 4)),  # the 16 bits of fp32 that bf16 weights lack
        (PRECISION_AWARE | {"main_params_dtype": "fp16"}, (4, 2 + 4 + 4)),
        (PRECISION_AWARE | {"fp8": "hybrid"}, (4, 2 + 4 + 4)),
        (PRECISION_AWARE | {"fp8": "hybrid", "fp8_recipe": "blockwise"}, (4, 4 + 4 + 4)),
        (PRECISION_AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, (4, 2 + 2 + 1)),
        (PRECISION_AWARE | {"exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.uint8"}, (4, 2 + 2 + 1)),
        (PRECISION_AWARE | {"main_grads_dtype": "bf16"}, (2, 2 + 4 + 4)),
        (PRECISION_AWARE | {"main_grads_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": True}, (4, 2 + 4 + 4)),
        (PRECISION_AWARE | {"optimizer_cpu_offload": True, "exp_avg_dtype": "bf16"}, (4, 0)),
        (PRECISION_AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, (4, 9)),
    ],
)
def test_weights_gradients_and_states_have_the_dtypes_of_arguments(stated, expected):
    assert bytes_of(arguments(**stated)) == expected


def test_a_dtype_that_megatron_does_not_have_is_refused():
    with pytest.raises(ValueError, match="int4"):
        arguments(exp_avg_dtype="int4")


@pytest.mark.parametrize(
    ("stated", "changes"),
    [
        ({}, {}),
        ({"swiglu": True}, {"ffn_hidden_size": 128, "gated_linear_unit": True}),  # 64 * 8 / 3 in units of 64
        ({"swiglu": True, "hidden_size": 16},
         {"hidden_size": 16, "kv_channels": 2, "ffn_hidden_size": 64, "gated_linear_unit": True}),
        ({"attention_output_gate": True}, {"output_gate": True}),
        ({"kv_channels": 16, "num_query_groups": 2}, {"kv_channels": 16}),
        ({"group_query_attention": True, "num_query_groups": 2}, {"num_query_groups": 2}),
        ({"group_query_attention": True}, {"num_query_groups": 1}),
        ({"vocab_size": 100, "tensor_model_parallel_size": 4}, {"padded_vocab_size": 512}),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 10}, {"padded_vocab_size": 100}),
        ({"vocab_size": 100, "padded_vocab_size": 300}, {"padded_vocab_size": 300}),
        ({"qk_layernorm": True, "mtp_num_layers": 1}, {"qk_layernorm": True, "mtp_num_layers": 1}),
        ({"num_experts": 1, "moe_router_topk": 3, "moe_ffn_hidden_size": 9}, {}),  # as dense
        ({"num_experts": 8}, {"ffn_hidden_size": 2 * FFN, "moe_router_topk": 2, "num_experts": 8}),
        (
            {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
            {"ffn_hidden_size": 2 * FFN, "moe_router_topk": 2, "num_experts": 8,
             "moe_router_num_groups": 4, "moe_router_group_topk": 2},
        ),
        (
            {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 100,
             "moe_shared_expert_intermediate_size": 50},
            {"ffn_hidden_size": 350, "moe_router_topk": 3, "num_experts": 8, "shared_ffn_hidden_size": 50},
        ),
        (
            {"num_experts": 8, "moe_ffn_hidden_size": 100, "moe_layer_freq": [0, 0] + [1] * 10,
             "window_size": (64, 0), "window_attn_skip_freq": 6},
            {"ffn_hidden_size": 200, "dense_ffn_hidden_size": FFN, "moe_router_topk": 2, "num_experts": 8,
             "window": 64, "pattern": "W-W-WWW*WWWWW*"},
        ),
        (
            {"num_experts": 8, "moe_layer_freq": "3"},
            {"ffn_hidden_size": 2 * FFN, "dense_ffn_hidden_size": FFN, "moe_router_topk": 2, "num_experts": 8,
             "pattern": "**-*-"},
        ),
        ({"moe_layer_freq": "([0]*3+[1]*9)"}, {}),  # without experts, of no use
        (
            {"multi_latent_attention": True, "q_lora_rank": 48, "kv_lora_rank": 64, "qk_head_dim": 24,
             "qk_pos_emb_head_dim": 8, "v_head_dim": 96},
            {"kv_channels": 32, "v_head_dim": 96, "q_lora_rank": 48, "kv_lora_rank": 64, "qk_pos_emb_head_dim": 8},
        ),
        ({"q_lora_rank": 48, "kv_lora_rank": 64}, {}),  # a log has them always
    ],
)  # fmt: skip
def test_models(stated, changes):
    assert model_of(arguments(**stated)) == replace(DENSE, **changes)


def test_models_with_a_name_have_dense_layers_unless_others_are_given():
    every = MegatronArguments(moe_layer_freq="1")
    assert model_of(every, "deepseek-v3") == replace(MODELS["deepseek-v3"], pattern="*")
    assert model_of(MegatronArguments(num_layers=4), "deepseek-v3").layer_kinds == ["*-"] * 3 + ["*"]


def test_sizes_among_the_arguments_change_a_known_model():
    sizes = {"num_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 24}
    sizes |= {"ffn_hidden_size": 48, "qk_layernorm": True}
    given = sizes | {"swiglu": False, "vocab_size": 300, "tensor_model_parallel_size": 2}
    changed = replace(MODELS["llama3-8b"], **sizes, gated_linear_unit=False, padded_vocab_size=512)
    assert model_of(MegatronArguments.of(given), "llama3-8b") == changed
    for name, model in MODELS.items():
        assert model_of(MegatronArguments(), name) == model
        assert model_of(MegatronArguments(padded_vocab_size=300), name) == replace(model, padded_vocab_size=300)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {}),
        ({"world_size": 6}, {"dp": 6}),
        ({"world_size": "24", "tensor_model_parallel_size": 2, "context_parallel_size": "3",
          "pipeline_model_parallel_size": 4}, {"tp": 2, "cp": 3, "pp": 4}),
        ({"world_size": 8, "num_experts": 8, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
         {"dp": 8, "ep": 4, "etp": 2}),
        ({"world_size": 4, "num_experts": None, "expert_tensor_parallel_size": 1}, {"dp": 4}),
        ({"sequence_parallel": True, "use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2},
         {"sequence_parallel": True, "stages_before_dp": True, "pp": 2}),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3,
          "microbatch_group_size_per_vp_stage": 4}, {"pp": 2, "vpp": 3, "group_size": 4}),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}, {"pp": 2, "vpp": 3}),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2}, {"pp": 2, "vpp": 3}),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_layers": 10,
          "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
         {"pp": 2, "vpp": 6, "split": Split(
             account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)}),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|ttt|ttt|tttL"},
         {"pp": 2, "vpp": 2, "split": Split(pipeline_model_parallel_layout="Ettt|ttt|ttt|tttL")}),
    ],
)  # fmt: skip
def test_layouts(stated, expected):
    assert parallel_of(arguments(**stated)) == Parallel(**{"sequence_parallel": False} | expected)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"hidden_size": 66}, "^--num-attention-heads 8 does not divide --hidden-size 66; change one, or give --kv"),
        (dict.fromkeys(SIZES), "^no --num-layers, --hidden-size, --num-attention-heads: give the sizes of the model"),
        ({"group_query_attention": True, "num_query_groups": 3}, "is 3, which does not divide 8 attention heads"),
        ({"world_size": 6, "tensor_model_parallel_size": 4}, "^6 GPUs are no multiple of .* 4 x 1 x 1 = 4; change"),
        ({"world_size": 2, "expert_model_parallel_size": 2}, "^--expert-model-parallel-size without --num-experts;"),
        ({"num_experts": 4, "expert_model_parallel_size": 4, "world_size": 2}, "4 expert-parallel x 1 .* not divide"),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4}, "4 x 2 .* divide 12 layers"),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
          "decoder_last_pipeline_num_layers": 0}, "first or last stage; give --num-virtual-stages-per-pipeline-rank"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|t|tL"}, "3 virtual stages, no mult"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Em|tL"}, r"Em\|tL is not E, then t"),
        ({"seq_length": None}, "^no --seq-length; give the context window"),
        ({"global_batch_size": None}, "^no --global-batch-size; give the context windows"),
        ({"seq_length": 1026, "context_parallel_size": 4}, "1026, which 4 context-parallel .* give a multiple of 8"),
        ({"world_size": 3}, "8 micro-batches per step cannot be shared by 3 data-parallel ranks"),
        ({"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 3, "world_size": 16},
         "cannot be interleaved over 4 pipeline stages in groups of 4"),
        ({"num_layers": "many"}, "^--num-layers is 'many'; it must be int.*; give another value$"),
        ({"num_layers": 0}, "^--num-layers is 0; it must be int >= 1; give another value$"),
        ({"seed": "-1"}, "^--seed is '-1'; it must be int >= 0"),
        ({"world_size": 10**9}, "^--num-gpus is 1000000000; it must be int <= 131072"),
        ({"recompute_granularity": "x" * 99}, "^--recompute-granularity is .x*[.]{3}; .* one of full, selective;"),
        ({"overlap_p2p_comm": "maybe"}, "^--no-overlap-p2p-communication is 'maybe'; it must be bool"),
        ({"cpu_offloading_num_layers": 8, "pipeline_model_parallel_size": 2}, "neither with pipeline stages"),
        ({"window_size": "64"}, "--window-size is 64; give LEFT,0"),
        ({"window_size": (1 << 27, 0)}, "LEFT from -1 .no window. to 67108864"),
        ({"window_size": (64, 0), "window_attn_skip_freq": "0"}, "--window-attn-skip-freq is 0; give N"),
        ({"window_size": (64, 0), "window_attn_skip_freq": "[1]*x"}, r"--window-attn-skip-freq is \[1\]\*x"),
        ({"window_size": (64, 0), "window_attn_skip_freq": "[2]*12"}, r"--window-attn-skip-freq is \[2\]\*12"),
        ({"window_size": (64, 0), "window_attn_skip_freq": [1, 0]}, r"is \[1, 0\]; .* for each of 12 layers"),
        ({"hybrid_layer_pattern": "*D"}, "pattern has 'D', whose cost is not known; give letters of"),
        ({"experimental_attention_variant": "gated_delta_net"}, "--linear-attention-freq is missing; give N"),
        ({"hybrid_layer_pattern": "MG", "linear_num_value_heads": 24}, "-key-heads 16 does not divide .* 24;"),
        ({"hybrid_layer_pattern": "M*", "mamba_num_heads": 12}, "-num-groups 8 does not divide 12 heads of Mamba"),
        ({"hybrid_layer_pattern": "M*", "mamba_head_dim": 1 << 20}, "does not divide 0 heads of Mamba layers"),
        ({"hybrid_layer_pattern": "*E"}, "--hybrid-layer-pattern has E without --num-experts"),
        ({"num_experts": 8, "moe_router_group_topk": 2}, "--moe-router-group-topk. is 2 of 1 groups"),
        ({"window_size": (64, 0), "window_attn_skip_freq": "[1" + "]" * 9}, "--window-attn-skip-freq is"),
        ({"num_experts": 8, "moe_layer_freq": "([0]+[1]*10)"}, "--moe-layer-freq is .* for each of 12 layers"),
    ],
)  # fmt: skip
def test_contradictions(stated, message):
    stated = {name: value for name, value in (JOB | stated).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        job_of(stated)


def test_values_may_be_text_and_what_is_unknown_does_not_matter():
    found = arguments(split=0.5, fp8=None, lr="3e-4", seed="7", tp_comm_overlap="True", data_path=["0.5", "a"])
    assert found == MegatronArguments(**SIZES, split="0.5", seed=7, tp_comm_overlap=True, data_path=("0.5", "a"))
    for pattern, layout in (("M*-", None), ("M*|-", "Ett|tL")):
        found = MegatronArguments.of(
            {"hybrid_layer_pattern": pattern, "num_layers": 99, "recompute_modules": "mlp moe"}
        )
        expected = {"num_layers": 3, "pipeline_model_parallel_layout": layout, "recompute_modules": ("mlp", "moe")}
        assert found == MegatronArguments(hybrid_layer_pattern=pattern, **expected)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, Recompute()),
        ({"recompute_activations": True}, Recompute(granularity="selective", modules=("core_attn",))),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm", "mlp"]},
         Recompute(granularity="selective", modules=("layernorm", "mlp"))),
        ({"recompute_activations": True, "recompute_granularity": "full", "recompute_method": "block",
          "recompute_num_layers": 2}, Recompute(granularity="full", method="block", num_layers=2)),
    ],
)  # fmt: skip
def test_recomputation(stated, expected):
    assert recompute_of(arguments(**stated)) == expected


@pytest.mark.parametrize(
    ("numbers", "multiple"),
    [
        ((None, None, None), 1),
        ((None, "mxfp8", None), 1),
        (("hybrid", None, None), 16),
        (("hybrid", "mxfp8", None), 32),
        ((None, None, "e2m1"), 128),
    ],
)
def test_micro_batches_are_aligned_for_kernels_and_ranks(numbers, multiple):
    assert row_multiple(*numbers) == multiple
    stated = JOB | dict(zip(("fp8", "fp8_recipe", "fp4"), numbers, strict=True))
    stated |= {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    job = job_of(stated)
    assert job.unit_tokens == 8 * multiple


@pytest.mark.parametrize(
    ("stated", "precision"),
    [
        ({"fp8_recipe": "mxfp8"}, "bf16"),
        ({"fp8": "hybrid"}, "delayed"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"fp4": "e2m1", "fp8": "hybrid"}, "nvfp4"),
    ],
)
def test_products_have_the_precision_of_arguments(stated, precision):
    assert job_of(JOB | stated).precision == precision


def test_what_the_caller_knows_takes_precedence():
    stated = JOB | {"hidden_dropout": 0, "overlap_p2p_comm": False, "recompute_activations": True}
    job = job_of(stated, model=MODELS["llama2-7b"], global_batch_size=2, reorder=False)
    assert (job.model, job.global_batch_size, job.reorder) == (MODELS["llama2-7b"], 2, False)
    assert (job.hidden_dropout, job.overlap_transfers, job.recompute.granularity) == (False, True, "selective")
    stages = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    assert not job_of(stated | stages).overlap_transfers
    offloading = job_of(JOB | {"cpu_offloading_num_layers": 3})
    assert (offloading.offloaded_layers, offloading.hidden_dropout) == (3, True)


def test_a_description_counts_before_its_arguments():
    """A known model, whose layers virtual stages divide, a budget, which settings do not name, and recomputation."""
    stated = {"seq_length": 1024, "recompute_activations": True, "pipeline_model_parallel_size": 4}
    given = description(
        stated | {"num_layers_per_virtual_pipeline_stage": 2, "global_batch_size": 8, "sequence_parallel": True},
        **{"model": "llama2-7b", "recompute": Recompute(), "bytes_per_value": 4, "budget": 2.0**36},
        settings=PlanSettings(max_tokens="auto"),
    )
    job = given.job()
    assert (job.model, job.recompute, job.bytes_per_value) == (MODELS["llama2-7b"], Recompute(), 4)
    assert job.parallel.vpp == 4 and job.max_tokens == largest_max_tokens(job, 2.0**36) > 2048
    free = given.without_memory()
    assert free == replace(given, budget=None, settings=PlanSettings()) and free.job().max_tokens == 1280
    asked = replace(given, settings=PlanSettings(max_tokens=2048, memory_budget=64.0))
    assert asked.without_memory().settings == PlanSettings(max_tokens=2048)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 2 + 4 + 12),
        ({"use_distributed_optimizer": True}, 2 + 4 + 12 / 2),
        ({"grad_reduce_in_bf16": True}, 2 + 2 + 12),
        ({"optimizer": "sgd"}, None),
        ({"num_experts": 8, "model": "llama2-7b"}, 2 + 4 + 12),
        ({"hybrid_layer_pattern": "*-" * 6, "num_layers": None}, None),
    ],
)
def test_memory_for_activations_is_what_the_fullest_gpu_leaves(changes, size):
    """The last of two stages, on two data-parallel ranks: its layers and the output layer."""
    layout = {"pipeline_model_parallel_size": 2, "world_size": 4, "vocab_size": 1 << 17}
    layout |= {"untie_embeddings_and_output_weights": True, "decoder_first_pipeline_num_layers": 4}
    changes = dict(changes)
    given = description({name: value for name, value in (JOB | layout | changes).items() if value is not None})
    job = given.job()
    if size is None:
        assert given.held_bytes(job) is given.budget_bytes(job) is None
        return
    if changes.pop("model", None):  # whose experts are not all known
        mixture = replace(job, model=replace(job.model, moe_router_topk=2, num_experts=0))
        assert given.held_bytes(mixture) is None
        return
    held = size * (8 * job.model.layer_weights + job.model.vocabulary_weights)
    assert given.held_bytes(job) == held
    for gib, of in ((None, job.profile.memory_gib), (24.0, 24.0)):
        assert given.budget_bytes(job, gib) == pytest.approx(0.9 * of * 2**30 - held)


def test_megatron_alone_has_the_features_of_its_arguments():
    stated = JOB | {"num_experts": 4, "swiglu": True, "overlap_moe_expert_parallel_comm": True}
    stated |= {"moe_token_dispatcher_type": "allgather", "fp8_dot_product_attention": True, "cuda_graph_impl": "local"}
    stated |= {"tp_comm_overlap": True, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    stated |= {"recompute_activations": True}
    job, a = job_of(stated, recompute=Recompute()), MegatronArguments.of(stated)
    found = {"moe_dispatcher": "allgather", "fp8_attention": True, "cuda_graphs": ("full",), "tp_overlap": 0.75}
    found |= {"overlaps_experts": True, "recompute": Recompute(granularity="selective", modules=("core_attn",))}
    assert of_megatron(a, job) == found
    staged = replace(job, overlaps_experts=False, parallel=replace(job.parallel, pp=2))
    for vpp, overlaps in ((1, False), (3, True)):
        stages = replace(staged, parallel=replace(staged.parallel, vpp=vpp))
        assert of_megatron(a, stages)["overlaps_experts"] is overlaps
    dense = replace(job, model=DENSE, overlaps_experts=False)
    assert of_megatron(a, dense)["moe_dispatcher"] == "alltoall"


@pytest.mark.parametrize(
    ("stated", "graphs"),
    [
        ({"cuda_graph_modules": ["attn"]}, ()),
        ({"cuda_graph_impl": "none", "cuda_graph_modules": ["attn"]}, ()),
        ({"cuda_graph_impl": "local"}, ("full",)),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe", "attn", "moe"]}, ("attn", "moe")),
        ({"enable_cuda_graph": True, "cuda_graph_scope": ["attn"]}, ("attn",)),
        ({"external_cuda_graph": True, "cuda_graph_scope": ["attn", "full"]}, ("full",)),
        ({"enable_cuda_graph": True, "cuda_graph_scope": ["full_iteration"]}, ("full",)),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]}, ("full",)),
    ],
)
def test_graphs_are_of_modules_or_of_all(stated, graphs):
    assert graphs_of(arguments(**stated)) == graphs


def test_experts_overlap_by_the_flag_but_in_hybrid_models():
    stated = JOB | {"overlap_moe_expert_parallel_comm": True}
    assert job_of(stated).schedule().by_turns
    assert not job_of(JOB).overlaps_experts
    assert not job_of(stated | {"hybrid_layer_pattern": "*" * 12}).overlaps_experts


@pytest.mark.parametrize(
    ("skip", "kinds"),
    [
        (None, "WWWWWWW"),
        (2, "W*W*W*W"),
        ("3", "WW*WW*W"),
        ([0, 0, 0, 1, 1, 1, 1], "***WWWW"),
        ("([1]*2+[0])*3", "WW*WW*W"),
    ],
)
def test_layers_have_the_windows_that_megatron_gives_them(skip, kinds):
    a = MegatronArguments.of(JOB | {"num_layers": 7, "window_size": "64,0", "window_attn_skip_freq": skip})
    model = model_of(a)
    assert model.layer_kinds == list(kinds)
    assert model.pairs_beyond(np.array([65, 75])).tolist() == [0, 10 * 10 * kinds.count("W") // 7]
    assert set(model.windows) == ({64} if skip is None else {64, None})
    assert model_of(MegatronArguments.of(JOB | {"window_size": [-1, 0]})) == model_of(MegatronArguments.of(JOB))


PUBLISHED = {
    "Nemotron-H 8B": (
        {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 21504}
        | {"hybrid_layer_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-|M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "vocab_size": 131_072}
        | {"pipeline_model_parallel_size": 2},
        ("M", "-", "*"),
        465_000,
    ),
    "Qwen3-Next 80B-A3B": (
        {"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 2, "kv_channels": 256}
        | {"swiglu": True, "num_experts": 512, "moe_router_topk": 10, "moe_ffn_hidden_size": 512}
        | {"moe_shared_expert_intermediate_size": 512, "attention_output_gate": True, "vocab_size": 151_936}
        | {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4},
        ("G", "*"),
        73_000,
    ),
}


def test_a_hybrid_model_may_have_layers_of_all_kinds():
    stated = SIZES | {"hybrid_layer_pattern": "MG|*-E", "pipeline_model_parallel_size": 2, "ffn_hidden_size": 100}
    stated |= {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "mamba_num_groups": 2}
    given = job_of(JOB | stated, "h100-fa2")
    model = given.model
    assert model.kinds == ("M", "G", "*", "-", "E") and model.attention_layers == 1
    assert (model.mamba.inner, model.delta_net.inner) == (2 * H, 32 * 128)
    assert [model.weights_of(kind) for kind in "-E"] == [2 * 100 * H, 2 * 2 * 40 * H]
    assert given.layers_by_kind().sum(axis=(1, 2)).tolist() == [1] * 5 and given.crossover_tokens > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_crossover_of_linear_layers_is_that_of_published_shapes(name):
    """By FLOPs, counted by hand to a thousand; in Nemotron-H 4 of 52 layers have attention, in Qwen3-Next 12 of 48."""
    stated, kinds, crossover = PUBLISHED[name]
    a = MegatronArguments.of(stated | {"group_query_attention": True})
    model = model_of(a)
    assert (model.kinds, round(model.crossover_tokens, -3)) == (kinds, crossover)
    assert model.attention_layers == {"M": 4, "G": 12}[kinds[0]]
    if model.hybrid:
        assert parallel_of(a).split.layers(model.num_layers, 2, 1).ravel().tolist() == [24, 28]


@pytest.mark.parametrize(
    ("stated", "rows", "overlap", "alone"),
    [
        ({"seq_length": 1 << 17, "context_parallel_size": 2}, 16384, 0.875, 0.875),
        ({"seq_length": 22_528, "context_parallel_size": 4, "fp8": "hybrid"}, 5120, 0.875, 0.875),  # a window's rows
        ({"seq_length": 512, "fp8": "hybrid"}, 0, 0, 0.875),  # less than the smallest tiles have
        ({"sequence_parallel": False}, 0, 0, 0.875),
        ({"tp_comm_overlap": False}, 0, 0, 0),
        ({"multi_latent_attention": True}, 0, 0, 0.875),
        ({"use_transformer_engine_op_fuser": True}, 0, 0, 0.875),
    ],
)
def test_layers_with_user_buffers_run_in_tiles(stated, rows, overlap, alone):
    layout = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "tp_comm_overlap": True}
    stated = JOB | layout | {"swiglu": True} | stated
    job = job_of(stated)
    assert (job.tp_tile_rows, job.tp_overlap) == (rows, overlap)
    assert of_megatron(MegatronArguments.of(stated), job)["tp_overlap"] == alone
