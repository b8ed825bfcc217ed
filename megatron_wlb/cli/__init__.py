"""The `megatron-wlb` command. Planning commands need neither torch nor megatron."""
