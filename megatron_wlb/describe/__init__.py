"""Turns Megatron's arguments and settings into a `Job`; needs neither torch nor megatron."""
