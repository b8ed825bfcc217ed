"""Performance of GPUs and their network, measured or assumed."""
