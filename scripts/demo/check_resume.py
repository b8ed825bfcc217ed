"""Check that a run that was stopped and resumed did exactly what an uninterrupted run did, step by step."""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

type Step = dict[str, Any]

UNREPRODUCIBLE = {"step_ms", "plan_wait_ms", "measured"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`difference` says where the runs part, or None; `resumed_at` is the first step after the resume, if any."""

    steps: int
    difference: str | None
    max_loss_difference: float
    resumed_at: int | None
    repeated: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interrupted", type=Path, help="log of the run that was stopped and resumed")
    parser.add_argument("uninterrupted", type=Path, help="log of the run to compare with")
    arguments = parser.parse_args()
    result = compare(read_log(arguments.interrupted), read_log(arguments.uninterrupted))
    if result.resumed_at is not None:
        repeated = f", steps {', '.join(map(str, result.repeated))} ran twice" if result.repeated else ""
        print(f"resumed at step {result.resumed_at}{repeated}")
    print(f"largest difference of the loss over {result.steps} steps: {result.max_loss_difference:g}")
    if result.difference:
        sys.exit(f"the runs differ: {result.difference}")
    print("equal: the same documents and the same loss, to the bit, in every step")


def read_log(path: Path) -> list[Step]:
    """The steps of a --wlb-log file in the order they ran. Raises ValueError on a line that is not a step."""
    steps = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            steps.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return steps


def compare(interrupted: list[Step], uninterrupted: list[Step]) -> Comparison:
    """Every copy of every step of `interrupted` against `uninterrupted`.

    A run that is stopped after its last checkpoint repeats steps when it resumes, so a step may be there twice.
    """
    expected = {step["step"]: step for step in uninterrupted}
    numbers = [step["step"] for step in interrupted]
    restarts = [after for before, after in pairwise(numbers) if after <= before]
    differences = {
        step["step"]: difference
        for step in reversed(interrupted)
        if (difference := difference_of(step, expected.get(step["step"])))
    }
    differences |= dict.fromkeys(expected.keys() - set(numbers), "is missing from the interrupted run")
    first = min(differences, default=None)
    losses = [(step["loss"], expected[step["step"]]["loss"]) for step in interrupted if step["step"] in expected]
    return Comparison(
        steps=len(expected),
        difference=None if first is None else f"step {first} {differences[first]}",
        max_loss_difference=max((abs(a - b) for a, b in losses), default=math.nan),
        resumed_at=restarts[0] if restarts else None,
        repeated=tuple(sorted({number for number in numbers if numbers.count(number) > 1})),
    )


def difference_of(step: Step, expected: Step | None) -> str | None:
    if expected is None:
        return "is missing from the uninterrupted run"
    for key in expected | step:
        if key not in UNREPRODUCIBLE and step.get(key) != expected.get(key):
            return f"has {key} {step.get(key)} in the interrupted run and {expected.get(key)} in the other"
    return None


if __name__ == "__main__":
    main()
