"""Equation 1 of the paper (section 3.2) through SciPy's HiGHS: the best fixed-length packing. For benchmarks only."""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.packing.fixed import FixedPacking, Pieces, WindowPolicy, fill_windows

TIME_LIMIT_SECONDS = 60.0
"""Time limit of each program, that is, every k steps."""
_SLACK = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class IlpPacking(FixedPacking):
    """Settings of `IlpPolicy`: those of fixed packing."""

    name = "ilp"
    help = "the windows of fixed packing chosen by an integer linear program."
    trains = False

    def policy(self, job: Job) -> "IlpPolicy":
        return IlpPolicy(job, self.global_batches)


class IlpPolicy(WindowPolicy):
    """Fixed-4D whose windows an integer linear program chooses.

    The program packs whole pieces as `fill_windows` cuts them, so that it always has a solution; it is optimal for
    these pieces, not over all ways to cut. It minimises the sum over the k steps of the largest attention work (sum of
    d^2) of a micro-batch of the step, which for k = 1 is Equation 1, up to HiGHS' relative gap of 1e-4 if it ends in
    time. Where its time limit ends it, the plan depends on the machine.

    No solver fills every window to the last token in reasonable time. So where the documents leave less than 1 % of
    the windows empty, the shortest pieces, as many as free that 1 %, stay out of the program and are then placed and
    cut as `fill_windows` does. Their attention work hardly counts.
    """

    def _place(self, lengths: np.ndarray, num_windows: int) -> Pieces:
        """Raises RuntimeError if the solver has no solution when its time is over."""
        room, work = np.full(num_windows, self._job.context_length), np.zeros(num_windows, np.int64)
        row, length, _ = fill_windows(lengths, room, work)
        row, length = (column[np.argsort(length, kind="stable")] for column in (row, length))  # the shortest first
        excess = length.sum() - (1 - _SLACK) * room.sum()
        num_fill = int(np.searchsorted(np.cumsum(length), excess)) + 1 if excess > 0 else 0

        whole = length[num_fill:]
        lengths_solved, counts = np.unique(whole, return_counts=True)
        # Pieces of equal length are interchangeable: the earlier ones go to the earlier micro-batch.
        window = np.concatenate(
            [np.repeat(np.arange(num_windows), numbers) for numbers in self._solve(lengths_solved, counts, num_windows)]
            or [np.empty(0, np.int64)]
        )
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
        from scipy import optimize, sparse  # only benchmarks need it

        num_lengths, num_steps = len(lengths), num_windows // self._job.num_micro_batches
        each_window, steps = sparse.identity(num_windows), sparse.identity(num_steps)
        size, no_steps = lengths[None] / self._job.context_length, sparse.csr_matrix((num_windows, num_steps))
        step_of_window = sparse.kron(steps, np.ones((self._job.num_micro_batches, 1)))
        decreasing = sparse.diags([1.0, -1.0], [0, 1], shape=(num_steps - 1, num_steps))  # steps are interchangeable
        x = slice(0, num_lengths * num_windows)
        constraints = [
            optimize.LinearConstraint(  # every piece runs once
                sparse.hstack(
                    (
                        sparse.kron(sparse.identity(num_lengths), np.ones((1, num_windows))),
                        sparse.csr_matrix((num_lengths, num_steps)),
                    )
                ),
                counts,
                counts,
            ),
            optimize.LinearConstraint(sparse.hstack((sparse.kron(size, each_window), no_steps)), -np.inf, 1),
            optimize.LinearConstraint(sparse.hstack((sparse.kron(size**2, each_window), -step_of_window)), -np.inf, 0),
            optimize.LinearConstraint(
                sparse.hstack((sparse.csr_matrix((num_steps - 1, x.stop)), decreasing)), 0, np.inf
            ),
        ]
        is_count = np.arange(x.stop + num_steps) < x.stop
        result = optimize.milp(
            c=~is_count,
            integrality=is_count,
            bounds=optimize.Bounds(0, np.inf),
            constraints=constraints,
            options={"time_limit": TIME_LIMIT_SECONDS},
        )
        if result.x is None:
            raise RuntimeError(
                f"HiGHS found no packing of {counts.sum()} documents into {num_windows} windows within "
                f"{TIME_LIMIT_SECONDS} s ({result.message}); raise the time limit or pack fewer global batches"
            )
        numbers = np.rint(result.x[x]).astype(np.int64).reshape(num_lengths, num_windows)
        if (numbers.sum(1) != counts).any() or (lengths @ numbers > self._job.context_length).any():
            raise RuntimeError(
                f"HiGHS' packing of {counts.sum()} documents breaks a window of {self._job.context_length} tokens or "
                "loses a document by its tolerance; choose another policy"
            )
        return numbers
