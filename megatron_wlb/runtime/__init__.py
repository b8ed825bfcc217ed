"""Attention on one rank of a context-parallel group, and the exchange of keys and values."""
