"""Single steps of a packing policy, of documents that a test writes down."""

import numpy as np

from benchmarks.fixed import FixedPacking
from megatron_wlb.documents import DOCUMENT
from tests.jobs import job


def documents(lengths, *, first=0, arrival=0):
    """DOCUMENT rows that follow one another."""
    rows = np.zeros(len(lengths), DOCUMENT)
    rows["index"] = rows["document"] = np.arange(first, first + len(lengths))
    rows["length"] = lengths
    rows["arrival"] = arrival
    return rows


def tokens(documents):
    """Every token of DOCUMENT rows as a number of its own, in order."""
    row = np.repeat(np.arange(len(documents)), documents["length"])
    place = np.arange(len(row)) - (np.cumsum(documents["length"]) - documents["length"])[row]
    rows = documents[row]
    return np.sort((rows["dataset"] << 50) + (rows["document"] << 25) + rows["offset"] + place)


def steps_of(packer):
    """Its steps up to the end of the data."""
    return iter(packer.next, None)


class Feed:
    """A Draw that gives all of its rows at the first request, however much is asked for."""

    early_tokens = 0

    def __init__(self, rows, *, exhausted=False):
        self._rows, self.exhausted = rows, exhausted

    def more(self, tokens=None):
        rows, self._rows = self._rows, self._rows[:0]
        return rows

    own = more


def pack(policy, rows, *, step=0, exhausted=False):
    """The policy's next step."""
    return policy.pack(step, Feed(rows, exhausted=exhausted))


def windows(packing, num_micro_batches=2, context_length=10):
    """A policy of fixed length."""
    sizes = {"context_length": context_length, "max_tokens": context_length, "crossover_tokens": 5}
    return packing.policy(job(num_micro_batches=num_micro_batches, **sizes))


def packed(packing):
    """Document indices of each micro-batch."""
    return [packing.micro_batch(i)["index"].tolist() for i in range(len(packing))]


def fixed(num_micro_batches=2, context_length=10, global_batches=2):
    return windows(FixedPacking(global_batches=global_batches), num_micro_batches, context_length)
