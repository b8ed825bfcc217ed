"""Settings of the training run itself: which kernels attend, how it resumes, and what it logs."""

from dataclasses import dataclass

from megatron_wlb.settings import Settings, setting

ATTENTION_BACKENDS = ("auto", "aten", "flash_attn", "flash_attn_3", "te", "triton", "cpu", "reference", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Settings):
    """What training goes by besides the description of its job."""

    attention_backend: str = setting(
        "auto",
        "Kernels under context-parallel attention. aten: torch's own FlashAttention-2. flash_attn, flash_attn_3, te: "
        "the packages flash-attn 2, FlashAttention-3, TransformerEngine. triton: ours. auto: on GPUs the first that "
        "passes a small test, on Hopper and later in the order flash_attn_3, te, aten, flash_attn, triton, before "
        "aten, flash_attn, te, triton; cpu without. megatron: TransformerEngine's attention and context parallelism "
        "instead of ours, as without --wlb, for comparison.",
        choices=ATTENTION_BACKENDS,
    )
    restart_packing: bool = setting(
        False,
        "Where the packer state of the loaded checkpoint is missing or does not fit (another dataset, window or "
        "policy), begin with the data anew instead of stopping.",
    )
    document_log: str | None = setting(
        None,
        "Append which documents every step trained to this file, a few bytes each; `megatron-wlb audit` checks that "
        "none was lost or doubled over restarts.",
    )
    log: str | None = setting(None, "Append one JSON object a step to this file: loss, tokens, work, delays, shards.")
