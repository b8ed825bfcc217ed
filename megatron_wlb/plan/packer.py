"""Stream + policy + state: the micro-batches of step t, and nothing lost between steps."""

import copy
import hashlib
import math
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from megatron_wlb.config import MAX_TOKENS, WlbConfig
from megatron_wlb.plan import native
from megatron_wlb.plan import state as saved
from megatron_wlb.plan.packing import POLICIES, make_policy
from megatron_wlb.plan.packing.original import OriginalPolicy
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.plan.types import DOCUMENT, Packing, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A packer between two steps. Holds arrays that nobody writes to: most snapshots are dropped unread."""

    header: dict[str, Any]
    """Everything of the state but what waits."""
    waiting: dict[str, np.ndarray]
    """In the policy, by queue: DOCUMENT arrays."""
    original: dict[str, np.ndarray]
    """In the original order, likewise."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    def state(self) -> dict[str, Any]:
        """Everything `Packer.load_state` needs, as JSON types; small: references to documents, never tokens.

        Raises ValueError for a policy that `load_state` would not know.
        """
        policy = self.header["policy"]
        if policy not in POLICIES:
            raise ValueError(
                f"the policy is {policy!r}, whose state could not be loaded; choose one of {', '.join(POLICIES)}, or "
                "tell plan/state.py of it"
            )
        waiting = {"waiting": self.waiting, "original": self.original}
        lists = {name: {place: rows.tolist() for place, rows in at.items()} for name, at in waiting.items()}
        return {"format": saved.FORMAT, "version": saved.VERSION, **copy.deepcopy(self.header), **lists}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Micro-batches of one step, and what the original order would have given."""

    step: int
    packing: Packing
    original: Packing
    """The windows that the documents drawn so far fill, N at most; all that is left at the end of the data."""
    snapshot: Snapshot
    """After this step."""

    @property
    def num_waiting(self) -> int:
        return self.snapshot.num_waiting

    @property
    def state(self) -> dict[str, Any]:
        """Of the packer after this step; made anew each time."""
        return self.snapshot.state()


class Packer:
    """Packs step after step; a policy draws from the stream what it needs.

    A document arrives in the step in whose global batch of N * C pairs it begins. A step that would hold no document
    at all, since all of its documents wait, moves on by another global batch; where a policy forgoes the rest of one,
    the next begins there.

    Args:
        stream: where documents come from.
        policy: which of them run when, and in which micro-batch.
        num_micro_batches: N, of a global batch over all data-parallel ranks.
        context_length: C in pairs.
        fingerprint: of the dataset; a state of another one is refused.
        policy_name: likewise; only those of `packing.POLICIES` have a state.
        use_native: cut in C++ what the original order would have given.
    """

    def __init__(
        self,
        stream: DocumentStream,
        policy: Policy,
        *,
        num_micro_batches: int,
        context_length: int,
        fingerprint: str,
        policy_name: str,
        use_native: bool = False,
    ) -> None:
        self._stream, self._policy = stream, policy
        self._original = OriginalPolicy(
            num_micro_batches=num_micro_batches, context_length=context_length, use_native=use_native
        )
        self._num_micro_batches, self._context_length = num_micro_batches, context_length
        self._settings = {"fingerprint": fingerprint, "context_length": context_length, "policy": policy_name}
        self._step = 0
        self._base = (0, 0)  # a step, and the position of the stream at which its global batch begins

    @property
    def step(self) -> int:
        """The step that `next` will plan."""
        return self._step

    @property
    def finished(self) -> bool:
        """The data is at its end, and nothing waits."""
        return self._stream.exhausted and not self._snapshot().num_waiting

    def next(self) -> PackedStep:
        """Plan the next step. Raises StopIteration if `finished`."""
        if self.finished:
            raise StopIteration("every document has been packed")
        draw = _Draw(self._stream, self._step, self._base, self._num_micro_batches * self._context_length)
        original = None
        while True:
            packing = self._policy.pack(self._step, draw)
            drawn = draw.drawn()
            if original is None or len(drawn):
                # A policy may draw less than a global batch; a window half full would count as a short micro-batch.
                original = self._original.cut(drawn, full=not draw.exhausted)
            if len(packing.documents):
                break
            draw.skip_a_global_batch()
        self._base = draw.base
        self._step += 1
        return PackedStep(step=self._step - 1, packing=packing, original=original, snapshot=self._snapshot())

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents that have arrived and not run, by queue of the policy: DOCUMENT arrays."""
        return self._policy.waiting()

    def state(self) -> dict[str, Any]:
        """Everything `load_state` needs; see `Snapshot.state`."""
        return self._snapshot().state()

    def _snapshot(self) -> Snapshot:
        header = {
            **self._settings,
            "num_micro_batches": self._num_micro_batches,
            "step": self._step,
            "base": list(self._base),
            "stream": self._stream.state(),
        }
        return Snapshot(header=header, waiting=self._policy.waiting(), original=self._original.waiting())

    def begin_at(self, step: int) -> None:
        """Call the first step `step`: a run that goes on with the data from its beginning. Before any step only."""
        self._step, self._base = step, (step, self._stream.position)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on after the step that `state` was taken after, also with another number of micro-batches.

        Raises ValueError, before anything changes, for another format or version, dataset, context window or policy,
        and for what no packer has saved (`plan/state.py`).
        """
        saved.check_format(state, "the state")
        if state.get("version") != saved.VERSION:
            raise ValueError(
                f"packer state of version {state.get('version')}; this release reads version {saved.VERSION}, resume "
                "with the release that saved it"
            )
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the packer state was saved with {name} {state.get(name)!r}, this run has {value!r}; "
                    "resume with the same setting"
                )
        waiting, original = saved.read(state, self._stream)
        before = self._stream.state(), self._policy.waiting(), self._original.waiting()
        try:
            self._load(state["stream"], waiting, original)
            base = self._base_of(state)
        except ValueError:
            self._load(*before)
            raise
        self._step, self._base = state["step"], base

    def _load(self, stream: dict[str, Any], waiting: dict[str, np.ndarray], original: dict[str, np.ndarray]) -> None:
        self._stream.load_state(stream)
        self._policy.load_waiting(waiting)
        self._original.load_waiting(original)

    def _base_of(self, state: dict[str, Any]) -> tuple[int, int]:
        """Where global batches are counted from after `state`, whose stream has been loaded."""
        if state["num_micro_batches"] != self._num_micro_batches:
            return state["step"], self._stream.position
        step, position = state["base"]
        batch_tokens = self._num_micro_batches * self._context_length
        ahead = self._stream.position - position - (state["step"] - step) * batch_tokens
        if state["policy"] in ("original", "wlb"):
            # These draw a global batch in every step, up to the document that crosses its end.
            if ahead >= self._context_length:
                raise saved.damaged(f"base {state['base']} does not fit its step and the position of the stream")
            if ahead < 0:  # at the end of the data, of which there may be more now
                return state["step"], self._stream.position
        return step, position


class _Draw:
    """The stream as a policy sees it in one step: global batches in, documents with their arrival out."""

    def __init__(self, stream: DocumentStream, step: int, base: tuple[int, int], batch_tokens: int) -> None:
        self._stream, self._step, self._batch_tokens = stream, step, batch_tokens
        self.base = base
        """A step, and the position of the stream at which its global batch begins."""
        self._rows = [np.empty(0, DOCUMENT)]

    @property
    def exhausted(self) -> bool:
        return self._stream.exhausted

    def __call__(self, global_batches: int) -> np.ndarray:
        step, position = self.base
        return self._take(position + (global_batches - step) * self._batch_tokens)

    def more(self, tokens: int) -> np.ndarray:
        return self._take(self._stream.position + tokens)

    def ahead(self, step: int) -> int:
        base_step, position = self.base
        return self._stream.position - position - (step - base_step) * self._batch_tokens

    def _take(self, limit: int) -> np.ndarray:
        step, position = self.base
        begin = self._stream.position
        rows = self._stream.take(limit)
        starts = begin + np.cumsum(rows["length"]) - rows["length"]
        # Not before it is taken: where documents don't fit their steps, the stream falls behind.
        rows["arrival"] = np.maximum(self._step, step + (starts - position) // self._batch_tokens)
        self._rows.append(rows)
        return rows

    def drawn(self) -> np.ndarray:
        """Documents that were drawn since this was asked last."""
        rows, self._rows = self._rows, self._rows[:1]
        return np.concatenate(rows)

    def forgo(self, step: int) -> None:
        if self.ahead(step) < 0 and not self.exhausted:
            self.base = step, self._stream.position

    def skip_a_global_batch(self) -> None:
        step, position = self.base
        self.base = step, position + self._batch_tokens


def make_packer(
    stream: DocumentStream,
    *,
    num_micro_batches: int,
    crossover_tokens: int,
    policy: str = "adaptive",
    max_tokens: int | None = None,
    fingerprint: str | None = None,
    use_native: bool | None = None,
    **settings: Any,
) -> Packer:
    """A packer of `stream`, in windows of its context length C.

    Args:
        stream: where documents come from.
        num_micro_batches: N, of a global batch over all data-parallel ranks.
        crossover_tokens: Lc, the document length at which attention costs as much as everything else.
        policy: one of `packing.POLICIES`.
        max_tokens: S_max, the longest micro-batch in pairs; by default 1.25 C.
        fingerprint: of the dataset; by default a digest of its documents' lengths.
        use_native: whether C++ packs, to the same result; by default where it can.
        settings: of the policy, those of `packing.make_policy`; outlier thresholds are by default C / 2 and 3 C / 4.

    Raises ValueError for settings out of their range, an unknown policy, and a native core that is not there.
    """
    context_length = stream.context_length
    if max_tokens is None:
        max_tokens = math.ceil(1.25 * context_length)
    for name, value in (("num_micro_batches", num_micro_batches), ("crossover_tokens", crossover_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if max_tokens < context_length:
        raise ValueError(
            f"max_tokens {max_tokens} is under the context length {context_length}: a document of a full window would "
            f"fit nowhere; give at least {context_length}"
        )
    if max_tokens > MAX_TOKENS:
        raise ValueError(f"max_tokens is {max_tokens}; work is exact up to {MAX_TOKENS} tokens, give at most that")
    if num_micro_batches * max_tokens * (context_length + crossover_tokens) >= 1 << 63:
        raise ValueError(
            f"the work of {num_micro_batches} micro-batches of {max_tokens} tokens at a crossover of "
            f"{crossover_tokens} overflows 64 bits; lower one of them"
        )
    if use_native and not native.AVAILABLE:
        raise ValueError(f"use_native is {use_native}, but the native core {native.WHY_NOT}")
    if use_native is None:
        use_native = native.AVAILABLE
    sizes: dict[str, Any] = {"num_micro_batches": index(num_micro_batches), "context_length": context_length}
    settings.setdefault("outlier_thresholds", WlbConfig().thresholds_for(context_length))
    made = make_policy(
        policy, **sizes, max_tokens=max_tokens, crossover_tokens=crossover_tokens, use_native=use_native, **settings
    )
    if fingerprint is None:
        fingerprint = _fingerprint(stream)
    return Packer(stream, made, **sizes, fingerprint=fingerprint, policy_name=policy, use_native=use_native)


def _fingerprint(stream: DocumentStream) -> str:
    """Digest of what the order of documents depends on, besides the seed."""
    digest = hashlib.blake2b(digest_size=16)
    for source in stream.sources:
        digest.update(repr((source.first, len(source.pairs), source.weight)).encode())
        digest.update(np.ascontiguousarray(source.pairs[:], np.int64))
    return digest.hexdigest()
