"""Which runs of Megatron keep attention inside documents."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_wlb.describe.refusals import Lenient
from megatron_wlb.layers.part import ends_documents


def masks_documents(args: Namespace | Mapping[str, Any]) -> bool:
    """Return whether a run without --wlb keeps attention inside documents.

    `args` are upstream's arguments, as far as known; a missing one has upstream's default. The mask that
    --reset-attention-mask makes is ignored by TransformerEngine (NVIDIA/Megatron-LM#2357), by the fused softmax of
    local layers, which runs in bf16 and fp16, and by their sliding windows, which have a mask of their own.
    """
    a = Lenient(**(args if isinstance(args, Mapping) else vars(args)))
    if ends_documents(a):
        return True
    made = a.reset_attention_mask and a.create_attention_mask_in_dataloader is not False
    fused = (a.bf16 or a.fp16) and a.masked_softmax_fusion is not False
    return bool(made and a.transformer_impl == "local" and not (fused or a.window_size))
