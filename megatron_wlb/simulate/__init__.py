"""Simulates the events of a training step from lengths and shards alone, without torch, megatron or a GPU."""
