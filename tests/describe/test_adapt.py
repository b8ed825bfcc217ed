"""What `--wlb` sets and switches off, so that it is all one adds; no version of Megatron is asked."""

import re
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

from megatron_wlb.describe.adapt import adapt, switches_off
from megatron_wlb.describe.arguments import Off, Set, rows
from megatron_wlb.describe.refusals import check
from megatron_wlb.layers.experts import dispatcher_of

USUAL = {
    **{"seq_length": 1024, "micro_batch_size": 1, "calculate_per_token_loss": True, "attention_dropout": 0},
    **{f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "expert")},
    **{"context_parallel_size": 1, "global_batch_size": 8, "world_size": 4, "wlb_strict": False},
    **{"dataloader_type": None, "softmax_type": "vanilla"},
}
MOE, TP2 = {"num_experts": 4}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
HYBRIDEP = MOE | {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
ON, OFF = (False, True), (True, False)
EXPERTS_OVERLAP = {"overlap_moe_expert_parallel_comm": OFF, "delay_wgrad_compute": OFF}

SET = [
    ({"micro_batch_size": (4, 1)}, {}, "micro-batch-size 1 instead of 4: a mic"),
    ({"eval_micro_batch_size": (4, None)}, {}, "sets no --eval-micro-batch-size: a"),
    ({"calculate_per_token_loss": ON}, {}, "--calculate-per-token-loss: targets"),
    ({"ddp_average_in_collective": OFF}, {}, "--ddp-average-in-collective: grad"),
    ({"attention_dropout": (0.1, 0.0)}, {}, "--attention-dropout 0.0 instead of 0.1: packed"),
    ({"dataloader_type": ("cyclic", "external")}, {}, "--dataloader-type external instead of cyclic"),
    ({"rampup_batch_size": (["2", "2", "9"], None)}, {}, "sets no --rampup-batch-size: meg"),
    ({"apply_rope_fusion": OFF}, {"multi_latent_attention": True}, "--no-rope-fusion: the fused kernel"),
    ({"moe_token_dispatcher_type": ("allgather", "alltoall")}, MOE, "alltoall instead of allgather: allgather needs"),
    ({"moe_hybridep_pad_uneven_dispatch_inputs": ON}, HYBRIDEP, "-pad-uneven-dispatch-inputs: hybridep"),
    ({"tp_comm_overlap": OFF}, {"use_transformer_engine_op_fuser": True}, "--tp-comm-overlap: there is nothing"),
    ({"ckpt_format": ("fsdp_dtensor", "torch_dist")}, {}, "--ckpt-format torch_dist instead of fsdp"),
]
PRICED = [
    ({"cuda_graph_impl": ("local", "none"), "cuda_graph_modules": (["attn"], []), "external_cuda_graph": OFF}
     | dict.fromkeys(("cuda_graph_scope", "inference_cuda_graph_scope", "cuda_graph_scope_deprecated"), (["x"], None)),
     {}, "-impl local: .*; the host"),
    ({"enable_cuda_graph": OFF}, {}, "--enable-cuda-graph: "),
    ({"moe_pad_expert_input_to_capacity": OFF}, {}, "--moe-pad-expert-input-to-capacity: .* vary in length$"),
    ({"tp_comm_overlap": OFF}, TP2 | {"use_transformer_engine_op_fuser": True}, "hidden$"),
    (EXPERTS_OVERLAP, {"hybrid_layer_pattern": "ME*E"}, "hybrid models have .*no longer hidden$"),
    (EXPERTS_OVERLAP, {"moe_ncclep_zero_copy": True}, "--moe-ncclep-zero-copy with it: .*no longer hidden$"),
    ({"use_megatron_fsdp": OFF, "use_distributed_optimizer": ON}, {}, "--use-megatron-fsdp: .*; weights and gradients"),
    ({"use_torch_fsdp2": OFF, "use_distributed_optimizer": ON}, {}, "--use-torch-fsdp2: .*; weights and gradients"),
    ({"fine_grained_activation_offloading": OFF}, {}, "memory$"),
    ({"defer_embedding_wgrad_compute": OFF}, TP2, "last stage"),
    ({"use_ring_exchange_p2p": OFF}, {}, "ordinary sends"),
    ({"cpu_offloading_retain_pinned_cpu_buffers": OFF}, {}, "pinned"),
    ({"fp8_dot_product_attention": OFF}, {}, "not in FP8"),
    ({"moe_combine_bwd_dtype": ("mxfp8", "bf16")}, {}, "-bwd-dtype bf16 instead of mxfp8: only ncclep .* in bf16$"),
    ({"moe_dispatch_fwd_dtype": ("mxfp8", "bf16")}, {}, "-fwd-dtype bf16 instead of mxfp8: only ncclep .* in bf16$"),
    ({"log_max_attention_logit": OFF}, {}, "not logged"),
]  # fmt: skip
"""Arguments before and after, what is given beside them, and what is said; the latter ones cost something."""

BEFORE = {
    *("wlb_before", "wlb_windows_per_micro_batch", "wlb_eval_windows_per_micro_batch", "wlb_per_token_loss", "wlb_sft"),
    *("wlb_means_in_evaluation", "wlb_frozen"),
}


@pytest.mark.parametrize(("changed", "beside", "line"), [*SET, *PRICED])
def test_one_change(changed, beside, line):
    priced = (changed, beside, line) in PRICED
    given = beside | {name: before for name, (before, _) in changed.items()}
    args = Namespace(**USUAL | given)
    changes = adapt(args, given.keys() - {"attention_dropout"})
    said, none = (changes.priced, changes.set) if priced else (changes.set, changes.priced)
    assert not none and len(said) == 1
    on, *differs, last = changes.lines()
    assert on == "> wlb is on: every step trains the same as without --wlb, but for these differences"
    assert differs[0].startswith("> wlb: differs: attention stops at the end of a document")
    assert all(each.startswith("> wlb: differs: ") for each in differs)
    verb = "without" if priced and "instead of" not in line else "sets"
    assert re.search(line, last) and last.startswith(f"> wlb: {verb} ") and "without no " not in last
    after = USUAL | beside | {name: value for name, (_, value) in changed.items()}
    assert {name: value for name, value in vars(args).items() if name not in BEFORE} == after
    assert args.wlb_windows_per_micro_batch == given.get("micro_batch_size", 1)
    first, plain = args.wlb_before, {name: each for name, (each, _) in changed.items() if not isinstance(each, list)}
    assert {name: value for name, value in first.items() if name in changed} == plain  # as a log can print it
    check(args)
    assert not any(adapt(args, given)[1:]) and args.wlb_before == first  # nothing is left to change
    assert args.wlb_windows_per_micro_batch == given.get("micro_batch_size", 1)
    windows = given.get("eval_micro_batch_size") or args.wlb_windows_per_micro_batch
    assert args.wlb_eval_windows_per_micro_batch == windows
    with pytest.raises(ValueError, match="^--wlb-strict: --wlb would change these flags"):
        adapt(Namespace(**USUAL | given | {"wlb_strict": True}), ())


@pytest.mark.parametrize(
    ("deep_ep", "dispatcher", "line"),
    [
        (None, "alltoall", "--moe-token-dispatcher-type alltoall instead of flex: ncclep .* not installed; a token"),
        (SimpleNamespace(), "alltoall", "--moe-token-dispatcher-type alltoall instead of flex: "),
        (SimpleNamespace(HybridEPBuffer=1), "flex", "--moe-flex-dispatcher-backend hybridep instead of ncclep: ncclep"),
    ],
)
def test_ncclep_gives_way_to_a_dispatcher_of_uneven_lengths(deep_ep, dispatcher, line, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    given = HYBRIDEP | {"moe_flex_dispatcher_backend": "ncclep", "moe_hybridep_pad_uneven_dispatch_inputs": False}
    sized = {"moe_expert_rank_capacity_factor": 1.5, "moe_ncclep_static_shape": True, "moe_ncclep_zero_copy": True}
    args = Namespace(**USUAL | given | sized)
    assert dispatcher_of(args) == dispatcher
    changes = adapt(args, given)
    assert any(re.match(f"> wlb: sets {line}", each) for each in changes.lines())
    assert bool(changes.priced) == (dispatcher == "alltoall") == switches_off("moe_flex_dispatcher_backend", "ncclep")
    assert args.moe_token_dispatcher_type == dispatcher_of(args) == dispatcher
    assert args.moe_flex_dispatcher_backend == ("hybridep" if dispatcher == "flex" else "deepep")
    assert args.moe_hybridep_pad_uneven_dispatch_inputs == (dispatcher == "flex")
    assert not any(getattr(args, name) for name in sized)
    check(args)
    assert not any(adapt(args, given)[1:])


def test_every_row_that_is_set_or_switched_off_is_a_case():
    changed = {name for case, _, _ in (*SET, *PRICED) for name in case}
    assert changed >= {name for kind in (Set, Off) for name, _ in rows(kind)}


def test_what_needs_no_change():
    overlap = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    alone = {"eval_micro_batch_size": 1, "defer_embedding_wgrad_compute": True}
    for given in ({}, {"reset_attention_mask": True}, MOE | {"moe_token_dispatcher_type": "alltoall"} | overlap, alone):
        args = Namespace(**USUAL | given | {"wlb_strict": True})
        assert not any(adapt(args, given)[1:])
        kept = {name: value for name, value in vars(args).items() if name not in BEFORE}
        assert kept == USUAL | given | {"wlb_strict": True}


@pytest.mark.parametrize("sft", [True, False])
def test_what_a_loss_without_wlb_depends_on_is_noted(sft):
    before = {"wlb_sft": sft, "wlb_means_in_evaluation": sft, "wlb_per_token_loss": False, "wlb_frozen": False}
    changed = {"calculate_per_token_loss": False, "micro_batch_size": 4, "eval_micro_batch_size": None}
    args = Namespace(**USUAL | changed | {"sft": sft})
    adapt(args, ())
    assert vars(args).items() >= before.items() and args.wlb_before == changed
    args.micro_batch_size = 3
    adapt(args, ())
    assert args.wlb_before == changed  # of the run itself


def test_dropout_that_was_asked_for_is_refused():
    args = Namespace(**USUAL | {"attention_dropout": 0.1})
    assert not adapt(args, {"attention_dropout"}).set
    with pytest.raises(ValueError, match="--attention-dropout is 0.1; packed attention has none"):
        check(args)


def test_the_global_batch_stays_where_it_follows_from_the_micro_batch():
    args = Namespace(**USUAL | {"micro_batch_size": 3, "global_batch_size": None, "context_parallel_size": 2})
    adapt(args, ())
    assert (args.micro_batch_size, args.global_batch_size) == (1, 6)
    scheduled = {"micro_batch_size": 3, "global_batch_size": None, "step_batch_size_schedule": "0:6"}
    args = Namespace(**vars(args) | scheduled)
    adapt(args, ())
    assert (args.micro_batch_size, args.global_batch_size) == (1, 6)  # of which upstream's learning rate decays


def test_the_scale_of_fp16_is_of_a_mean_over_tokens():
    fp16 = {"fp16": True, "loss_scale": None, "initial_loss_scale": 2.0**32, "min_loss_scale": 1.0}
    args = Namespace(**USUAL | fp16 | {"global_batch_size": 12, "calculate_per_token_loss": False})
    for lines in (2, 0):
        assert len([line for line in adapt(args, ()).set if "summed over" in line]) == lines
        assert (args.loss_scale, args.initial_loss_scale, args.min_loss_scale) == (None, 2.0**18, 2.0**-14)
    constant = fp16 | {"loss_scale": 2.0**20, "global_batch_size": None, "micro_batch_size": 4}
    args = Namespace(**USUAL | constant | {"calculate_per_token_loss": False})
    adapt(args, ())
    assert args.loss_scale == 2.0**8  # of four windows of 1,024
    args = Namespace(**USUAL | fp16)
    adapt(args, ())
    assert args.initial_loss_scale == 2.0**32


def test_a_batch_that_would_decrease_is_refused():
    given = {"micro_batch_size": 4, "global_batch_size": 6, "decrease_batch_size_if_needed": True, "world_size": 1}
    with pytest.raises(ValueError, match="--global-batch-size 6; give a multiple of .* data-parallel ranks, 4"):
        adapt(Namespace(**USUAL | given), ())
    adapt(Namespace(**USUAL | given | {"micro_batch_size": 1, "world_size": 4}), ())  # as it would without --wlb


def test_what_is_switched_off_by_itself():
    assert switches_off("cuda_graph_impl", "local") and switches_off("use_megatron_fsdp", True)
    for name, value in (("cuda_graph_impl", "none"), ("tp_comm_overlap", True), ("micro_batch_size", 4), ("lr", 1),
                        ("dataloader_type", "cyclic")):  # fmt: skip
        assert not switches_off(name, value)


def test_routers_that_draw_are_said():
    forced = ("moe_router_force_load_balancing", True), ("moe_router_force_biased", 0.0), ("moe_input_jitter_eps", 0.1)
    for name, value in (*forced, ("moe_router_force_biased", None)):
        differs = adapt(Namespace(**USUAL | MOE | {name: value}), ()).differs
        assert ("routers draw other numbers" in differs) == (value is not None)


@pytest.mark.parametrize("types", ["seq_aux_loss", ["aux_loss", "seq_aux_loss"], "aux_loss"])
def test_the_sequence_of_a_balancing_loss_is_said(types):
    given = MOE | {"moe_router_load_balancing_type": types, "moe_aux_loss_coeff": 0.01}
    differs = " ".join(adapt(Namespace(**USUAL | given), ()).differs)
    assert ("seq_aux_loss takes a micro-batch, of several samples" in differs) == (types != "aux_loss")
