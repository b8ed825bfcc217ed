"""Simulates training steps: `simulate_step` predicts a step's time, `breakdown` where it goes.

Simulates the discrete events of one step under data, pipeline, context and tensor parallelism, from lengths and shards
alone. Needs neither torch nor megatron nor a GPU.
"""

from megatron_wlb.simulate.step import (
    SHARES,
    Breakdown,
    SimulatedStep,
    balanced_time,
    breakdown,
    limit_time,
    shares,
    simulate_step,
)
from megatron_wlb.simulate.trace import trace_events, write_trace

__all__ = [
    "SHARES",
    "Breakdown",
    "SimulatedStep",
    "balanced_time",
    "breakdown",
    "limit_time",
    "shares",
    "simulate_step",
    "trace_events",
    "write_trace",
]
