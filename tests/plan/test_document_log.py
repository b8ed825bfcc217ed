"""The document log: what is written is read, whatever a crash leaves; and an audit that finds what it should."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.packing import POLICIES
from megatron_wlb.plan.document_log import BEGINS_ANEW, ENTRY, append, audit, mend, read
from megatron_wlb.plan.state import waiting
from tests.jobs import job, packer

RNG = np.random.default_rng(5)
LENGTHS = [RNG.integers(0, 200, 60), RNG.integers(1, 30, 40)]


def packer_of(policy):
    return packer(job(packing=POLICIES[policy]()), *LENGTHS, seed=3)


def what_waits(packer):
    """What waits, and how far the stream is."""
    state = packer.state()
    return np.concatenate(list(waiting(state).values())), state["stream"]["position"]


def run(path, packer, stop, begin=0, **how):
    """Log the packer's steps up to `stop`, from `begin` on."""
    while packer.step < stop:
        step = packer.next()
        if step.step >= begin:
            append(path, step.step, step.batch, **how)
            how = {}


@pytest.fixture
def logged(tmp_path):
    """A log of six steps, its entries, and what waits then."""
    path, packer = tmp_path / "documents.log", packer_of("wlb")
    run(path, packer, 6)
    return path, read(path), what_waits(packer)


def begins(path):
    """First bytes of the steps in a file."""
    return np.flatnonzero(np.fromfile(path, ENTRY)["micro_batch"] < 0) * ENTRY.itemsize


@pytest.mark.parametrize("policy", ["original", "fixed", "wlb", "adaptive"])
def test_a_run_over_several_epochs_is_clean(tmp_path, policy):
    packer = packer_of(policy)
    run(tmp_path / "log", packer, 80)
    entries, (rows, position) = read(tmp_path / "log"), what_waits(packer)
    report = audit(entries, rows, position, LENGTHS)
    assert report.clean
    assert (report.steps, report.tokens) == (80, entries["length"].sum())
    assert report.documents > 200
    if len(rows):
        assert not audit(entries, rows[:0], position, LENGTHS).clean


def test_what_is_written_is_read(logged):
    path, entries, _ = logged
    packer = packer_of("wlb")
    for step in range(6):
        packing = packer.next().batch
        rows = entries[entries["step"] == step]
        for name in ("index", "dataset", "document", "offset", "length"):
            assert np.array_equal(rows[name], packing.documents[name])
        assert np.array_equal(np.bincount(rows["micro_batch"], minlength=4), np.diff(packing.bounds))
    assert path.stat().st_size == 44 * (len(entries) + 6)


def test_a_step_that_ran_again_counts_once(logged):
    path, entries, state = logged
    run(path, packer_of("wlb"), 6, begin=3)
    assert np.array_equal(read(path), entries)
    assert audit(read(path), *state, LENGTHS).clean


def test_an_audit_begins_where_the_data_began_anew_for_the_last_time(tmp_path):
    path = tmp_path / "log"
    for begin, stop in ((0, 9), (5, 12), (8, 14)):
        packer = packer_of("wlb")
        packer.begin_at(begin)
        run(path, packer, stop, begins_anew=begin > 0)
    entries, state = read(path), what_waits(packer)
    report = audit(entries, *state, LENGTHS)
    assert report.clean
    assert (report.restarts, report.first_step, report.steps) == (2, 8, 6)
    assert report.tokens == entries["length"][entries["step"] >= 8].sum()
    assert not audit(entries[entries["micro_batch"] != BEGINS_ANEW], *state, LENGTHS).clean


def test_a_new_beginning_that_was_undone_does_not_count(logged):
    """Its step ran again from the state that had been missing."""
    path, entries, state = logged
    anew = packer_of("wlb")
    anew.begin_at(3)
    run(path, anew, 4, begins_anew=True)
    assert audit(read(path), *state).restarts == 1
    run(path, packer_of("wlb"), 6, begin=2)
    assert np.array_equal(read(path), entries)


