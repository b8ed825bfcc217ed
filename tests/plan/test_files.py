"""Appending to a log leaves whole entries only."""

import os

import pytest

from megatron_wlb.plan import files


def test_entries_follow_one_another(tmp_path):
    for entry in (b"one\n", b"two\n"):
        files.append(tmp_path / "log", entry, "--wlb-log")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path, monkeypatch):
    files.append(tmp_path / "log", b"one\n", "--wlb-log")
    write, room = os.write, [2, 0]

    def filling(descriptor, data):
        if not (left := room.pop(0)):
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:left])

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(OSError, match="cannot append 4 bytes to --wlb-log .*: No space left on device; free space"):
        files.append(tmp_path / "log", b"two\n", "--wlb-log")
    assert (tmp_path / "log").read_bytes() == b"one\n"


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="cannot append 1 bytes to --wlb-log .*; free space there, or name a file"):
            files.append(path, b"x", "--wlb-log")
