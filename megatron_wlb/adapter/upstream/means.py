"""Losses of layers in upstream's log, by the micro-batches that ran."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def means_over(windows: Callable[[], float]) -> Callable[[Any], Any]:
    """Wrap a log of losses with a `loss_scale`: means over micro-batches of so many windows each in the step."""

    def mean(original: Any) -> Any:
        @functools.wraps(original)
        def report(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            call.arguments["loss_scale"] *= windows()
            return original(*call.args, **call.kwargs)

        return report

    return mean
