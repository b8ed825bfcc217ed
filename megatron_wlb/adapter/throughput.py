"""Upstream's FLOP counts and TFLOP/s for what steps with `--wlb` train: documents of many lengths, tokens that vary."""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from megatron.core.transformer.utils import is_layer_window_attention


def operations(formula: Callable[..., float], args: Namespace, lengths: np.ndarray) -> float:
    """Floating-point operations of documents by upstream's formula, which knows sequences of one length only.

    It is linear in tokens and in squares of lengths (causal attention is half the square), so that n sequences of one
    length have the operations of documents with the same sums.

    Args:
        formula: upstream's `num_floating_point_operations(args, batch_size)`.
        lengths: int64 [documents], trained tokens of each.
    """
    tokens, squares = float(lengths.sum()), attended_squares(args, lengths)
    as_one_length = Namespace(**{**vars(args), "seq_length": squares / tokens})
    return formula(as_one_length, tokens * tokens / squares)


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
    """Stands in for upstream's formula, which is asked after every step, and once more for a log line.

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
            self._steps.append(operations(original, args, self._trained()))
            return self._steps[-1]

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
