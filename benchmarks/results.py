"""What benchmarks share: their command line, goals, tables, pictures, and benchmarks/results/NAME.json, which says what
was measured, on what, with which versions, and which goals hold.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PACKAGES = ("numpy", "scipy", "torch", "megatron-core", "transformer-engine", "flash-attn", "triton")
Goal = dict[str, Any]
"""A number that a benchmark set out to reach; one that is missed stays in the file as missed."""


def at_most(name: str, value: float, goal: float) -> Goal:
    # JSON takes Python's bool, not NumPy's.
    return {"name": name, "value": value, "goal": goal, "direction": "<=", "holds": bool(value <= goal)}


def at_least(name: str, value: float, goal: float) -> Goal:
    return {"name": name, "value": value, "goal": goal, "direction": ">=", "holds": bool(value >= goal)}


def parser(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser that takes --check, --output and, where `quick` says what it does, --quick."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick is not None:
        options.add_argument("--quick", action="store_true", help=f"{quick}; without --output nothing is written")
    options.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    text = "folder of the result file and the picture; default: benchmarks/results and docs"
    options.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    return options


def finish(
    args: argparse.Namespace,
    name: str,
    *,
    settings: Row,
    rows: list[Row],
    goals: Sequence[Goal],
    draw: Callable[[Path], Path] | None = None,
) -> None:
    """Write the result file, draw the picture unless the run was quick, and conclude."""
    quick = getattr(args, "quick", False)
    if args.output or not quick:
        print(write(name, settings=settings, rows=rows, goals=goals, folder=args.output))
    if draw and not quick:
        print(draw(args.output or DOCS))
    conclude(goals, args.check)


def conclude(goals: Sequence[Goal], check: bool) -> None:
    """Print which goals hold; with `check`, exit with 1 if one is missed."""
    for g in goals:
        print(f"{'holds ' if g['holds'] else 'MISSED'} {g['name']} = {g['value']:.6g} ({g['direction']} {g['goal']:g})")
    if check and not all(g["holds"] for g in goals):
        sys.exit(1)


def show(rows: list[Row], columns: Sequence[str] = (), *, title: str | None = None, width: int = 160) -> None:
    """Print these columns of rows, or all, as a table; floats with four decimals."""
    from rich.console import Console  # which machines that only measure may lack
    from rich.table import Table

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

    columns = columns or list(rows[0] if rows else ())
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    Console(width=width).print(table)


def track[T](items: Sequence[T], doing: str) -> Iterable[T]:
    """The items, with a bar on standard error that shows how many are done."""
    from rich.console import Console
    from rich.progress import track

    return track(items, doing, console=Console(stderr=True))


def figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches."""
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def save(figure: Any, name: str, folder: Path) -> Path:
    """Write NAME.png, without upper and right borders of axes, and return its path."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110)
    return path


def write(
    name: str,
    *,
    settings: Row,
    rows: list[Row],
    goals: Sequence[Goal] = (),
    device: str | None = None,
    commit: str | None = None,
    suffix: str = "",
    folder: Path | None = None,
) -> Path:
    """Write the result file, whole or not at all, and return its path."""
    data = {
        "benchmark": name,
        "commit": commit or _commit(),
        "date": datetime.date.today().isoformat(),
        "device": device or f"{_cpu()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **_versions()},
        "settings": settings,
        "rows": rows,
        "goals": goals,
    }
    folder = folder or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(folder / f"{name}{suffix}.json", json.dumps(data, indent=1) + "\n")


def write_whole(path: Path, content: str) -> Path:
    """Write a file so that it is there whole or not at all, and return its path."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(content)
    return temporary.replace(path)


def _commit() -> str:
    """The commit that was measured, with "+" if the tree had changes; "unknown" without git or its folder."""
    run = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1] if found else platform.machine()


def _versions() -> dict[str, str]:
    found = {each.name.replace("_", "-"): each.version for each in distributions()}
    return {package: found[package] for package in PACKAGES if package in found}
