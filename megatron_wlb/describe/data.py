"""Rules on where documents are from: conversations of `--sft`, mock data, and how they end."""

from megatron_wlb.layers.part import Rules
from megatron_wlb.packing import policy_of

REFUSED: Rules = {
    "--wlb-sft-skip has no effect without --sft; give both, or neither": lambda a: (
        a.wlb_sft_skip is not None and not a.sft
    ),
    "--mock-data with --sft: --wlb has no mock conversations; leave one of them out": lambda a: a.mock_data and a.sft,
    "--wlb-mock-lengths has no effect without --mock-data; give both, or neither": lambda a: (
        a.wlb_mock_lengths is not None and not a.mock_data
    ),
    (
        "--wlb-packing with a delay moves documents by the windows that they fill, and rows of --sft fill them in "
        "part; give adaptive or megatron"
    ): lambda a: a.sft and not policy_of(a.wlb_packing).same_steps,
}
DIFFERS: Rules = {
    "the loss is averaged as with --context-parallel-size 1": lambda a: (
        (a.eod_mask_loss or a.sft) and (a.context_parallel_size or 1) > 1 and not a.calculate_per_token_loss
    ),
    "mock documents have other lengths": lambda a: a.mock_data and a.wlb_mock_lengths is not None,
    "long conversations are left out": lambda a: a.sft and "long" in (a.wlb_sft_skip or ()),
    "broken rows are left out": lambda a: a.sft and "broken" in (a.wlb_sft_skip or ()),
}
