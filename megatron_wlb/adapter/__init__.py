"""Integration with Megatron-LM."""
