"""Megatron's arguments that `--wlb` cannot serve, with reason and remedy: by the table, and by rules over several."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_wlb import layers, packing
from megatron_wlb.describe import data
from megatron_wlb.describe.arguments import ARGUMENTS, Refused, flag_of, rows

RULES: layers.Rules = {
    **layers.refused(),
    "--multiple-validation-sets: upstream wants --full-validation with it; give both, or blend the sets": lambda a: (
        a.multiple_validation_sets and not a.full_validation
    ),
    **data.REFUSED,
    (
        "with two pipeline ranks and virtual stages the next rank is also the previous one, and two messages of one "
        "batch to it could be swapped; leave --no-overlap-p2p-communication out"
    ): lambda a: (
        a.pipeline_model_parallel_size == 2
        and a.overlap_p2p_comm is False
        and (a.num_virtual_stages_per_pipeline_rank or a.num_layers_per_virtual_pipeline_stage)
    ),
    "--apply-layernorm-1p is not supported with --transformer-impl local; leave one of them out": lambda a: (
        a.transformer_impl == "local" and a.layernorm_zero_centered_gamma
    ),
    **packing.REFUSED,
}
"""Messages, and whether arguments `a` are refused; a missing one is None."""


class Lenient(Namespace):
    """Arguments that are None if missing."""

    def __getattr__(self, name: str) -> None:
        return None


def refusals(args: Namespace) -> Iterator[str]:
    """Yield why `--wlb` cannot serve arguments: flag, reason and remedy."""
    given = Lenient(**vars(args))
    for name, _ in rows(Refused):
        if why := refusal(name, getattr(given, name)):
            yield why
    for message, refused in RULES.items():
        if refused(given):
            yield message


def refusal(name: str, value: Any) -> str:
    """Return why an argument has a row that refuses this value; "" if none does."""
    found = (row for row in ARGUMENTS[name] if isinstance(row, Refused) and row.when(value))
    return next((f"{flag_of(name)} {row.reason.format(value)}" for row in found), "")


def check(args: Namespace) -> None:
    """Raise ValueError for the first of `refusals`. Call this before upstream validates its arguments."""
    for why in refusals(args):
        raise ValueError(f"--wlb: {why}")


def refuses(name: str, value: Any, **beside: Any) -> bool:
    """Return whether an argument is refused for its value alone, with others `beside` it."""
    served = {"seq_length": 1024, "attention_dropout": 0, "tensor_model_parallel_size": 1, "swiglu": True}
    try:
        return any(refusals(Namespace(**served | beside | {name: value})))
    except TypeError:  # text instead of a number
        return True
