"""Packing policies: which documents run in a step, and in which micro-batch."""

import argparse
from dataclasses import fields
from typing import Any

from megatron_wlb.job import Packing
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.settings import flag

POLICIES: dict[str, type[Packing]] = {
    "original": OriginalPacking,
    "wlb": WlbPacking,
    "adaptive": AdaptivePacking,
}
DEFAULT_POLICY = "adaptive"


def add_flags(group: Any) -> None:
    """Add `--wlb-packing` and the settings of all policies to an argparse group."""
    policies = POLICIES.values()
    text = "How documents become micro-batches. " + " ".join(f"{each.name}: {each.help}" for each in policies)
    names = ",".join(each.name for each in policies)
    text = f"{text} Default: {DEFAULT_POLICY}.".replace("%", "%%")
    group.add_argument("--wlb-packing", default=DEFAULT_POLICY, metavar=f"{{{names}}}", help=text)
    known: set[str] = set()  # a policy may have the settings of another that it is derived from
    for each in policies:
        each.add_flags(group, without=known)
        known |= {f.name for f in fields(each)}  # type: ignore[arg-type]


def from_args(args: argparse.Namespace) -> Packing:
    """Return the policy that parsed flags name; raise ValueError for bad settings."""
    if args.wlb_packing not in POLICIES:
        raise ValueError(f"--wlb-packing is {args.wlb_packing!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[args.wlb_packing].from_args(args)


def without_effect(args: argparse.Namespace) -> list[str]:
    """Return beginnings of sentences about settings of policies that do not run."""
    own = {f.name for f in fields(POLICIES[args.wlb_packing])}  # type: ignore[arg-type]
    return [
        f"{flag(f.name)} is of --wlb-packing {each.name}, and packing is {args.wlb_packing}"
        for each in POLICIES.values()
        for f in fields(each)  # type: ignore[arg-type]
        if f.name not in own and getattr(args, f"wlb_{f.name}") != f.default
    ]
