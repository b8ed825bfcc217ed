"""Adaptive packing (ours): a waiting document runs in the first step that stays balanced with it.

Algorithm 1 of the paper decides by length thresholds which documents wait. Here nothing but balance decides. Documents
of at most an eighth of the window are *fluid*: they run in the order in which they came and level whatever the longer,
*solid* ones leave uneven. In every step the policy tries sets of solid documents of neighbouring length, places each
longest first, predicts the level after the fluid has been poured in, and takes the set that relieves the queue most
among those that stay balanced. `docs/packing.md` describes the algorithm and its guarantees.
"""

import numpy as np

from megatron_wlb.config import MAX_TOLERANCE, PACKING_MODES, SHORTEST_DELAY_BOUND
from megatron_wlb.plan import native
from megatron_wlb.plan.packing.adaptive_core import AdaptiveSettings, PythonAdaptiveCore
from megatron_wlb.plan.types import DOCUMENT, Draw, Packing
from megatron_wlb.plan.workload import document_work

LOOK_AHEAD_BATCHES = 2
"""Constant tokens: global batches that are known when a step is chosen, so that long documents find partners."""
TOLERANCES = {"constant-tokens": (0.003, 0.008), "low-displacement": (0.015, 0.035)}
"""Of each mode: tolerance and age tolerance."""


def settings(
    *,
    num_micro_batches: int,
    max_tokens: int,
    context_length: int,
    mode: str,
    max_delay_steps: int,
    balance_tolerance: float | None = None,
    age_tolerance: float | None = None,
) -> AdaptiveSettings:
    """Settings of a mode; its numbers were searched on four samples of F2 at N = 4, and serve for everything.

    `constant-tokens` keeps N * C tokens a step and reads ahead; `low-displacement` runs documents when they come, and
    lets tokens vary with S_max. Tolerances that are None are the mode's own. Raises ValueError for another mode, for a
    bound on the delay that cannot be held, and for tolerances that are not from 0 to MAX_TOLERANCE.
    """
    if mode not in PACKING_MODES:
        raise ValueError(f"unknown mode {mode!r} of adaptive packing; choose one of {', '.join(PACKING_MODES)}")
    if max_delay_steps < SHORTEST_DELAY_BOUND:
        raise ValueError(
            f"max_delay_steps is {max_delay_steps}; adaptive packing can guarantee {SHORTEST_DELAY_BOUND} or more, "
            "give at least that"
        )
    given = {"balance_tolerance": balance_tolerance, "age_tolerance": age_tolerance}
    for name, value in given.items():
        if value is not None and not 0 <= value <= MAX_TOLERANCE:
            raise ValueError(f"{name} is {value}; it must be from 0 to {MAX_TOLERANCE:g}")
    tolerance, per_step = (
        own if value is None else value for own, value in zip(TOLERANCES[mode], given.values(), strict=True)
    )
    constant = mode == "constant-tokens"
    return AdaptiveSettings(
        num_micro_batches=num_micro_batches,
        max_tokens=max_tokens,
        context_length=context_length,
        constant_tokens=constant,
        max_delay_steps=max_delay_steps,
        tolerance=tolerance,
        age_tolerance=per_step,
        ratio_limit=max(1.045 if constant else 1.2, 1 + tolerance),
        token_band=0.07 if constant else max_tokens / context_length - 1,
        token_repay=0.0125 if constant else 0.6,
        imbalance_price=8.0 if constant else 12.0,
        token_price=3.0 if constant else 0.0,
    )


class AdaptivePolicy:
    """Micro-batches of equal work, without thresholds; no document is late by more than `max_delay_steps`.

    Args:
        settings: what the function of that name gave.
        crossover_tokens: Lc of the work model.
        use_native: run the C++ core; the Python reference gives the same plans to the bit.
    """

    def __init__(self, settings: AdaptiveSettings, *, crossover_tokens: int, use_native: bool) -> None:
        self._settings = settings
        self._core = native.AdaptiveCore(settings) if use_native else PythonAdaptiveCore(settings)
        self._batch_tokens = settings.num_micro_batches * settings.context_length
        self._crossover_tokens = crossover_tokens
        self._waiting = np.empty(0, DOCUMENT)  # ordered by index

    def pack(self, step: int, draw: Draw) -> Packing:
        """Pack step `step`; documents stay whole. At the end of the data what waits runs in balanced steps."""
        self._draw(draw, self._room() if self._settings.constant_tokens else -draw.ahead(step + 1))
        # Enough fluid for the shortest step, so that solid documents need not run for want of tokens.
        while not self._settings.constant_tokens and self._room() > 0:
            lacking = (1 - self._settings.token_repay) * self._batch_tokens - self._fluid_tokens()
            if not self._draw(draw, round(lacking)):
                break
        credit = int(self._waiting["length"].sum()) - draw.ahead(step)
        order, bounds = self._core.step(step, credit)
        chosen = np.searchsorted(self._waiting["index"], order)
        documents = self._waiting[chosen]
        self._waiting = np.delete(self._waiting, chosen)
        return Packing(documents=documents, bounds=bounds)

    def _room(self) -> int:
        """Tokens that may be drawn: what can't be packed must not pile up for ever, so the stream waits for it."""
        return LOOK_AHEAD_BATCHES * self._batch_tokens - int(self._waiting["length"].sum())

    def _draw(self, draw: Draw, tokens: int) -> int:
        rows = draw.more(min(tokens, self._room()))
        self._add(rows)
        return len(rows)

    def _fluid_tokens(self) -> int:
        lengths = self._waiting["length"]
        return int(lengths[8 * lengths <= self._settings.context_length].sum())

    def _add(self, rows: np.ndarray) -> None:
        if len(rows):
            self._waiting = np.concatenate((self._waiting, rows))
            work = document_work(rows["length"], self._crossover_tokens)
            self._core.add(rows["index"].copy(), rows["length"].copy(), work, rows["arrival"].copy())

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents known and not yet packed, in the order of the stream: DOCUMENT arrays."""
        return {"pool": self._waiting}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` of any policy gave."""
        rows = np.concatenate(list(waiting.values()))
        self._waiting = np.empty(0, DOCUMENT)
        self._core = type(self._core)(self._settings)
        self._add(rows[np.argsort(rows["index"])])
