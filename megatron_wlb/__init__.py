"""WLB-LLM (OSDI'25) for Megatron-LM: workload-balanced packing, pipelining and context parallelism."""

__version__ = "0.1.0"
