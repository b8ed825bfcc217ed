"""The document log: what is written is read, whatever a crash leaves; and an audit that finds what it should."""

import gzip
import io
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan import document_log
from megatron_wlb.plan.document_log import BEGINS_ANEW, append, audit, mend, read
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import make_policy
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.types import DOCUMENT

WINDOW, N = 64, 4


def packer(policy, pairs):
    stream = DocumentStream([Source(pairs=p) for p in pairs], seed=3, context_length=WINDOW)
    made = make_policy(
        policy,
        num_micro_batches=N,
        context_length=WINDOW,
        max_tokens=80,
        crossover_tokens=32,
        outlier_thresholds=(32,),
        use_native=True,
    )
    return Packer(stream, made, num_micro_batches=N, context_length=WINDOW, fingerprint="", policy_name=policy)


@pytest.fixture
def pairs():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 200, 60), rng.integers(1, 30, 40)]


def logged(tmp_path, policy, pairs, steps):
    """A log of `steps` steps, its entries, and (what waits, how far the stream is)."""
    path = tmp_path / "documents.log"
    made = packer(policy, pairs)
    for _ in range(steps):
        step = made.next()
        append(path, step.step, step.packing)
    state = made.state()
    waiting = np.array([tuple(row) for rows in state["waiting"].values() for row in rows], DOCUMENT)
    return path, read(path), (waiting, state["stream"]["position"])


@pytest.mark.parametrize("policy", ["original", "fixed", "wlb", "adaptive"])
def test_a_run_over_several_epochs_is_clean(tmp_path, policy, pairs):
    _, entries, (waiting, position) = logged(tmp_path, policy, pairs, 80)
    found = audit(entries, waiting, position, pairs)
    assert found.clean
    assert (found.steps, found.tokens) == (80, entries["length"].sum())
    assert found.documents > 200
    if len(waiting):
        assert not audit(entries, waiting[:0], position, pairs).clean


def test_what_is_written_is_read(tmp_path, pairs):
    path, entries, _ = logged(tmp_path, "wlb", pairs, 3)
    made = packer("wlb", pairs)
    for step in range(3):
        packing = made.next().packing
        rows = entries[entries["step"] == step]
        for name in ("index", "dataset", "document", "offset", "length"):
            assert np.array_equal(rows[name], packing.documents[name])
        assert np.array_equal(np.bincount(rows["micro_batch"], minlength=N), np.diff(packing.bounds))
    assert path.stat().st_size < 40 * len(entries)


def test_a_step_that_ran_again_counts_once(tmp_path, pairs):
    path, entries, state = logged(tmp_path, "adaptive", pairs, 6)
    again = packer("adaptive", pairs)
    for _ in range(6):
        step = again.next()
        if step.step >= 3:
            append(path, step.step, step.packing)
    assert np.array_equal(read(path), entries)
    assert audit(read(path), *state, pairs).clean


def test_an_audit_begins_where_the_data_began_anew_for_the_last_time(tmp_path, pairs):
    path = tmp_path / "documents.log"
    for begin, stop in ((0, 9), (5, 12), (8, 14)):
        made = packer("wlb", pairs)
        if begin:
            made.begin_at(begin)
        for _ in range(begin, stop):
            step = made.next()
            append(path, step.step, step.packing, begins_anew=0 < begin == step.step)
    state = made.state()
    waiting = np.array([tuple(row) for rows in state["waiting"].values() for row in rows], DOCUMENT)
    entries = read(path)
    found = audit(entries, waiting, state["stream"]["position"], pairs)
    assert found.clean
    assert (found.restarts, found.first_step, found.steps) == (2, 8, 6)
    assert found.tokens == entries["length"][entries["step"] >= 8].sum()
    unmarked = entries[entries["micro_batch"] != BEGINS_ANEW]
    assert not audit(unmarked, waiting, state["stream"]["position"], pairs).clean


