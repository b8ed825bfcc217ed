"""What the start of a run says of the steps with `--wlb`, each of its sentences once and not once; and masks."""

from argparse import Namespace

import pytest

from megatron_wlb.describe import same
from megatron_wlb.describe.arguments import Differs, rows
from megatron_wlb.describe.masks import masks_documents

SAME = {
    "dataloader_inter_document_masking": True,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "wlb_packing": "adaptive",
}
MOE = {"num_experts": 4}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
SEQUENCES = {"moe_router_load_balancing_type": ["none", "seq_aux_loss"], "moe_aux_loss_coeff": [0, 0.01]}
DIFFERS = [
    ({"dataloader_inter_document_masking": False}, ["attention stops at the end of a document; without --wlb"]),
    (
        {"dataloader_inter_document_masking": False, "reset_attention_mask": True},
        ["attention stops at the end of a document; without --wlb this run lets it cross, so losses do not compare (T"],
    ),
    (
        {"dataloader_inter_document_masking": False, "hybrid_layer_pattern": "M"},
        ["attention stops", "states of linear layers end with the document"],
    ),
    ({"attention_dropout": 0.1}, ["no attention dropout"]),
    ({"hidden_dropout": 0.1}, ["hidden dropout uses different random numbers"]),
    (MOE | {"moe_aux_loss_coeff": 0.01}, ["losses that balance experts are of other micro-batches (1.2 %"]),
    (MOE | SEQUENCES, ["losses that balance experts", "seq_aux_loss takes a micro-batch, of several samples"]),
    (MOE | {"sft": True}, ["padding tokens are not routed to experts"]),
    (MOE | {"moe_expert_capacity_factor": 1.5}, ["experts take tokens by micro-batch"]),
    (MOE | SINKHORN | {"moe_aux_loss_coeff": 0.01}, ["experts take tokens by micro-batch"]),
    (MOE | {"moe_input_jitter_eps": 0.1}, ["routers draw other numbers"]),
    (MOE | {"moe_router_force_load_balancing": True}, ["routers draw other numbers"]),
    (MOE | {"moe_router_force_biased": 0.0}, ["routers draw other numbers"]),
    ({"fp8": "hybrid"}, ["scales of FP8 and FP4 are of other micro-batches"]),
    ({"fp4": "e2m1"}, ["scales of FP8 and FP4 are of other micro-batches"]),
    ({"eod_mask_loss": True, "context_parallel_size": 2}, ["the loss is averaged as with"]),
    ({"sft": True, "context_parallel_size": 2}, ["the loss is averaged as with"]),
    ({"wlb_packing": "adaptive:20"}, ["--wlb-packing adaptive:20 trains documents in other steps"]),
    ({"mock_data": True, "wlb_mock_lengths": "F2"}, ["mock documents have other lengths"]),
    ({"sft": True, "wlb_sft_skip": ("long",)}, ["long conversations are left out"]),
    ({"sft": True, "wlb_sft_skip": ("broken",)}, ["broken rows are left out"]),
]


@pytest.mark.parametrize(("arguments", "sentences"), DIFFERS)
def test_differences(arguments, sentences):
    found = same.differences(Namespace(**SAME | arguments))
    assert len(found) == len(sentences)
    assert all(each.startswith(sentence) for each, sentence in zip(found, sentences, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        {"sft": True, "dataloader_inter_document_masking": False},
        MOE | {"moe_aux_loss_coeff": 0.0, "moe_router_force_biased": None},
        MOE | SINKHORN | {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.01]},
        SEQUENCES | {"moe_input_jitter_eps": 0.1, "moe_expert_capacity_factor": 1.5},
        {"eod_mask_loss": True, "context_parallel_size": 2, "calculate_per_token_loss": True},
        {"eod_mask_loss": True, "context_parallel_size": 1},
        {"wlb_mock_lengths": "F2", "wlb_sft_skip": ("long", "broken")},
    ],
)
def test_no_difference(arguments):
    assert same.differences(Namespace(**SAME | arguments)) == []


def test_every_sentence_is_said_once():
    found = [text for arguments, _ in DIFFERS for text in same.differences(Namespace(**SAME | arguments))]
    known = [*same._DIFFERENCES, *(row.how for _, row in rows(Differs))]
    assert not [text for text in known if not any(each.endswith(text.partition("}")[2] or text) for each in found)]


LOCAL = {"reset_attention_mask": True, "transformer_impl": "local"}


@pytest.mark.parametrize(
    ("arguments", "masks"),
    [
        ({}, False),
        ({"dataloader_inter_document_masking": True}, True),
        ({"sft": True}, True),
        (LOCAL, True),
        (LOCAL | {"transformer_impl": "transformer_engine"}, False),
        (LOCAL | {"create_attention_mask_in_dataloader": False}, False),
        (LOCAL | {"window_size": (128, 0)}, False),
        (LOCAL | {"bf16": True}, False),
        (LOCAL | {"fp16": True, "masked_softmax_fusion": True}, False),
        (LOCAL | {"bf16": True, "masked_softmax_fusion": False}, True),
    ],
)
def test_a_mask_that_is_made_counts_where_softmax_takes_it(arguments, masks):
    assert masks_documents(arguments) == masks_documents(Namespace(**arguments)) == masks
