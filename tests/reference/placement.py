"""Micro-batches over data-parallel ranks, as csrc/pipeline.cpp has it."""

import numpy as np


def place(work: np.ndarray, dp: int, total_weight: int, largest_weight: int) -> np.ndarray:
    """Micro-batches of every rank, int64 [dp, M / dp], ascending: dealt out back and forth, then swapped."""

    def cost(total: np.ndarray, largest: np.ndarray) -> np.ndarray:
        return total_weight * total + largest_weight * largest

    def swap(rows: np.ndarray, work: np.ndarray) -> bool:
        """Swap in `rows` (int64 [dp, M / dp]) what makes the costliest rank cheaper; say whether there was anything."""
        totals = work.sum(axis=1)
        costs = cost(totals, work.max(axis=1))
        worst = int(costs.argmax())
        limit = costs[worst] - (costs[worst] >> 13)
        # The largest of a rank without each of its micro-batches.
        ordered = np.pad(np.sort(work, axis=1), ((0, 0), (1, 0)))
        others = np.repeat(ordered[:, -1:], work.shape[1], axis=1)
        np.put_along_axis(others, work.argmax(axis=1)[:, None], ordered[:, -2:-1], axis=1)
        mine, my_others = work[worst][:, None], others[worst][:, None]
        for rank in np.argsort(costs, kind="stable").tolist():
            if costs[rank] >= limit:
                return False
            moved = work[rank] - mine
            then = np.maximum(
                cost(totals[worst] + moved, np.maximum(my_others, work[rank])),
                cost(totals[rank] - moved, np.maximum(others[rank], mine)),
            )
            best = int(then.argmin())
            if then.flat[best] < limit:
                i, j = divmod(best, work.shape[1])
                rows[worst, i], rows[rank, j] = rows[rank, j], rows[worst, i]
                return True
        return False

    rounds = np.argsort(-work, kind="stable").reshape(-1, dp)
    rounds[1::2] = rounds[1::2, ::-1]
    rows = np.ascontiguousarray(rounds.T)
    while swap(rows, work[rows]):
        pass
    return np.sort(rows, axis=1)
