"""The state of a packer in a file: whole or not at all, and refused where anything has happened to it."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.packing import state
from megatron_wlb.packing.adaptive import AdaptivePacking
from tests.jobs import job, packer

JOB = job(packing=AdaptivePacking(max_delay_steps=20))
LENGTHS = np.random.default_rng(0).integers(0, 150, 300)
RUNNING = packer(JOB, LENGTHS)
STATE = [RUNNING.next() for _ in range(5)][-1].state


@pytest.fixture
def path(tmp_path):
    state.save(tmp_path / "folder" / "of a run" / "state.json", STATE, JOB, 40, 7)
    return tmp_path / "folder" / "of a run" / "state.json"


def test_what_is_saved_is_loaded(path):
    loaded, described, *of_run = state.load(path)
    assert loaded == STATE
    assert described == json.loads(json.dumps(JOB.to_json())) and of_run == [40, 7]
    assert os.listdir(path.parent) == [path.name]


def test_the_largest_file_that_is_loaded_is_saved(path, monkeypatch):
    monkeypatch.setattr(state, "MAX_BYTES", path.stat().st_size)
    state.save(path, STATE, JOB, 40, 7)
    assert state.load(path)[0] == STATE


@given(st.data())
def test_a_state_that_was_changed_is_refused_and_changes_nothing(data):
    changed = json.loads(json.dumps(STATE))
    node = data.draw(st.sampled_from([changed, changed["waiting"], *changed["waiting"].values()]))
    key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
    if data.draw(st.booleans()):
        del node[key]
    else:
        node[key] = data.draw(st.sampled_from([1.5, "7", [[]], 1 << 70]))
    running = packer(JOB, LENGTHS)
    before = running.state()
    with pytest.raises(ValueError, match="resume|give the"):
        running.load_state(changed)
    assert running.state() == before


VERSION = "packer state of version 1; this release reads version 5, resume with the"


@pytest.mark.parametrize("value", [None, 3, [], {}, {"format": "other"}, STATE | {"version": 1}])
def test_what_is_no_state_or_of_another_version_is_refused(value):
    has_version = isinstance(value, dict) and "version" in value
    with pytest.raises(ValueError, match=VERSION if has_version else "this is not a packer state"):
        state.check(value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: b"[" * 10**6,
        lambda data: b"3",
        lambda data: b"{}",
        lambda data: data.replace(b'"job":', b'"jobs":'),
        lambda data: b'{"later":1,' + data[1:],
        lambda data: data.replace(b'"step":5', b'"step":6'),
        lambda data: data.replace(b'"version":5', b'"version":4'),
    ],
)
def test_a_file_that_is_none_is_named(path, damage):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^{path} cannot be read as a packer state: .*; restore it$"):
        state.load(path)


def test_a_file_that_cannot_be_one_is_named(path, monkeypatch):
    with pytest.raises(ValueError, match=r"there is no packer state .*other.json: .*; copy the file"):
        state.load(path.with_name("other.json"))
    monkeypatch.setattr(state, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match=f"{path} has over 0 MiB, the limit; no packer state is such a file"):
        state.load(path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match=f"the packer state {path} has .* bytes, over 100; let fewer documents wait"):
        state.save(path, packer(JOB, LENGTHS).state(), JOB, 40, 7)
    assert path.read_bytes() == old
