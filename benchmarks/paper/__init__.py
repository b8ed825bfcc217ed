"""Figures 1, 4 and 12 to 15 and Table 2 of the paper, simulated: paper, reproduced, ours, limit.

`python -m benchmarks.paper`; `docs/paper.md` shows the result.
"""
