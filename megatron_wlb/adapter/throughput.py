"""Upstream's FLOP count and TFLOP/s for steps whose documents vary in length and number."""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from megatron.core.transformer.utils import is_layer_window_attention


def attended_squares(args: Namespace, lengths: np.ndarray) -> float:
    """Twice the token pairs that attention computes, averaged over layers with and without sliding windows."""
    exact = lengths.astype(np.float64)
    squares = (exact**2).sum()
    if window := args.window_size:
        layers = range(1, args.num_layers + 1)
        windowed = sum(is_layer_window_attention(window, args.window_attn_skip_freq, layer) for layer in layers)
        beyond = np.maximum(exact - (window[0] + 1), 0) if window[0] >= 0 else np.zeros(1)
        squares -= windowed / args.num_layers * (beyond**2).sum()
    return float(squares)


class Throughput:
    """Passes the documents of a step to upstream's FLOP formula.

    Upstream calls the formula after every step, and once more for a log line. A log line shows the mean time per step
    since the previous line, so it gets the mean FLOPs of these steps.

    Args:
        trained: returns the document lengths of the last trained step, int64 [n].
    """

    def __init__(self, trained: Callable[[], np.ndarray]) -> None:
        self._trained = trained
        self._steps: list[float] = []
        self._in_line = False

    def counted(self, original: Any) -> Any:
        """Wrap upstream's `num_floating_point_operations`."""

        @functools.wraps(original)
        def num_floating_point_operations(args: Namespace, batch_size: int, *rest: Any, **options: Any) -> float:
            if self._in_line:
                return sum(self._steps) / len(self._steps)
            lengths = self._trained()
            operations = original(
                args,
                batch_size,
                seqlen_squared_sum_in_batch=attended_squares(args, lengths),
                total_real_tokens_in_batch=float(lengths.sum()),
            )
            self._steps.append(operations)
            return operations

        return num_floating_point_operations

    @contextlib.contextmanager
    def line(self, totals: dict[str, Any]) -> Iterator[None]:
        """Wrap a call of upstream's `training_log`; `totals`, its total_loss_dict, counts the line's steps."""
        steps = 1 + sum(int(totals.get(f"{kind} iterations", 0)) for kind in ("advanced", "skipped"))
        del self._steps[:-steps]
        self._in_line = True
        try:
            yield
        finally:
            self._in_line = False
