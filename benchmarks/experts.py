"""Constants that are fitted to published steps of mixtures of experts, and errors of groups that are left out."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from benchmarks.results import Row
from megatron_wlb.hardware.profile import gpu_of
from megatron_wlb.layers import KINDS, experts
from megatron_wlb.simulate.published import RANGE

FITTED: dict[str, list[tuple[dict[Any, float], Any]]] = {
    "launches of attention, us": [
        (kind.modules, name) for kind in KINDS for name in kind.modules if not name.startswith("moe")
    ],
    "of a router, us": [(experts.Experts.modules, "moe_router")],
    "of experts, us": [(experts.Experts.modules, "moe")],
    "of an expert with casts, us": [(experts.EXPERT_US, True)],
    "exchange hidden": [(vars(experts), "OVERLAP_HIDES")],
    "passes over copies": [(experts.COPY_PASSES, False)],
    "passes, fused": [(experts.COPY_PASSES, True)],
}
"""Where they are."""
LAYER = ("launches of attention, us", "of a router, us", "of experts, us")
"""Constants of which the steps tell the sum."""
SHIPPED = np.array([where[key] for (where, key), *_ in FITTED.values()])
STEP = 0.1
"""Change of a constant, as a share, by which derivatives are taken."""
MOST = 2.5
"""Factor by which a fit may move a constant: derivatives are those at the shipped ones."""
OUTLIER = 0.08
"""Error from which on a row counts in proportion to it, and not to its square."""
FAMILIES = {"Qwen3-30B": r"Qwen3.*30B", "Qwen3-235B": r"Qwen3.*235B", "DeepSeek-V3, Kimi K2": "DeepSeek|Kimi"}


@contextmanager
def constants(values: np.ndarray) -> Iterator[None]:
    """Predict by other constants, float64 [len(FITTED)], for a while."""

    def write(values: np.ndarray) -> None:
        for value, places in zip(values.tolist(), FITTED.values(), strict=True):
            for where, key in places:
                where[key] = value

    write(values)
    try:
        yield
    finally:
        write(SHIPPED)


def family(row: Row) -> str:
    name = str(row["model"]["name"])
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, name)), name)


def gpu(row: Row) -> str:
    return gpu_of(re.sub(r"\d+x", "", row["hardware"])) or ""


def release(row: Row) -> str:
    """The repository, and the container where the source names it."""
    named = re.search(r"\d\d\.\d\d(?:\.\d\d)?", str(row["source"]).partition("(")[2])
    return f"{re.split('[@ ]', row['source'])[0]} {named[0] if named else ''}"


JOB = ("hardware", "model", "layout", "precision", "sequence")
"""Fields in which rows of one job agree."""
GROUPS: dict[str, Callable[[Row], Any]] = {
    "model": family,
    "release": release,
    "GPU": gpu,
    "model on a GPU": lambda row: (family(row), gpu(row)),
}
"""What is left out together, in turn."""


def fitted(errors: np.ndarray, slopes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the constants by which weighted errors of rows are least, float64 [n].

    `slopes`, float64 [rows, n]: by a constant's change, as a share of the shipped one.
    """
    change, most = np.zeros(len(FITTED)), np.full(len(FITTED), MOST)
    hidden = list(FITTED).index("exchange hidden")
    most[hidden] = 1 / SHIPPED[hidden]
    for _ in range(30):
        size = np.abs(errors + slopes @ change)
        scale = np.sqrt(weights * np.minimum(1, OUTLIER / np.maximum(size, OUTLIER)))
        change = lsq_linear(slopes * scale[:, None], -errors * scale, bounds=(1 / MOST - 1, most - 1)).x
    return SHIPPED * (1 + change)


def left_out(rows: list[Row], predict: Callable[[list[Row]], np.ndarray]) -> list[Row]:
    """Return the errors of groups of rows by constants that are fitted to the others, and the ranges of these.

    `predict` returns log(predicted / measured) of rows, float64 [rows]. Rows of one job in several releases weigh as
    much together as its square root.
    """
    errors, slopes = predict(rows), np.empty((len(rows), len(FITTED)))
    for i in range(len(FITTED)):
        with constants(SHIPPED * (1 + STEP * (np.arange(len(FITTED)) == i))):
            slopes[:, i] = (predict(rows) - errors) / STEP
    jobs = [str([each.get(name) for name in JOB]) for each in rows]
    weights = np.array([jobs.count(job) for job in jobs]) ** -0.5
    lines = [_line("nothing, as shipped", errors, SHIPPED[None])]
    for what, key in GROUPS.items():
        names, found, fits = [str(key(row)) for row in rows], np.zeros(len(rows)), []
        for name in sorted(set(names)):
            kept = np.array([each != name for each in names])
            fits.append(fitted(errors[kept], slopes[kept], weights[kept]))
            with constants(fits[-1]):
                found[~kept] = predict([row for row, each in zip(rows, names, strict=True) if each == name])
        lines.append(_line(f"a {what}", found, np.array(fits)))
    return lines


def within(rows: list[Row], ratios: np.ndarray) -> float:
    """Return the share of rows whose ratio is in the range of other models' rows (`published.RANGE`)."""
    models = np.array([family(row) for row in rows])
    ranges = {name: np.quantile(ratios[models != name], RANGE) for name in set(models)}
    return float(
        np.mean([ranges[name][0] <= each <= ranges[name][1] for name, each in zip(models, ratios, strict=True)])
    )


def _line(what: str, errors: np.ndarray, fits: np.ndarray) -> Row:
    """Errors, and the least and most of every constant."""
    line: Row = {"left_out": what, "groups": len(fits), "numbers": len(errors)}
    line |= {f"{name}_error": float(np.quantile(abs(errors), q)) for name, q in (("median", 0.5), ("p90", 0.9))}
    launches = fits[:, [name in LAYER for name in FITTED]].sum(axis=1)
    found = dict(zip(FITTED, fits.T, strict=True)) | {"of a layer with experts, us": launches}
    return line | {
        "constants": {name: [round(float(f(of)), 3) for f in (np.min, np.max)] for name, of in found.items()}
    }
