"""The work of documents, which packing and placement balance.

Work is an integer, so that C++ and Python compute equal sums on every rank: W(d) = d * Lc + d * d, in units of one
attended token pair. Lc, the crossover length, is the document length at which attention costs as much as everything
else (paper, equation 2 with W_a ~ d^2 and W_l ~ d).
"""

import numpy as np


def document_work(lengths: np.ndarray, crossover_tokens: int) -> np.ndarray:
    """Work of documents of `lengths` (int64 [n]), int64 [n]."""
    lengths = lengths.astype(np.int64)
    return lengths * (lengths + crossover_tokens)
