"""Stream + policy + state: the micro-batches of step t, and nothing lost between steps."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_wlb.plan.packing import OriginalPolicy
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.plan.types import DOCUMENT, Packing

FORMAT = "megatron-wlb-packer-state"
VERSION = 1


class Policy(Protocol):
    """What a packing policy does; see `packing/`."""

    def pack(self, arrived: np.ndarray) -> Packing: ...
    def waiting(self) -> dict[str, np.ndarray]: ...
    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Micro-batches of one step, what the original order would have given, and the state after it."""

    step: int
    packing: Packing
    original: Packing
    num_waiting: int
    state: dict[str, Any]


class Packer:
    """Packs step after step. Every step draws the documents of one global batch, N * C pairs, from the stream.

    A step that would hold no document at all (all of its documents wait) draws another global batch.
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
    ) -> None:
        self._stream, self._policy = stream, policy
        self._original = OriginalPolicy(num_micro_batches=num_micro_batches, context_length=context_length)
        self._batch_tokens = num_micro_batches * context_length
        self._settings = {
            "fingerprint": fingerprint,
            "context_length": context_length,
            "num_micro_batches": num_micro_batches,
            "policy": policy_name,
        }
        self._step, self._drawn_tokens = 0, 0

    @property
    def step(self) -> int:
        """The step that `next` will plan."""
        return self._step

    def next(self) -> PackedStep:
        """Plan the next step."""
        while True:
            self._drawn_tokens += self._batch_tokens
            arrived = self._stream.take(self._drawn_tokens)
            arrived["arrival"] = self._step
            original = self._original.pack(arrived)
            packing = self._policy.pack(arrived)
            if len(packing.documents):
                break
        self._step += 1
        waiting = sum(len(rows) for rows in self._policy.waiting().values())
        return PackedStep(
            step=self._step - 1, packing=packing, original=original, num_waiting=waiting, state=self.state()
        )

    def state(self) -> dict[str, Any]:
        """Everything `load_state` needs, as JSON types; small: references to documents, never tokens."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **self._settings,
            "step": self._step,
            "drawn_tokens": self._drawn_tokens,
            "stream": self._stream.state(),
            "waiting": _to_json(self._policy.waiting()),
            "original": _to_json(self._original.waiting()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on after the step that `state` was taken after.

        Raises ValueError, before anything changes, for another format or version, dataset, context window, policy or
        global batch size, or if something is missing.
        """
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"not a packer state: its format is not {FORMAT!r}")
        if state.get("version") != VERSION:
            raise ValueError(f"packer state of version {state.get('version')}; this release reads version {VERSION}")
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the packer state was saved with {name} {state.get(name)!r}, this run has {value!r}; "
                    "resume with the same setting"
                )
        try:
            step, drawn_tokens = int(state["step"]), int(state["drawn_tokens"])
            waiting, original = _from_json(state["waiting"]), _from_json(state["original"])
            self._stream.load_state(state["stream"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the packer state is damaged: {error!r}; restore it or resume an older one") from error
        self._policy.load_waiting(waiting)
        self._original.load_waiting(original)
        self._step, self._drawn_tokens = step, drawn_tokens


def _to_json(waiting: dict[str, np.ndarray]) -> dict[str, list[tuple[int, ...]]]:
    return {name: rows.tolist() for name, rows in waiting.items()}


def _from_json(waiting: dict[str, list[list[int]]]) -> dict[str, np.ndarray]:
    return {name: np.array([tuple(r) for r in rows], DOCUMENT) for name, rows in waiting.items()}
