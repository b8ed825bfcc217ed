"""Errors of the simulator."""

import numpy as np

from megatron_wlb.plan.workload import FLOPS_PROFILE
from megatron_wlb.simulate import MODELS, Hardware, Job, engine, simulate_step
from megatron_wlb.simulate.schedule import Schedule
from tests.errors.case import Case
from tests.simulate.test_step import SMALL, plan_of

CASES: list[Case] = [
    (
        "a micro-batch is sharded over <1> context-parallel ranks, not <2>; plan it for the job",
        lambda at: simulate_step(Job(model=SMALL, cp=2), [plan_of(Job(model=SMALL), [[100]])]),
    ),
    (
        "the plan has <[1]> micro-batches by data-parallel rank; the job has <2> ranks, which run equally many; plan "
        "for them",
        lambda at: simulate_step(Job(model=SMALL, dp=2), [plan_of(Job(model=SMALL), [[100]])]),
    ),
    (
        "a pipeline has at least one stage, chunk and micro-batch, not <Schedule(num_stages=0, …)>; give one of each",
        lambda at: Schedule(num_stages=0, num_micro_batches=1),
    ),
    (
        "<2> model chunks need at least <2> pipeline stages, not 1; leave virtual stages out",
        lambda at: Schedule(num_stages=1, num_micro_batches=4, num_chunks=2),
    ),
    (
        "the interleaved schedule runs groups of <4> micro-batches; give a group size from <4>, the number of stages, "
        "to <3>, the number of micro-batches",
        lambda at: Schedule(num_stages=4, num_micro_batches=3, num_chunks=2),
    ),
    (
        "<9> micro-batches in groups of 4 leave a last group of 1; it must be empty or at least <4>, the number of "
        "stages",
        lambda at: Schedule(num_stages=4, num_micro_batches=9, num_chunks=2),
    ),
    (
        "forward_only is <False> and backward times are missing; give them to a schedule that is <not forward only>, "
        "and only to such a one",
        lambda at: engine.run(Schedule(num_stages=1, num_micro_batches=1), np.ones((1, 1, 1))),
    ),
    (
        "profile <flops> counts attended pairs; a simulation needs one <in us>, give h100-fa2 or one that "
        "`megatron-wlb profile` wrote",
        lambda at: Hardware(attention=FLOPS_PROFILE),
    ),
    (
        "<126> layers do not divide over <16 stages of 1 chunks>; change one of them",
        lambda at: Job(model=MODELS["llama3-405b"], pp=16),
    ),
    (
        "<32> attention heads do not divide over <5> ranks; change one of them",
        lambda at: Job(model=MODELS["llama2-7b"], tp=5),
    ),
]