def test_a_new_beginning_that_was_undone_does_not_count(tmp_path, pairs):
    """Its step ran again from the state that had been missing."""
    path, entries, state = logged(tmp_path, "adaptive", pairs, 6)
    anew = packer("adaptive", pairs)
    anew.begin_at(3)
    step = anew.next()
    append(path, step.step, step.packing, begins_anew=True)
    assert audit(read(path), *state).restarts == 1
    again = packer("adaptive", pairs)
    for _ in range(6):
        step = again.next()
        if step.step >= 2:
            append(path, step.step, step.packing)
    assert np.array_equal(read(path), entries)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_crash_costs_the_last_step_only(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("log")
    pairs = [np.random.default_rng(1).integers(1, 100, 50)]
    path, entries, _ = logged(tmp_path, "wlb", pairs, 3)
    whole = path.read_bytes()
    cut = data.draw(st.integers(1, len(whole) - 1))
    path.write_bytes(whole[:cut])
    starts = [i for i in range(len(whole)) if whole.startswith(b"\x1f\x8b\x08", i)]
    complete = sum(end <= cut for end in [*starts[1:], len(whole)])
    if complete == 0:
        with pytest.raises(ValueError, match="is not a document log"):
            mend(path)
        return
    assert mend(path) == cut - [*starts, len(whole)][complete]
    assert mend(path) == 0
    assert np.array_equal(read(path), entries[entries["step"] < complete])
    made = packer("wlb", pairs)
    for step in (made.next() for _ in range(3)):
        if step.step >= complete:
            append(path, step.step, step.packing)
    assert np.array_equal(read(path), entries)


def test_damage_before_the_end_is_refused(tmp_path, pairs):
    path, *_ = logged(tmp_path, "wlb", pairs, 4)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="damaged at byte"):
        read(path)
    path.write_text("something else")
    with pytest.raises(ValueError, match="is not a document log"):
        mend(path)
    assert path.read_text() == "something else"
    assert mend(tmp_path / "nothing") == 0


def member(rows):
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return gzip.compress(buffer.getvalue(), mtime=0)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_log_that_is_damaged_within_is_left_alone(damaged, tmp_path, pairs):
    """To cut it off there would lose the steps behind."""
    path, *_ = logged(tmp_path, "wlb", pairs, 4)
    whole = path.read_bytes()
    starts = [i for i in range(len(whole)) if whole.startswith(b"\x1f\x8b\x08" + bytes(5), i)]
    assert len(starts) == 4
    place = starts[damaged] + 40
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    before = path.read_bytes()
    assert mend(path) == 0
    with pytest.raises(ValueError, match=f"or it is damaged at byte {starts[damaged]}; restore it"):
        read(path)
    path.write_bytes(before[: starts[3]] + before[starts[3] : starts[3] + 20])  # and the last step is half written
    if damaged == 2:
        with pytest.raises(ValueError, match=f"is damaged at byte {starts[2]}, before its last step; restore it"):
            mend(path)
    else:
        assert mend(path) == 20
    assert path.read_bytes() == before[: starts[3]] + before[starts[3] : starts[3] + 20 * (damaged == 2)]


@pytest.mark.parametrize("half_written", [0, 5, 40])
def test_to_mend_is_to_look_at_the_end_only(half_written, tmp_path, pairs, monkeypatch):
    """A run of a billion documents begins no later than one of a thousand."""
    path, entries, _ = logged(tmp_path, "wlb", pairs, 30)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:half_written])
    looked_at, rows = [], document_log._rows
    monkeypatch.setattr(document_log, "_rows", lambda data: looked_at.append(len(data)) or rows(data))
    assert mend(path) == half_written
    assert len(looked_at) == 1
    assert np.array_equal(read(path), entries)


def test_a_last_step_that_another_program_packed_is_left_alone(tmp_path, pairs):
    """gzip writes the time, by which a step of ours is not known."""
    path, entries, _ = logged(tmp_path, "wlb", pairs, 3)
    whole = path.read_bytes()
    begin = whole.rindex(document_log._BEGIN)
    path.write_bytes(whole[:begin] + gzip.compress(gzip.decompress(whole[begin:]), mtime=1))
    assert mend(path) == 0
    assert np.array_equal(read(path), entries)


