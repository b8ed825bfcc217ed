"""Upstream's FLOP counts and TFLOP/s for what steps with `--wlb` train: documents of many lengths, tokens that vary."""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from megatron.core.transformer.utils import is_layer_window_attention


def attended_squares(args: Namespace, lengths: np.ndarray) -> float:
    """Twice the pairs of tokens that attention computes, the mean over layers; sliding windows shorten some of them."""
    exact = lengths.astype(np.float64)
    squares = (exact**2).sum()
    if window := args.window_size:
        layers = range(1, args.num_layers + 1)
        windowed = sum(is_layer_window_attention(window, args.window_attn_skip_freq, layer) for layer in layers)
        beyond = np.maximum(exact - (window[0] + 1), 0) if window[0] >= 0 else np.zeros(1)
        squares -= windowed / args.num_layers * (beyond**2).sum()
    return float(squares)


class Throughput:
    """Gives upstream's formula the documents of a step. It is asked after every step, and once more for a log line.

    A line is about the time per step since the one before, and so about the mean operations of these steps.

    Args:
        trained: gives the lengths of the documents of the step that was trained last, int64 [n].
    """

    def __init__(self, trained: Callable[[], np.ndarray]) -> None:
        self._trained = trained
        self._steps: list[float] = []
        self._in_line = False

    def counted(self, original: Any) -> Any:
        """The replacement of `num_floating_point_operations`."""

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
        """Around upstream's `training_log`; `totals` is its total_loss_dict, which counts the steps of the line."""
        steps = 1 + sum(int(totals.get(f"{kind} iterations", 0)) for kind in ("advanced", "skipped"))
        del self._steps[:-steps]
        self._in_line = True
        try:
            yield
        finally:
            self._in_line = False
