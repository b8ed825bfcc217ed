"""The C++ core as the package has it: a stub that names everything, and what its absence says."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import megatron_wlb
from megatron_wlb import _native


def test_stub_names_everything():
    tree = ast.parse(Path(megatron_wlb.__file__).with_name("_native.pyi").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    values = {node.target.id: node.annotation.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert {*functions, *values} == {name for name in dir(_native) if not name.startswith("_")}
    assert all(type(getattr(_native, name)).__name__ == kind for name, kind in values.items())
    for name, function in functions.items():
        signature = re.search(rf"{name}\((?!\*)(.*)\) ->", getattr(_native, name).__doc__)[1]
        assert re.findall(r"(\w+): ", signature) == [a.arg for a in function.args.args]


@pytest.mark.parametrize("module", [None, ModuleType("stale")], ids=["none", "stale"])
def test_a_core_that_is_not_there_says_what_to_do(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_wlb._native", module)
    spec = importlib.util.spec_from_file_location("another", megatron_wlb.__file__)
    with pytest.raises(ImportError, match=r"reinstall: pip install \. \(needs a C\+\+17 compiler\)"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
