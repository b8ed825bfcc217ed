"""Integration with Megatron-LM; no other package imports megatron."""
