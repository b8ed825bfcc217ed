"""Adds `--wlb` to an unmodified script: `megatron_wlb_hook.pth` imports this where the command line has the flag.

Python reads that file in site-packages at every start, maybe before packages of a system are found, so nothing else is
imported until the script imports megatron. `MEGATRON_WLB_HOOK=0` in the environment turns it off.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Finder:
    """Does `script.install` in two parts, around the import of megatron.training."""

    installs_wlb = True

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in ("megatron", "megatron.training"):
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


def add() -> None:
    """Watch for megatron, unless the environment says not to; once, however many site-packages have the file."""
    if os.environ.get("MEGATRON_WLB_HOOK") != "0" and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
