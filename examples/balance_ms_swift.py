"""ms-swift, balanced by work: `megatron sft --packing true --external_plugins examples/balance_ms_swift.py ...`."""

from megatron_wlb import MODELS, Parallel, PlanSettings, make_job
from megatron_wlb.loops import ms_swift

JOB = make_job(
    model=MODELS["llama2-7b"],
    parallel=Parallel(tp=2, cp=2),
    context_length=32768,
    global_batch_size=1,
    settings=PlanSettings(profile="h100-cudnn"),
)
UNDO = ms_swift.balanced(JOB)
