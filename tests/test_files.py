"""Reading within a limit, writing whole or not at all, and logs of whole entries."""

import errno
import os
import signal
import stat

import pytest

from megatron_wlb import files
from tests.limits import files_up_to


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


def test_what_cannot_take_entries_is_found_beforehand(tmp_path):
    files.check_log(str(tmp_path / "log"), "--wlb-log")
    assert (tmp_path / "log").read_bytes() == b""
    for path, message in (
        (tmp_path / "no/log", "--wlb-log .*: the folder .*no does not exist; create it"),
        (tmp_path, "cannot append 0 bytes to --wlb-log .*: Is a directory; free space there, or name a file"),
    ):
        with pytest.raises(ValueError, match=message):
            files.check_log(str(path), "--wlb-log")
    (tmp_path / "data.bin").write_bytes(b"tokens")
    (tmp_path / "link").symlink_to(tmp_path / "data.bin")
    files.read(tmp_path / "link", 9, "")
    for name in ("data.bin", "link"):
        with pytest.raises(ValueError, match=f"--wlb-log .*{name} is a file that the run reads; name another"):
            files.check_log(str(tmp_path / name), "--wlb-log")
    with files_up_to(100), pytest.raises(ValueError, match="--save .*: File too large; free space there, or name"):
        files.check_room(str(tmp_path), "--save")
    assert {path.name for path in tmp_path.iterdir()} == {"log", "data.bin", "link"}


def test_a_folder_that_takes_no_files_is_found_beforehand(tmp_path, monkeypatch):
    def refused(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refused)
    with pytest.raises(ValueError, match="--save .*: Read-only file system; let it be written, or name another"):
        files.check_room(str(tmp_path), "--save")
    files.check_log(str(tmp_path / "log"), "--wlb-log")  # which is there, and can be written


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory; restore it"),
        (lambda path: path.mkdir(), "is a folder, pipe or device; restore it"),
        (lambda path: os.mkfifo(path), "is a folder, pipe or device; restore it"),
        (lambda path: path.symlink_to("/dev/zero"), "is a folder, pipe or device; restore it"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "has over 1 MiB, the limit; restore it"),
    ],
)
def test_what_is_read_is_a_file_within_a_limit(make, message, tmp_path):
    make(tmp_path / "given")
    with pytest.raises(ValueError, match=f"given:? {message}"):
        files.read(tmp_path / "given", 1 << 20, "restore it")


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002])
def test_what_is_written_follows_umask_and_no_link(mask, tmp_path):
    (tmp_path / "of another").write_text("kept")
    (tmp_path / "report").symlink_to(tmp_path / "of another")
    before = os.umask(mask)
    try:
        with files.written(tmp_path / "report") as file:
            file.write("new")
    finally:
        os.umask(before)
    assert (tmp_path / "report").read_text() == "new" and not (tmp_path / "report").is_symlink()
    assert stat.S_IMODE((tmp_path / "report").stat().st_mode) == 0o666 & ~mask
    assert (tmp_path / "of another").read_text() == "kept"


@pytest.mark.parametrize("ends", [KeyboardInterrupt, signal.SIGTERM, OSError(28, "No space left on device")])
def test_what_is_not_written_to_its_end_leaves_nothing(ends, tmp_path):
    (tmp_path / "report").write_text("old")

    def half():
        with files.written(tmp_path / "report") as file:
            file.write("new")
            file.flush()
            assert len(os.listdir(tmp_path)) == 2
            if ends == signal.SIGTERM:
                os.kill(os.getpid(), ends)
            raise ends

    with pytest.raises((SystemExit, KeyboardInterrupt, OSError)) as error:
        half()
    assert (tmp_path / "report").read_text() == "old" and os.listdir(tmp_path) == ["report"]
    assert getattr(error.value, "filename", str(tmp_path / "report")) == str(tmp_path / "report")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="cannot append 1 bytes to --wlb-log .*; free space there, or name a file"):
            files.append(path, b"x", "--wlb-log")
