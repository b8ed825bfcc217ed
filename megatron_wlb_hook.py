"""Adds `--wlb` to an unmodified script: `megatron_wlb_hook.pth` imports this where the command line has the flag.

Python reads that file in site-packages at every start, maybe before packages of a system are found, so nothing else is
imported until the script imports megatron, and nothing at all for another package of that name. `MEGATRON_WLB_HOOK` in
the environment turns it off if it is 0, false, no, off or empty.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_OFF = {"", "0", "false", "no", "off"}


class _Finder:
    """Does `script.install` in two parts, around the import of megatron.training."""

    installs_wlb = True

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in ("megatron", "megatron.training") or not _is_upstream():
            return None
        from megatron_wlb.adapter import script

        if name == "megatron":
            with script.one_line():
                script.before_megatron()
            return None
        script.unhook()
        spec: Any = importlib.util.find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            script.after_megatron()

        spec.loader.exec_module = exec_module
        return spec


def _is_upstream() -> bool:
    """Whether the megatron that would be imported has a package megatron.training; imports neither."""

    def found(name: str, path: Any) -> Any:
        others = (f for f in sys.meta_path if not isinstance(f, _Finder))
        return next((spec for f in others if (spec := f.find_spec(name, path)) is not None), None)

    package = found("megatron", None)
    folders = package and package.submodule_search_locations
    try:
        training = found("megatron.training", folders) if folders else None
    except KeyError:  # a folder without __init__.py, which asks for the imported megatron
        return False
    return training is not None


def add() -> None:
    """Watch for megatron, unless the environment says not to; once, however many site-packages have the file."""
    is_off = os.environ.get("MEGATRON_WLB_HOOK", "1").strip().lower() in _OFF
    if not is_off and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
