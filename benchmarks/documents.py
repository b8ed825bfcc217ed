"""How much faster the jobs of `step_time` in equal memory are on other documents than F2; predicted, not measured.

    python -m benchmarks.documents [--quick] [--check]

Documents have the lengths of a profile of `megatron_wlb.plan.mock`. Both sides train the same windows in the same steps
within an H100's memory, each with its fastest recomputation; the other side is Megatron with a ring per document, at
its best micro-batch size. Each
side has the shares of its steps in which it waits for the slowest rank, stage or micro-batch, and in which the exchange
of K and V is exposed. Balance ends the first alone. Errors are standard errors over steps.
Writes benchmarks/results/documents.json in some minutes.
"""

import itertools
from dataclasses import asdict

from benchmarks import results, step_time
from benchmarks.results import Row
from benchmarks.step_time import RING, Case
from megatron_wlb.hardware.profile import DEFAULT_PROFILE
from megatron_wlb.plan.mock import PROFILES

STEPS, QUICK_STEPS = 6, 2
OTHERS = tuple(name for name in PROFILES if name != "F2")


def goals(rows: list[Row]) -> list[results.Goal]:
    """No job is slower on any documents."""
    wanted = []
    for row in rows:
        case = Case.of(row)
        wanted.append(results.at_least(f"{row['documents']}, {case.title}: over a {RING}", row[f"over {RING}"], 1.0))
    return wanted


def main() -> None:
    args = results.parser(__doc__, "one job on the trajectories of agents, two steps").parse_args()
    cases = step_time.QUICK[1:] if args.quick else step_time.REMEMBERED
    todo = list(itertools.product(OTHERS[: 1 if args.quick else None], cases))
    rows: list[Row] = []
    for name, case in results.track(todo, "simulating"):
        found = step_time.remembered(case, QUICK_STEPS if args.quick else STEPS, name)
        rows.append({"documents": name} | found)
    results.show(rows)
    settings = {"profile": DEFAULT_PROFILE, "steps": STEPS, "fits": {n: asdict(PROFILES[n].lengths) for n in OTHERS}}
    results.finish(args, "documents", settings=settings, rows=rows, goals=goals(rows))


if __name__ == "__main__":
    main()
