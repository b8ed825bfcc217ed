"""Simulates a training step from lengths and shards, without torch."""
