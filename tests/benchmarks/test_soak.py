"""The soak runs, for seconds; the reference goes on from its states, and a difference is seen. Speeds don't matter."""

import json

import pytest

from benchmarks import results, soak


def test_a_short_soak(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    soak.main(["--minutes", "0.05", "--micro-batches", "16"])
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["settings"]["compared_after_steps"][0] == 0
    assert found["settings"]["differ_after_steps"] == []
    assert len(found["rows"]) >= 3
    for before, row in zip(found["rows"], found["rows"][1:], strict=False):
        assert row["steps"] > before["steps"] and row["documents"] > before["documents"]
    for row in found["rows"]:
        assert row["streamed"] == row["documents"] + row["waiting"]
        assert row["malloc_mib"] > 1 and row["python_blocks"] > 1000 and row["resident_mib"] > row["malloc_mib"]
    assert {goal["name"]: goal["holds"] for goal in found["goals"]}["states Python went on from otherwise"]


def test_a_difference_is_seen():
    """Of a reference that packs other numbers of micro-batches."""
    made, job = soak.packer(8), soak.job_of(8)
    follower = soak.Follower(16)
    for _ in range(1 + soak.FOLLOWED_STEPS):
        follower.see(soak.plan_step(made, job))
    follower.close()
    assert follower.differ == [0] and follower.compared == []


@pytest.mark.parametrize(("steps_a_row", "warming_up"), [(50, 2), (1, 9)])
def test_growth_is_that_of_the_memory_after_warming_up(steps_a_row, warming_up):
    """By steps, however long they take; in a short run, to its half."""
    memory = [*[10] * warming_up, *[200] * 3, *[210] * 3, *[220] * 3]
    rows = [{"steps": k * steps_a_row, "mib": value} for k, value in enumerate(memory)]
    assert soak.growth(rows, "mib") == pytest.approx(0.1)


def test_memory_that_is_held_is_counted_and_memory_that_is_not_is_not():
    before = soak.in_use_mib()
    held = [bytes(100_000) for _ in range(100)]
    assert soak.in_use_mib() - before == pytest.approx(100 * 100_000 / 2**20, rel=0.1)
    held.clear()
    assert soak.in_use_mib() == pytest.approx(before, abs=0.5)