@given(cut=st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_crash_costs_the_last_step_only(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("log") / "log"
    run(path, packer_of("wlb"), 3)
    whole, entries = path.read_bytes(), read(path)
    ends = [*begins(path)[1:].tolist(), len(whole)]
    size = max(1, int(cut * len(whole)))
    path.write_bytes(whole[:size])
    complete = sum(end <= size for end in ends)
    if complete == 0:
        with pytest.raises(ValueError, match="is not a document log"):
            mend(path)
        return
    assert mend(path) == size - ends[complete - 1]
    assert mend(path) == 0
    assert np.array_equal(read(path), entries[entries["step"] < complete])
    run(path, packer_of("wlb"), 3, begin=complete)
    assert np.array_equal(read(path), entries)


def test_what_is_no_log_is_left_alone(tmp_path):
    path = tmp_path / "log"
    assert mend(path) == 0
    path.touch()
    assert mend(path) == 0
    path.write_text("something else")
    for call in (mend, read):
        with pytest.raises(ValueError, match="is not a document log"):
            call(path)
    assert path.read_text() == "something else"
    with pytest.raises(ValueError, match="is not a document log but a folder, pipe or device; name another file"):
        mend(tmp_path)


CHANGES = {
    "another step": lambda rows, begin: rows["step"].__setitem__(begin + 1, 7),
    "a negative place": lambda rows, begin: rows["index"].__setitem__(begin + 1, -1),
    "a place beyond all": lambda rows, begin: rows["offset"].__setitem__(begin + 1, 1 << 62),
    "a mark within": lambda rows, begin: rows["micro_batch"].__setitem__(begin + 1, BEGINS_ANEW),
    "no mark": lambda rows, begin: rows["micro_batch"].__setitem__(begin, 0),
    "an unknown mark": lambda rows, begin: rows["micro_batch"].__setitem__(begin, -3),
    "another count": lambda rows, begin: rows["index"].__setitem__(begin, 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", [0, 3])
def test_a_damaged_log_is_left_alone(change, step, logged):
    """To cut it off at the damage would lose the steps after it."""
    path, *_ = logged
    rows = np.fromfile(path, ENTRY)
    CHANGES[change](rows, begins(path)[step] // ENTRY.itemsize)
    rows.tofile(path)
    with pytest.raises(ValueError, match="is not a document log, or it is damaged; restore it"):
        read(path)
    damaged = path.read_bytes()
    with contextlib.suppress(ValueError):
        assert mend(path) == 0
    assert path.read_bytes() == damaged


def test_a_log_that_would_fill_the_memory_is_refused(logged, monkeypatch):
    path, *_ = logged
    monkeypatch.setattr("os.sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else 4 * path.stat().st_size - 4)
    with pytest.raises(ValueError, match="over a quarter of .* of memory; audit it on a larger machine"):
        read(path)


def test_documents_that_the_datasets_have_not_are_named(logged):
    _, entries, state = logged
    with pytest.raises(ValueError, match="of dataset 1 was trained or waits, and 1 datasets have"):
        audit(entries, *state, LENGTHS[:1])
    with pytest.raises(ValueError, match="of dataset 0 was trained .* have \\[3, 40\\] documents; give --data-path"):
        audit(entries, *state, [LENGTHS[0][:3], LENGTHS[1]])


@pytest.mark.parametrize("what", ["lost", "doubled", "out_of_turn", "missing_steps", "first", "end"])
def test_an_audit_finds(tmp_path, what):
    packer = packer_of("wlb")
    run(tmp_path / "log", packer, 40)
    bad, state = read(tmp_path / "log"), what_waits(packer)
    if what == "lost":
        bad = np.delete(bad, 20)
    elif what == "doubled":
        bad = np.append(bad, bad[20:21])
    elif what == "out_of_turn":
        single = np.flatnonzero(bad["dataset"] == 1)
        bad["document"][single[1]] = bad["document"][single[0]]
    elif what == "missing_steps":
        bad = bad[bad["step"] != 7]
        assert audit(bad, *state).missing_steps == 1
    elif what == "first":
        bad = bad[bad["index"] > 0]
    else:
        bad["length"][np.argmax(bad["length"])] -= 1
    report = audit(bad, *state, LENGTHS)
    assert getattr(report, what if what in ("doubled", "out_of_turn") else "lost") >= 1
    assert not report.clean
