"""The import rules of the architecture: who may import whom, and that planning needs neither torch nor megatron."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.features import FEATURES, STAND_IN, files_that_name

ROOT = Path(__file__).parent.parent
PACKAGE, REHEARSAL = ROOT / "megatron_wlb", ROOT / "megatron_rehearsal"

LAYERS = """
settings model documents files _native hardware pipeline job layers cost sharding packing simulate plan loops describe
__init__ runtime adapter bridge cli __main__ run megatron_rehearsal
""".split()
"""Rooms: files and folders of the package, and the package above it. Each may import itself and those before it."""
ONLY = {
    "job": ("settings", "model", "documents", "_native", "hardware", "pipeline"),
    "loops": ("job", "plan"),
    "runtime": ("model", "documents", "sharding"),
    "cli": LAYERS[: LAYERS.index("runtime")],
    "__main__": ("cli",),
    "run": ("adapter",),
}
"""Rooms that may import fewer."""
FRAMEWORKS = {
    "torch": ("runtime", "adapter", "megatron_rehearsal"),
    "megatron": ("adapter", "bridge", "megatron_rehearsal"),
    "transformer_engine": (),
    "flash_attn": (),
}
"""Which rooms may import what; the attention backends find their packages by name."""
EXTRAS = {f"megatron_wlb.adapter.{name}" for name in "cpu sources.conversations tiles upstream.legacy".split()}
"""What only some runs need: others import it inside functions alone."""
IN_FUNCTIONS = {"cli": ("torch", "adapter", "runtime")}
"""What a room may import inside functions alone, since most of its commands run without."""
PLANNING = "hardware pipeline layers cost sharding packing simulate plan describe cli".split()
"""Rooms whose tests are collected without torch and megatron; `tests/upstream` compares them with upstream."""

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted([*PACKAGE.rglob("*.py"), *REHEARSAL.rglob("*.py")])
}


def room(module: str) -> str:
    """The room of a module of ours; a framework is its own."""
    top, _, inner = module.partition(".")
    return (inner.split(".")[0] or "__init__") if top == PACKAGE.name else top


@functools.cache
def imports(module: str) -> list[tuple[str, bool]]:
    """What a module imports, and whether inside a function."""
    tree, found = ast.parse(MODULES[module].read_text()), []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name in MODULES or alias.name == "_native"
                found.append((name if is_module else f"{'.' * node.level}{node.module}", id(node) in inside))
    return found


def allowed(importer: str, imported: str, in_function: bool) -> bool:
    """Whether a room may import another, or a framework."""
    if imported in IN_FUNCTIONS.get(importer, ()):
        return in_function
    if imported in LAYERS:
        below = LAYERS[: LAYERS.index(importer)]
        return imported == importer or (imported in below and imported in ONLY.get(importer, below))
    return imported not in ("", "tests", "scripts") and importer in FRAMEWORKS.get(imported, (importer,))


def test_every_import_is_of_a_lower_layer():
    offences = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported, in_function in imports(module)
        if not allowed(room(module), room(imported), in_function)
    ]
    assert not offences, "\n".join(offences)


def test_what_only_some_runs_need_is_imported_where_they_do():
    assert MODULES.keys() >= EXTRAS
    offences = [
        f"{module} imports {imported}"
        for module in MODULES.keys() - EXTRAS
        for imported, in_function in imports(module)
        if imported in EXTRAS and not in_function
    ]
    assert not offences, "\n".join(offences)


def test_no_import_is_for_type_checkers_alone():
    assert not [module for module, path in MODULES.items() if "TYPE_CHECKING" in path.read_text()]


def test_neither_files_nor_rooms_import_in_a_circle():
    files, rooms = defaultdict(set), defaultdict(set)
    for module in MODULES:
        for imported, _ in imports(module):
            files[module].add(imported)
            if room(imported) != room(module):
                rooms[room(module)].add(room(imported))
    for graph in (files, rooms):
        TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("feature", FEATURES)
def test_few_files_name_a_feature(feature):
    """Others ask the parts of layers, policies, sources or the job for facts in words of their own."""
    pattern, most = FEATURES[feature]
    found = files_that_name(pattern) - {STAND_IN}
    assert 0 < len(found) <= most, sorted(found)


def test_what_is_imported_is_declared_with_a_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["analysis"], *extras["train"], *extras["sft"]]
    bounds = {re.match("[a-z0-9-]+", each)[0].replace("-", "_"): ">=" in each for each in declared}
    found = {imported.partition(".")[0] for module in MODULES for imported, _ in imports(module)}
    found -= {*sys.stdlib_module_names, PACKAGE.name, REHEARSAL.name}
    assert len(found) > 10
    assert not [name for name in found if {"megatron": "megatron_core"}.get(name, name) not in bounds]
    assert {name for name, is_bounded in bounds.items() if not is_bounded} == {"megatron_wlb", "triton", "psutil"}


def test_planning_runs_where_torch_and_megatron_are_blocked():
    framed = {*FRAMEWORKS["torch"], *FRAMEWORKS["megatron"], "run", "__main__"}
    names = [name for name in MODULES if room(name) not in framed]
    names += [f"tests.{room}.{path.stem}" for room in PLANNING for path in (ROOT / "tests" / room).glob("*.py")]
    code = (
        "import importlib, sys\n"
        f"for name in {[*FRAMEWORKS]!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
