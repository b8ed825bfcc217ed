"""NeMo-RL, balanced by work: import it in your driver, such as a copy of examples/run_grpo.py, before it trains."""

from megatron_wlb import MODELS, Parallel, PlanSettings, make_job
from megatron_wlb.loops import nemo_rl

JOB = make_job(
    model=MODELS["llama2-7b"],
    parallel=Parallel(tp=2, cp=2, pp=2),
    context_length=32768,
    global_batch_size=2,
    settings=PlanSettings(profile="h100-cudnn"),
)
UNDO = nemo_rl.balanced(JOB)
