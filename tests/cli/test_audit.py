"""`megatron-wlb audit`: clean runs pass, others do not, and wrong files get one line."""

import json
import re

import numpy as np
import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.plan import state as saved
from megatron_wlb.plan.document_log import append, read
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from tests.adapter.datasets import write_index
from tests.cli.commands import refusal
from tests.jobs import job

LENGTHS = np.random.default_rng(2).integers(1, 150, 300)


def packer(**given):
    stream = DocumentStream([Source(lengths=LENGTHS)], seed=3, context_length=64, **given)
    return make_packer(stream, job())


def run_steps(packer, log, state, count, begins_anew=False):
    for i in range(count):
        step = packer.next()
        append(log, step.step, step.batch, begins_anew=begins_anew and i == 0)
    saved.save(state, packer.state(), job())


@pytest.fixture
def run(tmp_path):
    """(log, state) of 12 steps."""
    files = tmp_path / "documents.log", tmp_path / "iter_0000012.wlb.json"
    run_steps(packer(), *files, 12)
    return files


def audit(capsys, log, state, *words):
    code = main(["audit", str(log), "--state", str(state), *words])
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


def test_a_clean_run(run, tmp_path, capsys):
    write_index(tmp_path / "data.idx", LENGTHS + 1)
    for words in ([], ["--data-path", str(tmp_path / "data")]):
        code, found, _ = audit(capsys, *run, *words)
        assert (code, found["steps"], found["clean"], found["lost"], found["doubled"]) == (0, 12, True, 0, 0)
        assert found["tokens"] == read(run[0])["length"].sum()


def test_a_lost_document_is_found(run, capsys):
    state, _ = saved.load(run[1])
    waiting = saved.waiting(state)
    place = next(name for name, rows in waiting.items() if len(rows))
    header = {name: value for name, value in state.items() if name not in ("waiting", "digest")}
    saved.save(run[1], saved.make(header, waiting | {place: waiting[place][:-1]}), job())
    code, found, _ = audit(capsys, *run)
    assert code == 1 and found["lost"] >= 1


@pytest.mark.parametrize("whole", [True, False])
def test_documents_that_an_epoch_leaves_to_the_next_are_found(whole, tmp_path, capsys):
    log, state = tmp_path / "documents.log", tmp_path / "iter.wlb.json"
    packed = packer(whole_epochs=whole)
    run_steps(packed, log, state, 250)
    kept = packed.state()
    header = {name: value for name, value in kept.items() if name not in ("waiting", "digest")}
    header["stream"]["whole_epochs"] = True
    saved.save(state, saved.make(header, saved.waiting(kept)), job())
    assert read(log)["length"].sum() > 2 * LENGTHS.sum()
    code, found, _ = audit(capsys, log, state)
    assert (code == 0) == found["clean"] == (found["late"] == 0) == whole


def test_a_new_beginning_is_said(run, capsys):
    anew = packer()
    anew.begin_at(7)
    run_steps(anew, *run, 3, begins_anew=True)
    code, found, said = audit(capsys, *run)
    assert (code, found["restarts"], found["first_step"], found["steps"], found["clean"]) == (0, 1, 7, 3, True)
    assert "began anew at step 7; the steps before are not judged" in said


def damage(path):
    path.write_text(path.read_text().replace('"step":12', '"step":11'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log, state: state.write_text("{"), "cannot be read as a packer state"),
        (lambda log, state: state.write_text("{}"), "cannot be read as a packer state"),
        (lambda log, state: damage(state), "the packer state is damaged"),
        (lambda log, state: log.write_text("x"), "is not a document log"),
        (lambda log, state: log.unlink(), "No such file"),
        (
            lambda log, state: run_steps(packer(), log.with_name("other"), state, 13),
            "ends with step 11, .* earlier state",
        ),
        (lambda log, state: saved.save(state, packer().state(), job()), "no step before step 0 .* name a later state"),
    ],
)
def test_wrong_files_get_one_line(run, capsys, change, message):
    change(*run)
    assert re.search(message, refusal(capsys, "audit", str(run[0]), "--state", str(run[1])))
