"""Adds `--wlb` to an unmodified script: `megatron_wlb.pth` imports this where the command line has the flag.

Python reads the .pth file at every start. `MEGATRON_WLB_HOOK=0` in the environment turns it off.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    """Does `script.install` in two parts, around the import of megatron.training."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> object:
        if name not in ("megatron", "megatron.training"):
            return None
        from megatron_wlb.adapter import script

        if name == "megatron":
            with script.one_line():
                script.before_megatron()
            return None
        remove()
        spec: ModuleSpec | None = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                script.after_megatron()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def remove() -> None:
    """Leave the import of megatron alone: somebody else installs `--wlb`, or it is done."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)  # type: ignore[arg-type]


def add() -> None:
    """Watch for megatron, unless the environment says not to."""
    if os.environ.get("MEGATRON_WLB_HOOK") != "0":
        sys.meta_path.insert(0, _FINDER)  # type: ignore[arg-type]
