"""The import rules of the architecture: who may import whom, and that planning needs neither torch nor megatron."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_wlb"

# What a module, or a room, may import of ours besides itself (the longest matching entry counts), and which frameworks.
BOTTOM = ("settings", "model")
PLANNING = (*BOTTOM, "job", "cost", "pipeline", "plan")
ALLOWED = {
    "settings": ((), ()),
    "model": ((), ()),
    "pipeline": ((), ()),
    "cost": (("model", "plan.types"), ()),
    "cost.passes": (("cost", "job", "pipeline.split", "plan.types", "plan.sharding"), ()),
    "cost.memory": (("job", "pipeline"), ()),
    "plan": (PLANNING, ()),
    "plan.packing": ((*BOTTOM, "cost", "pipeline.timeline", "plan.types"), ()),
    "plan.sharding": ((*BOTTOM, "cost", "plan.types"), ()),
    "job": (("model", "cost", "pipeline.schedule", "pipeline.split", "plan.packing", "plan.sharding"), ()),
    "describe": (PLANNING, ()),
    "simulate": (PLANNING, ()),
    "runtime": (("plan.types", "plan.sharding.segments", "plan.sharding.exchange"), ("torch",)),
    "adapter": ((*PLANNING, "describe", "runtime", "simulate"), ("torch", "megatron")),
    "__main__": (("cli",), ()),
    "run": (("adapter",), ()),
    "cli": ((*PLANNING, "describe", "runtime", "simulate", "adapter"), ("torch", "megatron")),
}
FRAMEWORKS = ("torch", "megatron", "transformer_engine", "flash_attn", "apex")


def imports(path: Path):
    """What a module imports when it runs; names for type checkers alone don't count."""
    tree = ast.parse(path.read_text())
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    unread = {id(inner) for block in typing for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
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


def rule(module: str) -> str:
    """The entry of ALLOWED that a module goes by."""
    return max((r for r in ALLOWED if module == r or module.startswith(r + ".")), key=len)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path):
    own = rule(name(path).removeprefix("megatron_wlb."))
    ours, frameworks = ALLOWED[own]
    for imported in imports(path):
        top = imported.split(".")[0]
        if top in FRAMEWORKS:
            assert top in frameworks, f"{path.name} imports {imported}"
        elif top == "megatron_wlb":
            inner = imported.removeprefix("megatron_wlb").removeprefix(".")
            inside = inner in ("", "_native") or rule(inner) == own
            assert inside or any(inner == r or inner.startswith(r + ".") for r in ours), (
                f"{path.name} imports {imported}"
            )
        else:
            assert top not in ("tests", "scripts"), f"{path.name} imports {imported}"


def test_nothing_is_imported_in_a_circle():
    TopologicalSorter({name(path): imports(path) for path in modules()}).prepare()  # raises CycleError


def test_planning_runs_where_torch_and_megatron_are_blocked():
    names = [
        name(p)
        for p in modules()
        if p.relative_to(PACKAGE).parts[0] not in ("runtime", "adapter", "run.py", "__main__.py")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {FRAMEWORKS!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
