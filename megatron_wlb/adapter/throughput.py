"""Upstream's FLOP count and TFLOP/s, for the documents of the steps."""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from megatron.core.transformer.utils import is_layer_window_attention


def attended_squares(args: Namespace, lengths: np.ndarray) -> float:
    """Return twice the token pairs of attention, averaged over all layers."""
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

    Upstream calls it after every step, and for a log line, which shows the mean time of its steps: it gets their mean
    FLOPs. `trained` returns the document lengths of the last trained step, int64 [n].
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
            counts = {
                "seqlen_squared_sum_in_batch": attended_squares(args, lengths),
                "total_real_tokens_in_batch": float(lengths.sum()),
            }
            self._steps.append(original(args, batch_size, **counts))
            return self._steps[-1]

        return num_floating_point_operations

    @contextlib.contextmanager
    def line(self, totals: dict[str, Any]) -> Iterator[None]:
        """Wrap a call of `training_log`, whose `totals` (loss dict) count its steps."""
        steps = 1 + sum(int(totals.get(f"{kind} iterations", 0)) for kind in ("advanced", "skipped"))
        del self._steps[:-steps]
        self._in_line = True
        yield
        self._in_line = False
