"""Upstream's releases: versions, replacements of its functions, its scripts. Megatron is imported inside functions."""
