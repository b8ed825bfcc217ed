"""Turns Megatron's arguments and settings into a `Job`; without torch."""
