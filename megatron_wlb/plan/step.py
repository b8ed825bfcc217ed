"""The plan of step t: which documents each micro-batch holds, on which data-parallel rank, in which CP shards."""

import atexit
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wlb.plan import metrics, native, pipeline, sharding
from megatron_wlb.plan.packer import PackedStep, Packer, Snapshot
from megatron_wlb.plan.types import Packing, ShardPlan
from megatron_wlb.plan.workload import FLOPS_PROFILE, KernelModel, document_work

_FLOPS = FLOPS_PROFILE.kernel(heads=1)
_LOOK_SECONDS = 1.0
"""How often a reader that waits looks whether the planner's thread still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a rank stands in data and context parallelism, the pipeline around it, and how costs are judged."""

    dp_size: int
    dp_rank: int
    cp_size: int = 1
    pp_size: int = 1
    """Pipeline stages."""
    vp_size: int = 1
    """Model chunks (virtual stages) per pipeline stage."""
    unit_tokens: int = 1
    """Micro-batches are padded at their tail to a multiple of this: CP * lcm(2, TP if sequence parallel else 1)."""
    cp_sharding: str = "adaptive"
    kernel: KernelModel = _FLOPS
    crossover_tokens: int
    balance: bool = True
    """Place micro-batches on data-parallel ranks and order them there by work; False keeps upstream's order."""
    free_order: bool = True
    """Documents of a micro-batch may change places where per-sequence sharding gains by it."""
    use_native: bool = native.AVAILABLE

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(
                f"dp_rank is {self.dp_rank}; of {self.dp_size} data-parallel ranks it must be 0 to dp_size - 1"
            )
        if self.cp_size > 1 and self.unit_tokens % (2 * self.cp_size):
            raise ValueError(
                f"unit_tokens is {self.unit_tokens}; {self.cp_size} context-parallel ranks hold two chunks each, give "
                f"a multiple of {2 * self.cp_size}"
            )


