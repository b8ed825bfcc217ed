"""verl, balanced by work: VERL_USE_EXTERNAL_MODULES=balance_verl and PYTHONPATH=examples, in all processes of Ray."""

from megatron_wlb import MODELS, Parallel, PlanSettings, make_job
from megatron_wlb.loops import verl

JOB = make_job(
    model=MODELS["llama2-7b"],
    parallel=Parallel(tp=2, cp=2, pp=2),  # of the actor
    context_length=32768,
    global_batch_size=2,
    settings=PlanSettings(profile="h100-cudnn"),
)
UNDO = verl.balanced(JOB)
