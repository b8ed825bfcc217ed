"""What GPUs and their network do: kernel times, rates and collectives, measured or assumed."""
