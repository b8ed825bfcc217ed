"""Planning: integers in, integers out, the same on every rank. Imports neither torch nor megatron."""
