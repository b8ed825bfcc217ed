"""Simulated training steps: `simulate_step(job, plan)` says how long a plan takes, and `breakdown` where it is lost.

Discrete events of one step under data, pipeline, context and tensor parallelism, from lengths and shards alone; needs
neither torch nor megatron nor a GPU.
"""

from megatron_wlb.simulate.job import MODELS, Hardware, Job
from megatron_wlb.simulate.step import Breakdown, SimulatedStep, balanced_time, breakdown, simulate_step
from megatron_wlb.simulate.trace import trace_events, write_trace

__all__ = [
    "MODELS",
    "Breakdown",
    "Hardware",
    "Job",
    "SimulatedStep",
    "balanced_time",
    "breakdown",
    "simulate_step",
    "trace_events",
    "write_trace",
]
