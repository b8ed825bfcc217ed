"""ms-swift 4.6.0: its packs of sequences."""

import contextlib
from typing import Any

from megatron_wlb.job import Job
from megatron_wlb.loops.patch import divided, replaced


def balanced(job: Job) -> contextlib.ExitStack:
    """Fill ms-swift's packs (`packing_strategy` binpack) with equal work by the job, before it makes its dataset.

    Packs are as few as hold the sequences. Which rank and step trains a pack stays ms-swift's, so the job's layout
    counts for its work alone. Processes that ms-swift starts by spawn do not have it. Raises RuntimeError if ms-swift's
    function is another.
    """

    def make(original: Any) -> Any:
        def calculate_matched_group(
            sequences: list[Any], packing_length: int, is_finished: bool = True, strategy: str = "binpack"
        ) -> tuple[list[Any], list[Any]]:
            if strategy != "binpack" or not sequences:
                kept: tuple[list[Any], list[Any]] = original(sequences, packing_length, is_finished, strategy)
                return kept
            lengths = [length for _, length in sequences]
            found = divided(lengths, job, packing_length, dp=1, pp=1, vpp=1, ep=1, etp=None)[0]
            packs = [[sequences[i] for i in rows] for rows in found]
            # The emptiest waits for more sequences.
            packs.sort(key=lambda pack: -sum(length for _, length in pack))
            return (packs, []) if is_finished else (packs[:-1], packs[-1])

        return calculate_matched_group

    parameters = "sequences packing_length is_finished strategy"
    return replaced("swift.dataset.packing", "calculate_matched_group", parameters, make)
