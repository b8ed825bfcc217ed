"""Differences of training with `--wlb` from the same run without it."""

from argparse import Namespace

from megatron_wlb import layers
from megatron_wlb.describe.arguments import Differs, rows
from megatron_wlb.describe.masks import masks_documents
from megatron_wlb.describe.refusals import Lenient
from megatron_wlb.packing import policy_of

_MASK = "attention stops at the end of a document; without --wlb this run lets it cross, so losses do not compare"
_DIFFERENCES: layers.Rules = {
    f"{_MASK} (TransformerEngine and fused softmax ignore --reset-attention-mask)": lambda a: (
        not masks_documents(a) and a.reset_attention_mask
    ),
    _MASK: lambda a: not masks_documents(a) and not a.reset_attention_mask,
    **layers.differs(),
    "means over micro-batches are as with --context-parallel-size 1": lambda a: (
        (a.eod_mask_loss or a.sft) and (a.context_parallel_size or 1) > 1 and not a.calculate_per_token_loss
    ),
    "--wlb-packing {a.wlb_packing} trains documents in other steps": lambda a: policy_of(a.wlb_packing).delays,
    "mock documents have other lengths": lambda a: a.mock_data and a.wlb_mock_lengths is not None,
    "long conversations are left out": lambda a: a.sft and "long" in (a.wlb_sft_skip or ()),
    "broken rows are left out": lambda a: a.sft and "broken" in (a.wlb_sft_skip or ()),
}
"""Sentences, formatted with the arguments `a` before --wlb sets any, and whether they hold; a missing one is None."""


def differences(args: Namespace) -> list[str]:
    """Return how training with `--wlb` differs from training without; [] if only in the order of sums."""
    given = Lenient(**vars(args))
    found = [text.format(a=given) for text, holds in _DIFFERENCES.items() if holds(given)]
    return [*found, *dict.fromkeys(row.how for name, row in rows(Differs) if row.when(getattr(given, name)))]