def test_the_last_step_is_found_across_the_blocks_that_are_read(tmp_path):
    path = tmp_path / "log"
    for place in (0, 5, (1 << 20) - 3, 1 << 20, (1 << 20) + 3):
        path.write_bytes(bytes(place) + document_log._BEGIN + bytes((1 << 20) - 4))
        with path.open("rb") as file:
            assert document_log._last_begin(file, path.stat().st_size) == place
            assert document_log._last_begin(file, place) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows["step"].__setitem__(-1, 7),
        lambda rows: rows["index"].__setitem__(0, -1),
        lambda rows: rows["offset"].__setitem__(0, 1 << 62),
        lambda rows: rows["micro_batch"].__setitem__(1, BEGINS_ANEW),
        lambda rows: rows["micro_batch"].__setitem__(slice(None), BEGINS_ANEW),
        lambda rows: rows.astype([(name, "<i8") for name in rows.dtype.names]),
        lambda rows: rows.reshape(1, -1),
        lambda rows: np.array([{"pickled": 1}]),
        lambda rows: b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<i8', 'shape': (1000000000000,), 'fortran_order': (",
        lambda rows: b"",
    ],
)
def test_what_no_run_writes_is_refused(change, tmp_path, pairs):
    path, entries, _ = logged(tmp_path, "wlb", pairs, 2)
    rows = entries[entries["step"] == 1].copy()
    changed = change(rows)
    packed = changed if isinstance(changed, bytes) else None
    step = member(rows if changed is None else changed) if packed is None else gzip.compress(packed, mtime=0)
    whole = path.read_bytes()
    path.write_bytes(step)
    with pytest.raises(ValueError, match="is not a document log, or it is damaged at byte 0"):
        read(path)
    path.write_bytes(whole + step + whole)
    with pytest.raises(ValueError, match=f"damaged at byte {len(whole)}"):
        read(path)


def test_a_step_may_not_unpack_to_more_than_any_has(tmp_path, pairs, monkeypatch):
    path, *_ = logged(tmp_path, "wlb", pairs, 2)
    size = path.stat().st_size
    monkeypatch.setattr(document_log, "MAX_STEP_BYTES", 1 << 20)
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(64 << 20), mtime=0) + path.read_bytes())
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"damaged at byte {size}"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    monkeypatch.setattr(document_log, "MAX_STEP_BYTES", 100)
    with pytest.raises(ValueError, match="step 0 has .* documents, .* bytes where --wlb-document-log takes 100"):
        append(path, 0, packer("wlb", pairs).next().packing)


def test_a_log_that_would_fill_the_memory_is_refused(tmp_path, pairs, monkeypatch):
    path, entries, _ = logged(tmp_path, "wlb", pairs, 4)
    monkeypatch.setattr(document_log, "_memory_bytes", lambda: 4 * entries.nbytes)
    assert len(read(path)) == len(entries)
    monkeypatch.setattr(document_log, "_memory_bytes", lambda: 4 * entries.nbytes - 4)
    with pytest.raises(ValueError, match="unpacks to over a quarter of .* bytes of memory; audit it"):
        read(path)


def test_documents_that_the_datasets_have_not_are_named(tmp_path, pairs):
    _, entries, state = logged(tmp_path, "wlb", pairs, 4)
    with pytest.raises(ValueError, match="of dataset 1 was trained or waits, and 1 datasets have"):
        audit(entries, *state, pairs[:1])
    with pytest.raises(ValueError, match="of dataset 0 was trained .* have \\[3, 40\\] documents; give --data-path"):
        audit(entries, *state, [pairs[0][:3], pairs[1]])


@pytest.mark.parametrize("what", ["lost", "doubled", "out_of_turn", "missing_steps", "first", "end"])
def test_an_audit_finds(tmp_path, pairs, what):
    _, entries, state = logged(tmp_path, "wlb", pairs, 40)
    bad = entries.copy()
    if what == "lost":
        bad = np.delete(bad, 20)
    elif what == "doubled":
        bad = np.append(bad, bad[20:21])
    elif what == "out_of_turn":
        single = np.flatnonzero(bad["dataset"] == 1)
        bad["document"][single[1]] = bad["document"][single[0]]
    elif what == "missing_steps":
        bad = bad[bad["step"] != 7]
        what = "lost"
        assert audit(bad, *state).missing_steps == 1
    elif what == "first":
        bad, what = bad[bad["index"] > 0], "lost"
    else:
        longest = int(np.argmax(bad["length"]))
        bad["length"][longest] -= 1
        what = "lost"
    found = audit(bad, *state, pairs)
    assert getattr(found, what) >= 1
    assert not found.clean
