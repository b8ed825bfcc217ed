"""`megatron-wlb audit`: clean runs pass, others do not, and wrong files get one line."""

import json

import numpy as np
import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.plan.document_log import append, read
from tests.plan.test_document_log import packer


@pytest.fixture
def run(tmp_path):
    """(log, state) of 12 steps."""
    made = packer("wlb", [np.random.default_rng(2).integers(1, 150, 300)])
    log, state = tmp_path / "documents.log", tmp_path / "iter_0000012.wlb.json"
    for _ in range(12):
        step = made.next()
        append(log, step.step, step.packing)
    state.write_text(json.dumps(made.state()))
    return log, state


def test_a_clean_run(run, capsys):
    assert main(["audit", str(run[0]), "--state", str(run[1])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["clean"], found["lost"], found["doubled"]) == (12, True, 0, 0)
    assert found["tokens"] == read(run[0])["length"].sum()


def test_a_lost_document_is_found(run, capsys):
    state = json.loads(run[1].read_text())
    place = next(name for name, rows in state["waiting"].items() if rows)
    state["waiting"][place].pop()
    run[1].write_text(json.dumps(state))
    assert main(["audit", str(run[0]), "--state", str(run[1])]) == 1
    assert json.loads(capsys.readouterr().out)["lost"] >= 1


def test_a_new_beginning_is_said(run, capsys):
    made = packer("wlb", [np.random.default_rng(2).integers(1, 150, 300)])
    made.begin_at(7)
    for _ in range(3):
        step = made.next()
        append(run[0], step.step, step.packing, begins_anew=step.step == 7)
    run[1].write_text(json.dumps(made.state()))
    assert main(["audit", str(run[0]), "--state", str(run[1])]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["restarts"], found["first_step"], found["steps"], found["clean"]) == (1, 7, 3, True)
    assert "began anew at step 7; the steps before are not judged" in printed.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log, state: state.write_text("{"), "is not JSON"),
        (lambda log, state: state.write_text("{}"), "is not a packer state"),
        (lambda log, state: state.write_text("[" * 100_000), "is not JSON"),
        (lambda log, state: _set(state, waiting={"queue0": [[1]]}), "the packer state is damaged: documents wait in"),
        (lambda log, state: _set(state, waiting=[]), "the packer state is damaged: $.waiting"),
        (lambda log, state: log.write_text("x"), "is not a document log"),
        (lambda log, state: log.unlink(), "No such file"),
        (lambda log, state: _set(state, step=13), "name an earlier state"),
        (lambda log, state: _set(state, step=0), "name a later state"),
    ],
)
def test_wrong_files_get_one_line(run, capsys, change, message):
    change(*run)
    assert main(["audit", str(run[0]), "--state", str(run[1])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def _set(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
