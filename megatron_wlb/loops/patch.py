"""Replaces a function of a loop in every module that has imported it, and divides the loop's batches."""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.plan.closed import divide


def replaced(module: str, name: str, parameters: str, make: Callable[[Any], Any]) -> contextlib.ExitStack:
    """Replace a function by `make(original)`, and return the stack that takes it back.

    Modules that import it by name have the same function before and after. Raises RuntimeError unless its parameters
    are `parameters`, in words.
    """
    original = getattr(importlib.import_module(module), name, None)
    present = " ".join(inspect.signature(original).parameters) if original else "is missing"
    if not original or present != parameters:
        raise RuntimeError(
            f"{module}.{name} is not the function that megatron_wlb expects ({present}, not {parameters}); take the "
            "version in docs/integrations.md, or a newer megatron_wlb"
        )
    ours = functools.wraps(original)(make(original))
    _exchange(name, original, ours)
    undo = contextlib.ExitStack()
    undo.callback(_exchange, name, ours, original)
    return undo


def _exchange(name: str, old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def sized(job: Job, max_tokens: int, **layout: Any) -> Job:
    """Return the job with micro-batches of at most `max_tokens`, and fields of its layout.

    Raises ValueError if its ranks cannot share so many tokens.
    """
    parallel = replace(job.parallel, **layout)
    return replace(
        job,
        parallel=parallel,
        context_length=max_tokens,
        max_tokens=max_tokens,
        global_batch_size=parallel.dp,
        num_micro_batches=parallel.dp * (parallel.group_size or parallel.pp),
    )


def divided(
    lengths: Sequence[int] | np.ndarray,
    job: Job,
    max_tokens: int,
    *,
    num_micro_batches: int | None = None,
    **layout: Any,
) -> list[list[list[int]]]:
    """Return the places in `lengths` that every micro-batch of every rank holds, by `divide` for the `sized` job."""
    return divide(lengths, sized(job, max_tokens, **layout), num_micro_batches=num_micro_batches)
