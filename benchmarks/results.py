"""Writes benchmarks/results/NAME.json: what was measured, on what, with which versions, and which goals hold."""

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("numpy", "scipy", "torch", "megatron-core", "transformer-engine", "flash-attn", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number that a benchmark set out to reach; one that is missed stays in the file as missed."""

    name: str
    value: float
    goal: float
    direction: str
    """<= or >=."""

    @property
    def holds(self) -> bool:
        # Of NumPy's numbers, too, whose truth JSON does not take.
        return bool(self.value <= self.goal if self.direction == "<=" else self.value >= self.goal)


def write(
    name: str,
    *,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    goals: list[Goal] | None = None,
    device: str | None = None,
    suffix: str = "",
) -> Path:
    """Write the result file and return its path."""
    data = {
        "benchmark": name,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "device": device or f"{_cpu()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **_versions()},
        "settings": settings,
        "rows": rows,
        "goals": [asdict(g) | {"holds": g.holds} for g in goals or []],
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}{suffix}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def _commit() -> str:
    """The commit that was measured, with "+" if the tree had changes; "unknown" without git or its folder."""
    run = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
