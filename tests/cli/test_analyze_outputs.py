"""`megatron-wlb analyze`: what it prints, its page, trace and JSON.

`python -m tests.cli.test_analyze_outputs` writes the reports of `reports/` anew.
"""

import base64
import contextlib
import hashlib
import io
import json
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_wlb.cli import pictures
from megatron_wlb.cli.analyze.table import MOST_FACTS
from megatron_wlb.cli.common import render
from megatron_wlb.cli.main import main
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, LARGE, RUN, C, analyse, drawn, printed
from tests.cli.commands import process

REPORTS = {
    "use": (
        f"--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --vocab-size 1024 --seq-length {8 * C} --bf16 "
        "--pipeline-model-parallel-size 4 --global-batch-size 8 --fim-data --lr 3 --split 99,1,0",
        "--num-gpus 8",
    ),
    "delay": (
        f"--wlb {LARGE} --num-experts 4 --moe-ffn-hidden-size 256 --expert-model-parallel-size 4 --eval-iters 0",
        "--wlb-packing paper:16384 --wlb-log run.jsonl",
    ),
    "estimate": (
        f"{LARGE.replace('--context-parallel-size 2', '')} --dataloader-inter-document-masking --fp8-format hybrid "
        "--experimental-attention-variant dsa",
        "--approximate --wlb-micro-batches 4",
    ),
}
"""Flags of a run, and words before its command."""
FOLDER = Path(__file__).with_name("reports")


def report(name, folder, data):
    """What is printed of a run, and the facts that the page has besides."""
    of_run, words = REPORTS[name]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        facts = analyse(folder, "--steps 8", words, RUN, data, of_run)["facts"]
    return printed.getvalue() + "\n".join(["", "More facts:", *facts[MOST_FACTS:], ""])


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_the_one_on_record(tmp_path, long, name):
    assert report(name, tmp_path, long) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("run", "verdict", "status", "warning"),
    [
        (f"{LARGE} --num-gpus 16 --optimizer sgd --global-batch-size 16 --wlb-micro-batches 16", "Use it", 0, ""),
        (f"{JOB} --wlb-micro-batches 4 --optimizer sgd --fp8-format e4m3 --fp8-recipe mxfp8", "Nothing to balance", 1,
         "! Profile h100-cudnn (NVIDIA H100) has no rate of mxfp8"),
    ],
)  # fmt: skip
def test_a_verdict_alone_is_a_sentence_and_an_exit_status(long, capsys, run, verdict, status, warning):
    """A profile of another device is said beside it."""
    assert main(["analyze", "-q", "--steps", "2", *f"{run} {long}".split()]) == status
    said = (
        rf"{verdict}\. Predicted for an assumed NVIDIA H100: \d\.\d\d times as many tokens per second as Megatron at "
    )
    said += r"its best in this layout \(intra-document attention, --micro-batch-size \d+\)\.\n"
    printed = capsys.readouterr()
    assert re.fullmatch(said, printed.out) and warning in printed.err and bool(printed.err) == bool(warning)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.images, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(("run", "images"), [(LARGE, 5), (JOB, 3)])
def test_page(tmp_path, long, run, images):
    """Stands alone: every picture is in it, and whatever the table says."""
    target = tmp_path / "report.html"
    words = f"--steps 2 --html {target} {RUN} {run} --optimizer sgd --global-batch-size 16 --wlb-micro-batches 16"
    found = analyse(tmp_path, words, long)
    text = target.read_text()
    page = Page(text)
    assert len(page.images) == images
    for source in page.images:
        head, _, image = source.partition(",")
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(image)).tag.endswith("svg")
    assert "http" not in re.sub('base64,[^"]*|http-equiv', "", text)
    style = base64.b64encode(hashlib.sha256(re.search("(?s)<style>(.*)</style>", text)[1].encode()).digest()).decode()
    assert "table {" in text and f"content=\"default-src 'none'; style-src 'sha256-{style}'; img-src data:\">" in text
    assert run != LARGE or found["flags"] in re.sub(r"\s*\\\n\s*", " ", page.text)
    assert f"data: {long.split()[-1]}" in page.text and found["date"] in page.text
    assert f"{found['schemes']['ours']['speedup']:.3f}" in page.text and "h100-cudnn" in page.text


@pytest.mark.parametrize("window", [64, 1 << 20])
def test_the_window_is_in_the_picture_whatever_the_lengths(window):
    edges, share = np.array([512, 1024]), np.array([1.0])
    figure = Figure()
    pictures.shares(figure, edges, {"documents": share}, window, "share")
    least, most = figure.axes[0].get_xlim()
    assert least < min(window, 512) * 1.01 and max(window, 1024) < most


def test_a_page_has_no_control_characters(tmp_path):
    (tmp_path / "page.html").write_text("{{ name }}\n")
    assert render(tmp_path / "page.html", name="<a\x1b[31m\x9b\u00a0\n>") == "&lt;a [31m \u00a0\n&gt;"


def test_a_trace_of_a_typical_step(tmp_path, data):
    words = f"--steps 1 --pipeline-model-parallel-size 2 --wlb-micro-batches 4 --trace {tmp_path / 'trace'}"
    step_ms = analyse(tmp_path, JOB, words, "--data-path", data)["schemes"]["ours"]["step_ms"]
    spans = [e for e in json.loads((tmp_path / "trace").read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e3 * step_ms, abs=0.01)
    assert {(e["pid"], e["tid"]) for e in spans} == {(0, 0), (0, 1)}


def test_a_log_from_standard_input_and_json_on_standard_output(data, capsys, monkeypatch):
    arguments = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "world_size": 2, "seq_length": C}
    arguments |= {"global_batch_size": 4, "data_path": [data], "split": 1, "vocab_size": 9, "wlb_micro_batches": 4}
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(printed(arguments).encode())))
    assert main(["analyze", "-", "--steps", "2", "--json", "-"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["prediction"] is True
    assert "2 layers of 64, window 4,096, 2 GPUs" in found.err and "This is a prediction" in found.err


def test_without_torch(data):
    arguments = ["analyze", *JOB.split(), "--fp8-format", "hybrid", "--data-path", data, "--steps", "2"]
    done = process(*arguments, without=("torch", "megatron"), check=True)
    assert "Predicted for " in done.stdout


@pytest.mark.parametrize("module", ["rich", "jinja2", "matplotlib"])
def test_an_extra_is_missed_before_the_work(tmp_path, module):
    """For which there is not even data here."""
    done = process("analyze", *JOB.split(), "--data-path", "none", "--html", tmp_path / "page", without=(module,))
    message = f"megatron-wlb analyze: error: {module} is not installed; pip install '.[analysis]' in a clone\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder, "long.idx"), 8 * drawn())
        for name in REPORTS:
            (FOLDER / f"{name}.txt").write_text(report(name, Path(folder), f"--split 1 --data-path {folder}/long"))
