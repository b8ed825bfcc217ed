"""Router and MTP losses in upstream's log, by the micro-batches that ran."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megatron_wlb.adapter.upstream.replaced import replaced


@contextlib.contextmanager
def mean_losses(windows: Callable[[], float]) -> Iterator[None]:
    """Log router and MTP losses as means over micro-batches of so many windows each in the step."""
    tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").MoEMetricsTracker
    helper = importlib.import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper

    def mean(original: Any) -> Any:
        @functools.wraps(original)
        def report(*args: Any, **kwargs: Any) -> Any:
            call = inspect.signature(original).bind(*args, **kwargs)
            call.arguments["loss_scale"] *= windows()
            return original(*call.args, **call.kwargs)

        return report

    with (
        replaced(tracker, "report", mean, ("loss_scale",)),
        replaced(helper, "track_mtp_metrics", mean, ("loss_scale",)),
    ):
        yield
