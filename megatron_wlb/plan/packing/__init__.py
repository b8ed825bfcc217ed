"""Packing policies: which documents run in a step, and in which micro-batch. A new one is a file, and its line here."""

import argparse
from dataclasses import fields
from typing import Any

from megatron_wlb.plan.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.packing.base import Packing
from megatron_wlb.plan.packing.fixed import FixedPacking
from megatron_wlb.plan.packing.ilp import IlpPacking
from megatron_wlb.plan.packing.original import OriginalPacking
from megatron_wlb.plan.packing.wlb import WlbPacking
from megatron_wlb.settings import flag

POLICIES: dict[str, type[Packing]] = {
    "original": OriginalPacking,
    "fixed": FixedPacking,
    "ilp": IlpPacking,
    "wlb": WlbPacking,
    "adaptive": AdaptivePacking,
}
DEFAULT_POLICY = "adaptive"


def add_flags(group: Any) -> None:
    """Add `--wlb-packing` and the settings of all policies that train to an argparse parser or argument group."""
    policies = [policy for policy in POLICIES.values() if policy.trains]
    text = "How documents become micro-batches. " + " ".join(f"{each.name}: {each.help}" for each in policies)
    names = ",".join(each.name for each in policies)
    text = f"{text} Default: {DEFAULT_POLICY}.".replace("%", "%%")
    group.add_argument("--wlb-packing", default=DEFAULT_POLICY, metavar=f"{{{names}}}", help=text)
    known: set[str] = set()  # a policy may have the settings of another that it is derived from
    for each in policies:
        each.add_flags(group, without=known)
        known |= {f.name for f in fields(each)}  # type: ignore[arg-type]


def from_args(args: argparse.Namespace) -> Packing:
    """The policy that parsed flags name, with its settings. Raises ValueError for an unknown one or bad settings."""
    if args.wlb_packing not in POLICIES:
        raise ValueError(f"--wlb-packing is {args.wlb_packing!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[args.wlb_packing].from_args(args)


def for_training(args: argparse.Namespace) -> Packing:
    """The same; raises ValueError for a policy that training does not have, too."""
    policy = from_args(args)
    if not policy.trains:
        raise ValueError(f"--wlb-packing {policy.name} is a baseline for plans and benchmarks; train with another")
    return policy


def without_effect(args: argparse.Namespace) -> list[str]:
    """What parsed flags set of policies that they do not name, as the beginnings of sentences."""
    own = {f.name for f in fields(POLICIES[args.wlb_packing])}  # type: ignore[arg-type]
    return [
        f"{flag(f.name)} is of --wlb-packing {each.name}, and packing is {args.wlb_packing}"
        for each in POLICIES.values()
        if each.trains
        for f in fields(each)  # type: ignore[arg-type]
        if f.name not in own and getattr(args, f"wlb_{f.name}") != f.default
    ]
