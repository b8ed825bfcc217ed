"""How `--wlb` serves the arguments of a run that is given to a command."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from megatron_wlb import layers
from megatron_wlb.cli.launch import KNOWN, Launched, alone, refuse_misspelt
from megatron_wlb.describe import masks
from megatron_wlb.describe.adapt import switches_off
from megatron_wlb.describe.arguments import (
    SET,
    MegatronArguments,
    Refused,
    Set,
    Simulated,
    flag_of,
    marked,
    rows,
)
from megatron_wlb.describe.refusals import refusals, refuses

ADDED = {name for name, _ in rows(Set)} | marked(SET)
"""Arguments that --wlb or the recommended flags set; a log has them whether they were given or not."""
WEIGHT_SHARDS = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
"""Arguments that --wlb refuses, and that a log shows even if they were not given, see `usual`."""


class Screened(NamedTuple):
    """The arguments of a run that are not simulated."""

    refused: list[str]
    """Flags that training with --wlb refuses."""
    ignored: list[str]
    """Flags of a command that have no effect here."""
    left_out: list[str]
    """Features that an approximate estimate leaves out."""
    remarks: list[str]
    """Warnings: how the run differs from the one that the numbers describe."""
    stops: bool
    """Training with --wlb refuses the run, without the refused flags, too."""


def screen(launched: Launched, arguments: MegatronArguments, *, model: str | None, approximate: bool) -> Screened:
    """Sort a run's arguments; known models are gated. Raises ValueError for what changes the prediction."""
    stated, left_out = launched.stated, []
    for name, row in rows(Refused):
        if not row.unlike or not (value := stated.get(name)) or not row.when(value):
            continue
        if name == "yaml_cfg" or not approximate:
            way = "give flags" if name == "yaml_cfg" else "give --approximate for an estimate without"
            raise ValueError(f"{flag_of(name)}: {row.unlike} cannot be simulated; {way}")
        left_out.append(row.unlike)
    screened = {name: value for name, value in stated.items() if name not in ADDED and not name.startswith("wlb")}
    if launched.is_log:
        screened = {name: value for name, value in screened.items() if name not in usual(stated)}
    refused = [name for name, value in screened.items() if refuses(name, value, **layers.shown_by(arguments))]
    strange = [name for name, row in rows(Simulated) if name in screened and alone(screened[name]) not in row.values]
    off = [name for name, value in screened.items() if switches_off(name, value)]
    strangers = [name for name in screened if name not in {*KNOWN, *refused, *off}]
    refuse_misspelt(strangers)
    ignored = [] if launched.is_log else strangers
    said = {
        "Left out, since training with --wlb refuses them: {}.": refused,
        "Switched off by --wlb: {}.": off,
        "Not simulated, and so without effect on these numbers: {}.": [n for n in strange if n not in refused],
    }
    remarks = [text.format(" ".join(map(flag_of, names))) for text, names in said.items() if names]
    given = {name: value for name, value in (screened | asdict(arguments)).items() if name not in refused}
    given |= {"attention_dropout": 0} | ({"swiglu": True} if model else {})
    if launched.source == "flags":
        given["sequence_parallel"] = True  # as is assumed
    stops = list(refusals(Namespace(**given)))
    remarks += [f"Training with --wlb refuses this run: {why}." for why in stops]
    return Screened(
        refused=list(map(flag_of, refused)),
        ignored=list(map(flag_of, ignored)),
        left_out=list(dict.fromkeys(left_out)),
        remarks=_attention(launched) + remarks,
        stops=bool(stops),
    )


def usual(stated: Mapping[str, Any]) -> set[str]:
    """Return the arguments that a log shows as TP and ETP because they were not given."""
    shards = {stated.get("tensor_model_parallel_size", 1), stated.get("expert_tensor_parallel_size") or 1}
    return {name for name in WEIGHT_SHARDS if stated.get(name) in shards}


def _attention(launched: Launched) -> list[str]:
    """Return a remark if the run's attention crosses documents."""
    if launched.source == "flags" or launched.stated.get("wlb") or masks.masks_documents(launched.stated):
        return []
    ignored = ""
    if launched.stated.get("reset_attention_mask"):
        ignored = (
            " --reset-attention-mask does not prevent it: TransformerEngine and the fused softmax of local layers "
            "ignore its mask (NVIDIA/Megatron-LM#2357)."
        )
    return [
        "The run lets attention cross documents; with --wlb it stays inside of them, on the same tokens every step."
        + ignored
    ]
