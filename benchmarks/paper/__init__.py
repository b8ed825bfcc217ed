"""Table 2 and Figures 12 and 15 of the paper, simulated: `python -m benchmarks.paper`."""
