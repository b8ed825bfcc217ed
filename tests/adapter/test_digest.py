"""The digest of a step: its cost. That it tells steps apart is tested with whole runs (test_same_step)."""

import numpy as np

from megatron_wlb.adapter.digest import digest, weighed


class Counting(np.ndarray):
    """Counts elements that numpy's functions make of it."""

    elements = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **given):
        plain = [np.asarray(each) if isinstance(each, Counting) else each for each in inputs]
        made = getattr(ufunc, method)(*plain, **given)
        Counting.elements += max(np.size(each) for each in (made, *plain))
        return made if made is None or np.ndim(made) == 0 else made.view(Counting)


def test_a_digest_costs_less_than_a_hundredth_of_the_smallest_layer():
    """Operations a token, on the host; a layer of 64 columns takes 6 * 12 * 64 ** 2 a token in a step."""
    rows = 1000
    parts = [np.arange(rows, dtype=np.int64).view(Counting) for _ in range(5)]
    parts[4] = np.zeros(rows, np.int64).view(Counting)
    sums = digest(*parts)
    weighed(sums, np.array([rows]))
    assert 16 * rows < Counting.elements <= 32 * rows < 0.01 * 6 * 12 * 64**2 * rows
