"""Turns Megatron's arguments and settings into a `Job`, for training and for commands; without torch and megatron."""
