"""Files of commands: no output replaces an input or another output, and nothing is left of a command that is ended."""

import os
import signal

import pytest

from megatron_wlb import files
from megatron_wlb.cli import common, compare, main
from tests.cli.commands import refusal


def test_an_output_replaces_neither_an_input_nor_another_output(tmp_path, capsys, monkeypatch):
    log = tmp_path / "run.jsonl"
    log.write_text("a log")

    def run(args):
        files.read(args.logs[0], 99, "")
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


def test_long_words_and_lines_of_an_error_are_cut():
    said = main.refusal("a", f"{'w' * 201} {'v' * 200} {'x ' * 500}")
    assert said == f"a: error: {'w' * 200}... {'v' * 200} {'x ' * 500}"[: 10 + 1000] + "...\n"


def test_a_module_that_no_extra_installs_is_a_fault_of_ours():
    def run(name):
        raise ModuleNotFoundError(name=name)

    assert main.in_one_line("a", lambda: run("rich")) == 2
    with pytest.raises(ModuleNotFoundError):
        main.in_one_line("a", lambda: run("nowhere"))


def test_a_flag_with_its_value_behind_an_equals_sign_is_of_the_command():
    parser = main.Parser()
    parser.add_argument("--json")
    words = "x --json=a b --bf16 --seq-length 8 --json c -- run --json".split()
    own, flags = ["x", "--json=a", "b", "--json", "c"], ["--bf16", "--seq-length", "8"]
    assert parser.divide(words) == (own, flags, ["run", "--json"])
