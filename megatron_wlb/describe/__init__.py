"""From Megatron's arguments and settings to a `Job`, for training and for commands; without torch and megatron."""
