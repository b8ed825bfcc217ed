"""From Megatron's arguments and settings to a `Job`, for training and for commands. Needs neither torch nor megatron."""