def is_order_free(packing: str, cp_sharding: str) -> bool:
    """`Layout.free_order` of a run: original packing with per-sequence sharding is Megatron's way, and stays so."""
    return (packing, cp_sharding) != ("original", "per-sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """One micro-batch of this data-parallel rank."""

    step: int
    documents: np.ndarray
    """DOCUMENT [n], in packed order."""
    shards: ShardPlan
    """Lengths include the tail padding as a last document of its own."""

    @property
    def tokens(self) -> int:
        """Trained tokens, without padding."""
        return int(self.documents["length"].sum())

    @property
    def padded_tokens(self) -> int:
        return int(self.shards.lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything a rank needs to know about one step."""

    step: int
    micro_batches: tuple[MicroBatchPlan, ...]
    """Of this data-parallel rank, in pipeline order."""
    packing: Packing
    """All N micro-batches."""
    work: np.ndarray
    """Work of all N micro-batches, int64 [N]."""
    cost: int
    """About the time of the costliest data-parallel rank, in units of work (`pipeline.rank_cost`)."""
    original_work: np.ndarray
    """Work of the micro-batches that original packing would have made of the documents drawn, int64 [N at most]."""
    tokens: int
    """Trained tokens of all N micro-batches."""
    delays: dict[int, int]
    """Tokens by the number of steps they ran after they arrived."""
    num_waiting: int
    digest: int
    """63 bits that are equal on two ranks if and only if (but for chance) they planned the same."""
    snapshot: Snapshot
    """Of the packer after this step."""

    @property
    def state(self) -> dict[str, Any]:
        """Of the packer after this step; made anew each time."""
        return self.snapshot.state()


def plan_step(packer: Packer, layout: Layout) -> StepPlan:
    """Plan the packer's next step; reads top to bottom as the work does: pack, place, shard.

    Raises StopIteration if the packer is finished, and ValueError if the data-parallel ranks do not divide N.
    """
    packed = packer.next()
    packing = packed.packing
    if len(packing) % layout.dp_size:
        raise ValueError(
            f"{len(packing)} micro-batches a step cannot be shared by {layout.dp_size} data-parallel ranks; choose a "
            f"multiple of {layout.dp_size}"
        )
    work = packing.sums(document_work(packing.documents["length"], layout.crossover_tokens))
    placement = _placed(work, layout)
    mine = _ordered(work, placement[layout.dp_rank], layout)
    micro_batches = tuple(shard_micro_batch(packed.step, packing.micro_batch(i), layout) for i in mine)
    original = packed.original
    return StepPlan(
        step=packed.step,
        micro_batches=micro_batches,
        packing=packing,
        work=work,
        cost=int(pipeline.rank_cost(work[placement], layout.pp_size, layout.vp_size).max()),
        original_work=original.sums(document_work(original.documents["length"], layout.crossover_tokens)),
        tokens=int(packing.documents["length"].sum()),
        delays=metrics.delays(packing, packed.step),
        num_waiting=packed.num_waiting,
        digest=_digest(packed, placement, layout),
        snapshot=packed.snapshot,
    )


def shard_step(lengths: Sequence[np.ndarray], layout: Layout) -> list[list[ShardPlan]]:
    """What `plan_step` makes of micro-batches whose documents have `lengths` (int64 [n] each), without documents.

    Returns the shards of every data-parallel rank's micro-batches in pipeline order.
    """
    work = np.array([document_work(each, layout.crossover_tokens).sum() for each in lengths])
    return [[_shard(lengths[i], layout)[1] for i in _ordered(work, row, layout)] for row in _placed(work, layout)]


def shard_micro_batch(step: int, documents: np.ndarray, layout: Layout) -> MicroBatchPlan:
    """Pad a micro-batch once at its tail, never per document, and shard it."""
    order, shards = _shard(documents["length"], layout)
    return MicroBatchPlan(step=step, documents=documents[order], shards=shards)


def _placed(work: np.ndarray, layout: Layout) -> np.ndarray:
    return pipeline.place(
        work,
        layout.dp_size,
        balance=layout.balance,
        num_stages=layout.pp_size,
        num_chunks=layout.vp_size,
        use_native=layout.use_native,
    )


def _ordered(work: np.ndarray, mine: np.ndarray, layout: Layout) -> list[int]:
    """A rank's micro-batches in pipeline order."""
    if layout.balance:
        mine = mine[pipeline.order(work[mine], layout.pp_size, layout.vp_size, use_native=layout.use_native)]
    return mine.tolist()


def _shard(lengths: np.ndarray, layout: Layout) -> tuple[np.ndarray, ShardPlan]:
    """The order that documents come to have within their micro-batch, and its shards."""
    tokens, cp_size, strategy = int(lengths.sum()), layout.cp_size, layout.cp_sharding
    padding = -tokens % layout.unit_tokens or (0 if tokens else layout.unit_tokens)

    def shard(order: np.ndarray, strategy: str) -> tuple[np.ndarray, ShardPlan]:
        padded = np.append(lengths[order], [padding] if padding else []).astype(np.int64)
        return order, sharding.shard(padded, cp_size, strategy, layout.kernel, use_native=layout.use_native)

    made = shard(np.arange(len(lengths)), strategy)
    if layout.free_order and cp_size > 1 and "per-sequence" in sharding.STRATEGIES[strategy]:
        mirrored = shard(sharding.mirrored_order(lengths), "per-sequence")
        made = min(made, mirrored, key=lambda pair: pair[1].time)
    return made


def _digest(packed: PackedStep, placement: np.ndarray, layout: Layout) -> int:
    # Ranks order their own micro-batches only, by the work of those and the pipeline.
    pipelines = (layout.pp_size, layout.vp_size, layout.crossover_tokens)
    sharding_by = (layout.cp_size, layout.unit_tokens, layout.cp_sharding, layout.free_order, layout.kernel)
    shared = (packed.step, layout.dp_size, *pipelines, *sharding_by)
    digest = hashlib.blake2b(repr(shared).encode(), digest_size=8)
    for array in (packed.packing.documents, packed.packing.bounds, placement):
        digest.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(digest.digest()) >> 1


class Planner:
    """Plans steps in a thread of its own, ahead of training by at most `ahead` steps.

    Steps are kept until `release`, so that several data iterators (one per virtual stage) and replays of a step read
    the same plan; keyed by step number, never by the number of reads. The thread lives until `close`, or until the
    process ends.
    """

    def __init__(self, packer: Packer, layout: Layout, *, first_step: int, ahead: int) -> None:
        self._packer, self._layout, self._ahead = packer, layout, ahead
        self._plans: dict[int, StepPlan] = {}
        self._wanted, self._next = first_step, first_step
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.wait_seconds = 0.0
        """Time that readers have waited for the planner."""

    def get(self, step: int) -> StepPlan:
        """The plan of `step`; waits for the planner.

        Raises RuntimeError where there is none, from what the planner raised, and KeyError for a released step.
        """
        begin = time.perf_counter()
        with self._changed:
            if self._thread is None:
                # Started late, so that a process that only makes a planner may be forked.
                self._thread = threading.Thread(target=self._run, name="wlb-planner", daemon=True)
                self._thread.start()
                # A thread that came back from C++ into an interpreter at its end would abort the process.
                atexit.register(self.close)
            self._wanted = max(self._wanted, step)
            self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._next > step or self._error is not None, _LOOK_SECONDS):
                if not self._thread.is_alive():
                    self._error = RuntimeError(
                        f"the planner's thread has ended at step {self._next}, or this process was forked since; "
                        "read plans in the process that trains"
                    )
            self.wait_seconds += time.perf_counter() - begin
            if self._next <= step and isinstance(self._error, StopIteration):
                raise RuntimeError(
                    f"the data ends before step {step}: after {self._next} steps every document has been trained; "
                    "train fewer steps, or more epochs"
                ) from self._error
            if self._next <= step:
                raise RuntimeError(f"planning failed before step {step}; see its cause above") from self._error
            return self._plans[step]

    def release(self, step: int) -> None:
        """Forget the steps before `step`."""
        with self._changed:
            for old in [s for s in self._plans if s < step]:
                del self._plans[old]

    def close(self) -> None:
        """End the planner's thread, after the step that it is at; what is planned can still be read."""
        atexit.unregister(self.close)
        if self._thread is not None and not self._thread.is_alive():
            return  # forked since, perhaps, and the lock held by a thread that is not here
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._next <= self._wanted + self._ahead)
                    if self._closed:
                        return
                plan = plan_step(self._packer, self._layout)
                if plan.step != self._next:
                    raise RuntimeError(
                        f"the packer is at step {plan.step}, training at step {self._next}; load the state of that step"
                    )
                with self._changed:
                    self._plans[plan.step] = plan
                    self._next += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
