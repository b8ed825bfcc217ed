"""Lengths of the documents of a run."""

import math
from typing import NamedTuple

import numpy as np

from megatron_wlb.cli.analyze.setup import Setup


class Documents(NamedTuple):
    """Documents and tokens of the training split, and shares by length."""

    prefixes: list[str]
    documents: int
    tokens: int
    length_quantiles: dict[str, int]
    up_to: list[int]
    """Upper edges of the bins of lengths."""
    shares: dict[str, list[float]]
    """Of documents, tokens and work, by bin."""


def documents_of(setup: Setup) -> Documents:
    """Return documents and tokens of the training split, and shares by length."""
    every = np.concatenate(setup.data.lengths)
    lengths, counts = np.unique(every, return_counts=True)
    edges = 2 ** np.arange(0, math.ceil(math.log2(max(2, int(lengths[-1])))) + 1)
    # A document counts in the bin of its length. One longer than the window is attended to window by window.
    job = setup.job
    full, rest = np.divmod(lengths, job.context_length)
    work = full * float(job.work(np.array(job.context_length))) + job.work(rest)
    place = np.searchsorted(edges, lengths, side="left")
    shares = {
        name: (np.bincount(place, weights=counts * values, minlength=len(edges)) / (counts * values).sum()).tolist()
        for name, values in (("documents", lengths > 0), ("tokens", lengths), ("work", work))
    }
    quantiles = np.quantile(every, (0.5, 0.9, 0.99, 1.0)).astype(int).tolist()
    return Documents(
        prefixes=setup.data.prefixes,
        documents=len(every),
        tokens=int(every.sum()),
        length_quantiles=dict(zip(("p50", "p90", "p99", "max"), quantiles, strict=True)),
        up_to=edges.tolist(),
        shares=shares,
    )
