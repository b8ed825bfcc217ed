"""Performance of GPUs and their network: kernel times, rates and collectives, measured or assumed."""
