"""Published rows: what can be predicted is, and what cannot has a reason, whatever a row lacks."""

import copy
import json
import sys

import pytest

from benchmarks import published
from benchmarks.lengths import DATA

ROWS = {row["id"]: row for row in json.loads((DATA / "published.json").read_text())}
STEP, KERNEL = ROWS["mlm-weak-7.1B"], ROWS["fa3-h100-causal-d128-fwd-4096"]


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
        (STEP | {"hardware": "TPU v5p"}, "no profile of TPU v5p"),
        (STEP | {"hardware": "GB200", "software": {"generations": ("fa2",)}}, "no profile of GB200 with fa2"),
        (STEP | {"hardware": "8x power-limited H100"}, "its power is limited, to how many watts is not published"),
        (STEP | {"software": {"unsimulated": "a reason"}}, "a reason"),
        (STEP | {"software": {"unheard": 1}}, "a field is not as expected"),
        (STEP | {"id": "some-model-sft"}, "packs of documents whose lengths are not published"),
        (ROWS["titan-70b-asynctp"], "neither async TP nor the ring of PyTorch is simulated"),
        (STEP | {"sequence": "1K to 16K"}, "sequences of 1K to 16K tokens"),
        (STEP | {"measured": {"peak_memory": {"value": 70, "unit": "GB"}}}, "no speed of a training step"),
        (STEP | {"measured": {"tflops_per_gpu": {"value": "fast"}}}, "a field is not as expected"),
        (STEP | {"measured": {"tflops_per_gpu": {"value": -1}}}, "no speed over 0"),
        (STEP | {"precision": "mxfp8"}, "no rate of products in mxfp8"),
        (STEP | {"layout": STEP["layout"] | {"tp": 8, "gpus": 4}}, "4 GPUs for TP 8"),
        (KERNEL | {"model": {"name": "attention, head 64, causal"}}, "no kernels for heads of its size"),
        (KERNEL | {"hardware": "A100"}, "no kernels of fp16 on A100"),
        (KERNEL | {"source": "elsewhere"}, "its heads are not known"),
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


def test_software_differs_in_what_a_row_leaves_open():
    """By the field `software`, or else by repository and release."""
    row = ROWS["nemo2407-llama3-70b"]

    def predicted(**changes):
        (found,), _ = published.predict([row | changes])
        return found

    older, newer = (row["source"].replace("NeMo 24.07", f"NeMo {each}") for each in ("24.03", "25.04"))
    profiles = [predicted(source=each)["profile"] for each in (older, row["source"], newer)]
    assert profiles == ["h100-fa2", "h100-cudnn", "h100-cudnn-2025"]
    exposed = predicted(software={"tp_comm_overlap": False})
    assert exposed["predicted"] < predicted()["predicted"] < predicted(source=newer)["predicted"]
    assert predicted(software={"per_drain": 8})["predicted"] < predicted()["predicted"]  # a bubble for every eight
    assert predicted(precision="bf16")["kinds"] == ["bf16 dense"] and predicted()["kinds"] == ["FP8 dense"]


def test_layers_of_the_first_and_last_stage_are_those_that_a_row_has():
    row = ROWS["dgxc-h100-dsv3-bf16-512"]
    for ends in ([7, 6], [4, 9]):
        changed = row | {"layout": row["layout"] | {"end_layers": ends}}
        layers = published.job_of(changed, published.run_of(changed)).decoder_layers()
        assert layers.sum(axis=1).tolist() == [ends[0], *[8] * 6, ends[1]]


def test_a_step_whose_flags_are_not_known_is_predicted_by_defaults():
    (full,), _ = published.predict([row := ROWS["bridge-26.08-gb200-qwen3_30b_a3b-mxfp8"]])
    (bare,), _ = published.predict([row | {"software": published.UNSTATED}])
    assert bare["unstated"] == 1 and full["unstated"] == pytest.approx(full["predicted"] / bare["predicted"])
    assert full["unstated"] > 1.2  # no graphs


def test_a_row_is_of_the_software_that_its_fields_name_whatever_its_notes_say():
    row = ROWS["nemo2407-llama3-70b"] | {"notes": "torchtitan, async TP, Automodel, LoRA, RL, no tp-comm-overlap"}
    (said, plain), _ = published.predict([row, ROWS["nemo2407-llama3-70b"]])
    assert said["predicted"] == plain["predicted"]


@pytest.mark.parametrize("rows", [[], [ROWS["bridge-25.09-llama3_8b"]], [{"id": "other"}]])
def test_a_file_without_rows_of_bf16_is_scored(rows, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["published", str(path), "--check"])
    published.main()


def test_the_json_file_has_every_row(tmp_path, monkeypatch):
    rows, out = tmp_path / "rows.json", tmp_path / "out.json"
    rows.write_text(json.dumps([STEP, {"id": "other"}]))
    monkeypatch.setattr(sys, "argv", ["published", str(rows), "--json", str(out)])
    published.main()
    written = json.loads(out.read_text())
    assert [row["id"] for row in written["rows"]] == [STEP["id"]] and written["left"][0]["id"] == "other"
    assert {"precision", "predicted", "measured", "ratio"} <= written["rows"][0].keys()
