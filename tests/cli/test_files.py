"""Files of commands: no output replaces an input or another output, and nothing is left of a command that is ended."""

import os
import signal

import pytest

from megatron_wlb.cli import common, compare, main
from tests.cli.commands import refusal


def test_an_output_replaces_neither_an_input_nor_another_output(tmp_path, capsys, monkeypatch):
    log = tmp_path / "run.jsonl"
    log.write_text("a log")

    def run(args):
        compare.files.read(args.logs[0], 99, "")
        with common.writer(args.json, "--json"), common.writer(str(tmp_path / "b"), "--html"):
            raise AssertionError("both are open")

    monkeypatch.setattr(compare, "run", run)
    (tmp_path / "link").symlink_to(log)
    for name, what in ((log, "an input"), (tmp_path / "link", "an input"), (tmp_path / "x/../b", "another output")):
        (tmp_path / "x").mkdir(exist_ok=True)
        said = refusal(capsys, "compare", str(log), "--json", str(name))
        assert f"is {what} of this command, too; name another file" in said
    assert log.read_text() == "a log" and {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "link", "x"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_leaves_nothing(number, tmp_path, capsys, monkeypatch):
    def run(args):
        with common.writer(args.json, "--json"):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(compare, "run", run)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    try:
        code = main.main(["compare", "run.jsonl", "--json", str(tmp_path / "out")])
    except SystemExit as ended:
        code = ended.code
    assert code == 128 + number
    assert not os.listdir(tmp_path) and capsys.readouterr().err == ""
    assert handlers == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]


def test_an_error_of_the_system_names_file_and_remedy(capsys, monkeypatch):
    def run(args):
        os.stat("/no/where")

    monkeypatch.setattr(compare, "run", run)
    said = refusal(capsys, "compare", "run.jsonl")
    assert said == "/no/where: No such file or directory; check the name, rights and space"
