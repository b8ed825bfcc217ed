"""Order of passes: plain and interleaved 1F1B of megatron-core 0.19."""

from dataclasses import dataclass

import numpy as np

OP = np.dtype([("backward", "?"), ("chunk", "<i8"), ("micro_batch", "<i8")])
"""One forward or backward pass of a micro-batch through a model chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline step; interleaved with more than one chunk. Raises ValueError as upstream."""

    num_stages: int
    micro_batches_per_rank: int
    num_chunks: int = 1
    """Model chunks (virtual stages) per stage; chunk c of stage s is virtual stage c * num_stages + s."""
    group_size: int | None = None
    """`--microbatch-group-size-per-virtual-pipeline-stage`; None: `even_groups`."""
    overlap_transfers: bool = False
    """An interleaved stage waits for no send, and receives a pass ahead throughout (`adapter/p2p.py`). Upstream's
    default is to wait for each send, and in warm-up and cool-down for each receive."""
    by_turns: bool = False
    """After one more forward pass in warm-up, the layers of a forward pass and of the backward pass behind it run by
    turns (`--overlap-moe-expert-parallel-comm`)."""

    def __post_init__(self) -> None:
        stages, count = self.num_stages, self.micro_batches_per_rank
        if min(stages, count, self.num_chunks) < 1:
            raise ValueError(
                f"a pipeline has {stages} stages, {self.num_chunks} chunks, {count} micro-batches; give one of each"
            )
        if self.num_chunks == 1:
            if self.by_turns and stages > 1:
                raise ValueError(
                    f"a pipeline of {stages} stages without virtual ones does not overlap experts; give "
                    "--num-virtual-stages-per-pipeline-rank, or leave --overlap-moe-expert-parallel-comm out"
                )
            return
        if stages == 1:
            raise ValueError(
                f"{self.num_chunks} model chunks need at least 2 pipeline stages, not 1; leave virtual stages out"
            )
        if self.group < stages:
            raise ValueError(
                f"groups of {self.group} micro-batches are interleaved over {stages} pipeline stages; give groups of "
                f"at least {stages}"
            )
        if count not in (nearest := nearest_counts(count, stages, self.group)):
            raise ValueError(
                f"{count} micro-batches of a data-parallel rank cannot be interleaved over {stages} pipeline stages in "
                f"groups of {self.group}; give {' or '.join(map(str, nearest))}"
            )

    def __str__(self) -> str:
        """The passes of every stage, a line each: "F0 F1 B0 F2 ..." of micro-batches, "F0.1" in chunk 1 of several."""

        def name(backward: bool, chunk: int, micro_batch: int) -> str:
            return f"{'FB'[backward]}{micro_batch}" + f".{chunk}" * (self.num_chunks > 1)

        return "\n".join(" ".join(name(*op) for op in self.ops(stage).tolist()) for stage in range(self.num_stages))

    @property
    def group(self) -> int:
        return self.group_size or even_groups(self.micro_batches_per_rank, self.num_stages)

    def table(self) -> np.ndarray:
        """Return (micro-batch, chunk) of the k-th forward pass of every stage, int64 [passes, 2].

        As `get_schedule_table` of megatron/core/pipeline_parallel/schedules.py: groups of micro-batches go through all
        chunks one after the other; backward from the last chunk.
        """
        chunk, micro_batch = np.indices((self.num_chunks, self.micro_batches_per_rank)).reshape(2, -1)
        order = np.argsort(micro_batch // self.group, kind="stable")
        return np.stack((micro_batch, chunk), axis=1)[order]

    def warm_up(self, stage: int) -> int:
        """Return the forward passes of `stage` before its first backward; a step may have fewer."""
        behind = self.num_stages - 1 - stage
        first = behind if self.num_chunks == 1 else 2 * behind + (self.num_chunks - 1) * self.group
        return first + self.by_turns

    def in_flight(self, stage: int, weights: np.ndarray) -> float:
        """Return the most that a stage holds at once of forward passes, which weigh `weights`, float64 [chunks].

        Of two whose layers run by turns, one is there as far as the other has gone.
        """
        ops = self.ops(stage)
        held = (np.where(ops["backward"], -1, 1) * weights[ops["chunk"]]).cumsum()
        return float(held[~self.begins_pair(stage)].max())

    def begins_pair(self, stage: int) -> np.ndarray:
        """Return which of `ops` are forward passes that run by turns with the backward pass behind them, bool [ops]."""
        forward = ~self.ops(stage)["backward"]
        return forward & (forward.cumsum() > self.warm_up(stage)) & self.by_turns

    def turns(self, stage: int) -> np.ndarray:
        """Return the rank of passes on `stage`, int64 [2, num_chunks, micro_batches_per_rank].

        Forward is even, backward odd: the k-th backward comes right after forward number warm_up + k, or the last one.
        """
        table = self.table()
        turns = np.empty((2, self.num_chunks, self.micro_batches_per_rank), np.int64)
        turns[0, table[:, 1], table[:, 0]] = 2 * np.arange(len(table))
        turns[1] = turns[0, ::-1] + 2 * self.warm_up(stage) + 1
        return turns

    def ops(self, stage: int) -> np.ndarray:
        """Return OP rows of `stage` in order: warm-up, 1F1B, then backward only."""
        turns = self.turns(stage)
        order = np.argsort(turns, axis=None)
        ops = np.empty(len(order), OP)
        ops["backward"], ops["chunk"], ops["micro_batch"] = np.unravel_index(order, turns.shape)
        return ops

    def receive_order(self, stage: int) -> tuple[list[int], list[int]]:
        """Return the micro-batch of every receive of `stage`, forward and backward."""
        # The first stage receives a chunk's input from the last stage's previous chunk; what the last stage computes in
        # the last chunk goes to the loss. Backward is the same with stages and chunks counted from the other end.
        micro_batches, chunks = self.table().T
        all_but_last = micro_batches[chunks < self.num_chunks - 1]
        forward, backward = (all_but_last if stage == end else micro_batches for end in (0, self.num_stages - 1))
        return forward.tolist(), backward.tolist()


def even_groups(count: int, num_stages: int) -> int:
    """Return the size of interleaved groups for `count` micro-batches.

    About 1.5 times the stages, nearly equal. In groups as large as the pipeline, upstream's default, the first stage
    waits in every chunk for the slowest micro-batch; longer ones hold more activations and gain little. Fewer
    micro-batches than stages, which cannot be interleaved, give the number of stages.
    """
    for groups in range((4 * count + 3 * num_stages) // (6 * num_stages), 0, -1):
        size = -(-count // groups)
        if size >= num_stages and not 0 < count % size < num_stages:
            return size
    return num_stages


def nearest_counts(count: int, num_stages: int, group: int) -> tuple[int, ...]:
    """Return `count` if upstream can interleave it, else the nearest two that it can.

    No group, nor the rest in the last one, may be smaller than the pipeline: stages would wait for ever.
    """
    whole = count // group * group
    if not whole:
        return (group,)
    return (whole, whole + num_stages) if 0 < count - whole < num_stages else (count,)
