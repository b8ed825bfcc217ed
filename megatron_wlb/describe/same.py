"""Differences of training with `--wlb` from the same run without it."""

from argparse import Namespace

from megatron_wlb import layers, packing
from megatron_wlb.describe import data
from megatron_wlb.describe.arguments import Differs, rows
from megatron_wlb.describe.masks import masks_documents
from megatron_wlb.describe.refusals import Lenient

_MASK = "attention stops at the end of a document; without --wlb this run lets it cross, so losses do not compare"
_DIFFERENCES: layers.Rules = {
    f"{_MASK} (TransformerEngine and fused softmax ignore --reset-attention-mask)": lambda a: (
        not masks_documents(a) and a.reset_attention_mask
    ),
    _MASK: lambda a: not masks_documents(a) and not a.reset_attention_mask,
    **layers.differs(),
    **packing.DIFFERS,
    **data.DIFFERS,
}
"""Sentences, formatted with the arguments `a` before --wlb sets any, and whether they hold; a missing one is None."""


def differences(args: Namespace) -> list[str]:
    """Return how training with `--wlb` differs from training without; [] if only in the order of sums."""
    given = Lenient(**vars(args))
    found = [text.format(a=given) for text, holds in _DIFFERENCES.items() if holds(given)]
    return [*found, *dict.fromkeys(row.how for name, row in rows(Differs) if row.when(getattr(given, name)))]
