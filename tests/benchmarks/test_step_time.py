"""The commands on record are analysed to the speed-ups on record."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import results
from megatron_wlb.cli.main import main

STEPS = 8
PAGE = (results.FOLDER / "README.md").read_text().split("<!-- commands:")[1].split("<!-- end of commands")[0]
COMMANDS = [
    shlex.split(words.replace("\\\n", ""))
    for words in re.findall(r"^    (megatron-wlb (?:\\\n|.)*)", PAGE, re.MULTILINE)
]
ROWS = json.loads((results.FOLDER / "step_time.json").read_text())["settings"]["memory"]


def test_every_row_has_a_command():
    assert len(COMMANDS) == len(ROWS) == PAGE.count("megatron-wlb analyze")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("command", "row"),
    [*zip(COMMANDS, ROWS, strict=True)],
    ids=lambda each: each[-1] if isinstance(each, list) else each["layout"],
)
def test_a_command_repeats_its_row(command: list[str], row: results.Row, tmp_path: Path):
    """Of fewer steps, within the errors of both."""
    assert main([*command[1:], "--steps", str(STEPS), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    ours, alone = (found["schemes"][name] for name in ("ours", "thd"))
    error = math.hypot(ours["speedup_error"], row["over ring per document, error"])
    assert abs(ours["speedup"] - row["over ring per document"]) < 3 * error
    assert alone["micro_batch_size"] == row["megatron"]["micro_batch_size"]
