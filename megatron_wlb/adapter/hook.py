"""Adds `--wlb` to an unmodified script: `hook.pth` imports this where the command line has the flag.

An installation has `hook.pth` in site-packages, where Python reads it at every start. `MEGATRON_WLB_HOOK=0` in the
environment turns it off.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from megatron_wlb.adapter import script


class _Finder:
    """Does `script.install` in two parts, around the import of megatron.training."""

    installs_wlb = True

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == "megatron":
            with script.one_line():
                script.before_megatron()
        if name != "megatron.training":
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
    """Watch for megatron, unless the environment says not to."""
    if os.environ.get("MEGATRON_WLB_HOOK") != "0":
        sys.meta_path.insert(0, _Finder())
