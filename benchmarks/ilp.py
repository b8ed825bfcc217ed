"""Equation 1 of the paper (section 3.2) through SciPy's HiGHS: the best packing into windows of fixed length."""

from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from benchmarks.fixed import FixedPacking, Pieces, WindowPolicy, fill_windows
from megatron_wlb.job import Job

_SLACK = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpPacking(FixedPacking):
    """Fixed-4D whose windows an integer linear program chooses."""

    name = "ilp"
    time_limit_seconds: float = 10.0
    """Of each program, that is, every k steps. Where it ends a program, the plan depends on the machine."""

    def policy(self, job: Job) -> "_IlpPolicy":
        return _IlpPolicy(job, self)


class _IlpPolicy(WindowPolicy):
    """The program packs whole pieces as `fill_windows` cuts them, so that it always has a solution; it is optimal for
    these pieces, not over all ways to cut. It minimises the sum over the k steps of the largest attention work (sum of
    d^2) of a micro-batch of the step, up to HiGHS' relative gap of 1e-4. For k = 1 that is Equation 1.

    No solver fills every window to the last token in reasonable time. So where documents leave less than 1 % of the
    windows empty, the shortest pieces stay out of the program until 1 % is free, and are then placed and cut as
    `fill_windows` does. Their attention work hardly counts.
    """

    def __init__(self, job: Job, settings: IlpPacking) -> None:
        super().__init__(job, settings.global_batches)
        self._time_limit = settings.time_limit_seconds

    def _place(self, lengths: np.ndarray, num_windows: int) -> Pieces:
        """Raises RuntimeError if the solver has no solution when its time is over."""
        room, work = np.full(num_windows, self._job.context_length), np.zeros(num_windows, np.int64)
        row, length, _ = fill_windows(lengths, room, work)
        row, length = (column[np.argsort(length, kind="stable")] for column in (row, length))  # the shortest first
        excess = length.sum() - (1 - _SLACK) * room.sum()
        num_fill = int(np.searchsorted(np.cumsum(length), excess)) + 1 if excess > 0 else 0

        whole = length[num_fill:]
        sizes, counts = np.unique(whole, return_counts=True)
        # Pieces of equal length are interchangeable: the earlier ones go to the earlier micro-batch.
        windows = [np.repeat(np.arange(num_windows), each) for each in self._solve(sizes, counts, num_windows)]
        window = np.concatenate([np.empty(0, np.int64), *windows])
        np.subtract.at(room, window, whole)
        np.add.at(work, window, whole**2)
        source, fill, fill_window = fill_windows(length[:num_fill], room, work)
        return (
            np.concatenate((row[num_fill:], row[source])),
            np.concatenate((whole, fill)),
            np.concatenate((window, fill_window)),
        )

    def _solve(self, lengths: np.ndarray, counts: np.ndarray, num_windows: int) -> np.ndarray:
        """How many of the `counts[i]` pieces of `lengths[i]` each micro-batch gets: int64 [lengths, micro-batches].

        Variables: x[i, j], these numbers, for Equation 1's x_ij with equal documents taken together, which leaves out
        their permutations; then M[s], the largest work of step s in units of C^2, to be minimised.
        """
        window, per_step = self._job.context_length, self._job.num_micro_batches
        num_lengths, num_steps = len(lengths), num_windows // per_step
        num_x = num_lengths * num_windows
        each_window, size = sparse.identity(num_windows), lengths[None] / window
        step_of_window = sparse.kron(sparse.identity(num_steps), np.ones((per_step, 1)))
        decreasing = sparse.diags([1.0, -1.0], [0, 1], shape=(num_steps - 1, num_steps))  # steps are interchangeable

        def constraint(of_x: sparse.spmatrix, of_m: sparse.spmatrix | None, *bounds: object) -> object:
            of_m = sparse.csr_matrix((of_x.shape[0], num_steps)) if of_m is None else of_m
            return optimize.LinearConstraint(sparse.hstack((of_x, of_m)), *bounds)

        once = sparse.kron(sparse.identity(num_lengths), np.ones((1, num_windows)))
        is_count = np.arange(num_x + num_steps) < num_x
        result = optimize.milp(
            c=~is_count,
            integrality=is_count,
            bounds=optimize.Bounds(0, np.inf),
            constraints=[
                constraint(once, None, counts, counts),
                constraint(sparse.kron(size, each_window), None, -np.inf, 1),
                constraint(sparse.kron(size**2, each_window), -step_of_window, -np.inf, 0),
                constraint(sparse.csr_matrix((num_steps - 1, num_x)), decreasing, 0, np.inf),
            ],
            options={"time_limit": self._time_limit},
        )
        if result.x is None:
            raise RuntimeError(f"HiGHS packed nothing within {self._time_limit} s ({result.message})")
        numbers = np.rint(result.x[:num_x]).astype(np.int64).reshape(num_lengths, num_windows)
        if (numbers.sum(1) != counts).any() or (lengths @ numbers > window).any():
            raise RuntimeError("HiGHS' packing overfills a window or loses a document by its tolerance")
        return numbers
