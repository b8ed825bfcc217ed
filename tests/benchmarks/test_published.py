"""Published rows: what can be predicted is, and what cannot has a reason, whatever a row lacks."""

import copy
import json
import sys

import pytest

from benchmarks import published
from benchmarks.lengths import DATA

ROWS = {row["id"]: row for row in json.loads((DATA / "published.json").read_text())}
STEP = ROWS["mlm-weak-7.1B"]


def without(row, path):
    changed = copy.deepcopy(row)
    *names, last = path.split(".")
    inner = changed
    for name in names:
        inner = inner[name]
    inner.pop(last)
    return changed


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (without(STEP, "layout.gpus"), "no layout.gpus"),
        (without(STEP, "model.layers"), "the shape of GPT 7.1B is not known"),
        (without(STEP, "model"), "no model"),
        (without(STEP, "hardware"), "no hardware"),
        (STEP | {"hardware": "TPU v5p"}, "no profile of TPU v5p"),
        (STEP | {"sequence": "1K to 16K"}, "sequences of 1K to 16K tokens"),
        (STEP | {"measured": {"peak_memory": {"value": 70, "unit": "GB"}}}, "no speed of a training step"),
        (STEP | {"measured": {"tflops_per_gpu": {"value": None}}}, "a field is not as expected"),
        ({"id": "nothing"}, "no model"),
    ],
)
def test_what_cannot_be_predicted_is_listed_with_the_reason(row, reason):
    found, left = published.predict([row, STEP])
    assert [each["id"] for each in found] == [STEP["id"]]
    assert reason in left[0]["reason"]


def test_half_of_attention_counts_half_and_faster_is_over_one():
    causal = STEP | {"attention_flops": "causal"}
    slower = STEP | {"measured": {"step_time": {"value": 1.0, "unit": "s"}}}
    (full, half, timed), _ = published.predict([STEP, causal, slower])
    assert half["predicted"] < full["predicted"] and timed["ratio"] == pytest.approx(1 / timed["predicted"])


def test_the_json_file_has_every_row(tmp_path, monkeypatch):
    rows, out = tmp_path / "rows.json", tmp_path / "out.json"
    rows.write_text(json.dumps([STEP, {"id": "other"}]))
    monkeypatch.setattr(sys, "argv", ["published", str(rows), "--json", str(out)])
    published.main()
    written = json.loads(out.read_text())
    assert [row["id"] for row in written["rows"]] == [STEP["id"]] and written["left"][0]["id"] == "other"
    assert {"precision", "predicted", "measured", "ratio"} <= written["rows"][0].keys()
