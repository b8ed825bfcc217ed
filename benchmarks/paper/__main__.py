"""The paper's figures by simulation, set beside what the paper reports, what ours reaches, and what can be reached.

    python -m benchmarks.paper [--quick] [--check]

Times are simulated (megatron_wlb/simulate) under one calibration, `setups.CALIBRATION`, which no figure has its own of;
packing times are measured here. Writes benchmarks/results/paper.json and docs/paper.png.
"""

import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.paper import report, speed
from benchmarks.paper.figures import FULL, QUICK, run
from benchmarks.paper.setups import CALIBRATION, REPORTED, SEVEN_128, check_calibration

NEAR = 0.06
"""How near to the paper the averages of Figure 12 shall be."""
Row = dict[str, Any]


def goals(rows: list[Row]) -> list[results.Goal]:
    """What was set out for, and that the steps are enough to tell."""
    twelve = [r for r in rows if r["figure"] == "12"]
    averages, wanted = speed.averages(twelve), []
    for group, paper in REPORTED["figure 12"]["WLB-LLM"].items():
        found = averages["WLB-LLM"].get(group)
        if found is not None:
            name = f"figure 12, WLB-LLM, {group}: away from the paper's {paper:.2f}"
            wanted.append(results.at_most(name, abs(found - paper), NEAR))
    for r in twelve:
        if (r["case"], r["scheme"]) == (SEVEN_128.name, "ours, balance alone"):
            name = "7B-128K, ours by balance alone: share of the gain of perfect balance"
            wanted.append(results.at_least(name, r["share_of_balance"], 0.93))
    errors = [r["standard_error"] for r in rows if r["figure"] in ("12", "13", "14", "15")]
    return [*wanted, results.at_most("largest standard error", max(errors), 0.01)]


def show(rows: list[Row]) -> None:
    console = Console(width=150)
    table = Table("figure", "what", *report.COLUMNS, title="simulated; ms measured")
    for line in report.compare(rows):
        table.add_row(line["figure"], line["what"], *(report.text(line.get(c)) for c in report.COLUMNS))
    console.print(table)
    hangs = [r for r in rows if r["figure"] == "sensitivity"]
    columns = [c for c in hangs[0] if c not in ("figure", "label", "by_case")]
    table = Table(*columns, title="what the averages of figure 12 hang on (WLB-LLM over Plain-4D, simulated)")
    for r in hangs:
        table.add_row(*(report.text(r[c]) for c in columns))
    console.print(table)


def main() -> None:
    args = results.parser(__doc__, "one case, a few steps, nothing written").parse_args()
    check_calibration()
    begin = time.perf_counter()
    rows, gpus = run(QUICK if args.quick else FULL)
    wanted = goals(rows)
    show(rows)
    if not args.quick:
        calibration = [dict(zip(("name", "value", "from"), row, strict=True)) for row in CALIBRATION]
        checks = {"llama3_tflops": speed.llama3_tflops(), "step_seconds": report.step_seconds(rows)}
        setup = {"seconds": time.perf_counter() - begin, "scale": asdict(FULL), "calibration": calibration}
        setup |= {"checks": checks, "comparison": report.compare(rows)}
        print(results.write("paper", settings=setup, rows=rows, goals=wanted), report.draw(rows, gpus))
    results.conclude(wanted, args.check)


if __name__ == "__main__":
    main()
