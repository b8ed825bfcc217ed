"""Limits of a rehearsal: it takes these arguments from a log, and writes in a folder of its own alone."""

import argparse
import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_wlb.cli.screen import usual
from megatron_wlb.describe.arguments import ARGUMENTS, BESIDE, DERIVED, TEXT, marked
from megatron_wlb.describe.flags import PlanSettings, RunSettings
from megatron_wlb.hardware.profile import FLOPS_PROFILE, shipped_profiles
from megatron_wlb.job import Sharding

_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
_CHANGES: dict[str, tuple[int | None, ...]] = {
    **dict.fromkeys(("os.truncate", "os.setxattr"), (None,)),
    **dict.fromkeys(("os.remove", "os.rmdir"), (1,)),
    **dict.fromkeys(("os.mkdir", "os.chmod"), (2,)),
    **dict.fromkeys(("os.chown", "os.utime"), (3,)),
    **{"os.rename": (2, 3), "os.link": (2, 3), "os.symlink": (2, 2)},
}
"""Audit events that change files: for each argument that names some, which argument is its folder (None: none)."""
_CALLS = {f"socket.{name}" for name in "connect bind sendto sendmsg getaddrinfo gethostbyname".split()}


def of_log(
    stated: Mapping[str, Any], options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of a log that differ from `options` and may be taken, and the names of others.

    A log may come from anybody. Arguments of a step are taken, as numbers, switches and choices of their flags in
    `parser`: none names a module, an address or a file but the data's.
    """
    settings = (PlanSettings, RunSettings, Sharding)  # which check their words themselves
    ours = {f"wlb_{f.name}" for kind in settings for f in fields(kind)} - {"wlb_log", "wlb_profile"} | {"wlb_packing"}
    free = ours | marked(TEXT)
    known = free | {"wlb", "wlb_profile"} | (ARGUMENTS.keys() - marked(BESIDE) - marked(DERIVED))
    choices: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        choices.setdefault(action.dest, {}).update({str(each): each for each in action.choices or ()})
    choices["wlb_profile"] = {name: name for name in (*shipped_profiles(), FLOPS_PROFILE.name)}
    taken, left_out, settled = {}, [], marked(DERIVED) | usual(stated)
    for name, value in stated.items():
        if name in settled or not hasattr(options, name) or str(value) == str(getattr(options, name)):
            continue
        try:
            if name not in known:
                raise KeyError(name)
            taken[name] = _harmless(value, choices[name], free=name in free)
        except KeyError:
            left_out.append(name)
    return taken, left_out


def _harmless(value: Any, choices: Mapping[str, Any], *, free: bool) -> Any:
    """Return an argument's value. Raises KeyError for text that its flag does not have to choose from."""
    if isinstance(value, list | tuple):
        return type(value)(_harmless(each, choices, free=free) for each in value)
    if free or value is None or isinstance(value, bool | int | float):
        return value
    return choices[str(value)] if str(value) in choices else choices[_DTYPES[str(value)]]


def confine(folder: str) -> None:
    """From here on, let this process change files in `folder` alone, and ask nobody: else raise PermissionError."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event in _CALLS and (event.startswith("socket.get") or isinstance(given[1], tuple)):  # text: of this machine
            raise PermissionError(errno.EACCES, f"a rehearsal has no network: {event} is blocked")
        opens = event == "open" and (given[2] or 0) & writes != 0
        for path, at in zip(given, (None,) if opens else _CHANGES.get(event, ()), strict=False):
            if isinstance(path, str | bytes | os.PathLike):
                folder_of = -1 if at is None else given[at]
                base = os.readlink(f"/proc/self/fd/{folder_of}") if folder_of >= 0 else ""
                name = os.path.abspath(os.path.join(base, os.fsdecode(path)))
                if not name.startswith((folder + os.sep, os.devnull)):
                    raise PermissionError(errno.EACCES, "a rehearsal leaves the run's files alone, so not", name)

    sys.addaudithook(watch)
