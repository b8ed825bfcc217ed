"""slime, balanced by work: import it in the module of your rollout function (`--rollout-function-path`)."""

from megatron_wlb import MODELS, Parallel, PlanSettings, make_job
from megatron_wlb.loops import slime

JOB = make_job(
    model=MODELS["llama2-7b"],
    parallel=Parallel(tp=2, pp=2),
    context_length=32768,
    global_batch_size=2,
    settings=PlanSettings(profile="h100-cudnn"),
)
UNDO = slime.balanced(JOB)
