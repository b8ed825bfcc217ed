"""Which runs of Megatron keep attention inside documents."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_wlb.describe.refusals import Lenient
from megatron_wlb.layers.attention import ignores_mask
from megatron_wlb.layers.part import ends_documents


def masks_documents(args: Namespace | Mapping[str, Any]) -> bool:
    """Return whether a run without --wlb keeps attention inside documents.

    `args` are upstream's arguments, as far as known; a missing one has upstream's default.
    """
    a = Lenient(**(args if isinstance(args, Mapping) else vars(args)))
    if ends_documents(a):
        return True
    made = a.reset_attention_mask and a.create_attention_mask_in_dataloader is not False
    return bool(made and not ignores_mask(a))
