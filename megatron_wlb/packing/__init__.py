"""Packing policies: which documents run in a step, and in which micro-batch."""

from typing import Any

from megatron_wlb.job import Packing
from megatron_wlb.layers.part import Rules
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking

POLICIES: dict[str, type[Packing]] = {each.name: each for each in (AdaptivePacking, MegatronPacking, PaperPacking)}
DEFAULT_POLICY = "adaptive"


def policy_of(text: str | None) -> Packing:
    """Return the policy of NAME or NAME:PARAMETER, or the default. Raises ValueError for others."""
    name, _, parameter = (DEFAULT_POLICY if text is None else text).partition(":")
    if name not in POLICIES:
        raise ValueError(f"--wlb-packing is {text!r}; choose one of {', '.join(POLICIES)}")
    try:
        return POLICIES[name].of(parameter)
    except ValueError as error:
        raise ValueError(f"--wlb-packing {text}: {error}") from error


def _in_other_steps(a: Any) -> bool:
    """Whether documents may run in a later step than Megatron's."""
    return not policy_of(a.wlb_packing).same_steps


REFUSED: Rules = {
    (
        "--save and --load to object storage are not supported with delay, whose state is a file beside a checkpoint; "
        "give a folder"
    ): lambda a: any("://" in str(folder) for folder in (a.save, a.load)) and _in_other_steps(a),
    (
        "--wlb-packing with a delay lets documents wait, and --phase-transition-iterations begins with other data; "
        "give adaptive or megatron"
    ): lambda a: a.phase_transition_iterations and _in_other_steps(a),
}
"""Uses of a delay that `--wlb` refuses, by Megatron's arguments."""
DIFFERS: Rules = {"--wlb-packing {a.wlb_packing} trains documents in other steps": _in_other_steps}
"""How a delay makes steps differ from those without `--wlb`."""
