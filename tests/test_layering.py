"""The import rules of the architecture: who may import whom, and that planning needs neither torch nor megatron."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_wlb"

# What a part of the package may import of ours, besides itself, and which frameworks.
ALLOWED = {
    "config": ((), ()),
    "plan": (("config",), ()),
    "simulate": (("plan", "config"), ()),
    "runtime": (("plan.types", "plan.sharding.segments", "plan.sharding.exchange"), ("torch",)),
    "adapter": (("plan", "runtime", "config", "simulate"), ("torch", "megatron")),
    "__main__": (("cli",), ()),
    "run": (("adapter",), ()),
    "cli": (("plan", "runtime", "config", "simulate", "adapter"), ("torch", "megatron")),
}
FRAMEWORKS = ("torch", "megatron", "transformer_engine", "flash_attn", "apex")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                submodule = ROOT / node.module.replace(".", "/") / f"{alias.name}.py"
                folder = ROOT / node.module.replace(".", "/") / alias.name
                is_module = submodule.exists() or (folder.is_dir() and node.module.startswith("megatron_wlb"))
                yield f"{node.module}.{alias.name}" if is_module else node.module


def modules():
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    ours, frameworks = ALLOWED[part]
    for imported in imports(path):
        top = imported.split(".")[0]
        if top in FRAMEWORKS:
            assert top in frameworks, f"{path.name} imports {imported}"
        elif top == "megatron_wlb":
            inner = imported.removeprefix("megatron_wlb").removeprefix(".")
            mine = inner == "" or inner.split(".")[0] == part or inner.startswith("_native")
            allowed = any(inner == rule or inner.startswith(rule + ".") for rule in ours)
            assert mine or allowed, f"{path.name} imports {imported}"
        else:
            assert top not in ("tests", "scripts"), f"{path.name} imports {imported}"


def test_every_part_has_a_rule():
    parts = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in modules()}
    assert parts <= ALLOWED.keys()


def test_nothing_is_imported_in_a_circle():
    TopologicalSorter({name(path): imports(path) for path in modules()}).prepare()  # raises CycleError


def test_planning_runs_where_torch_and_megatron_are_blocked():
    names = [name(p) for p in modules() if p.relative_to(PACKAGE).parts[0] in ("plan", "simulate", "config.py", "cli")]
    code = (
        "import importlib, sys\n"
        f"for name in {FRAMEWORKS!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
