"""Commands as tests run them: refused with one line, or in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path

from megatron_wlb.cli.main import main

ROOT = Path(__file__).parents[2]


def refusal(capsys, *arguments):
    """What a refused command line says; checks the exit code, and that nothing is printed but a line that says it."""
    try:
        code = main([*arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    found = re.fullmatch(f"megatron-wlb {arguments[0]}: error: ([^\n]*)\n", printed.err)
    assert found, printed.err
    return found[1]


def process(*arguments, without=(), **options):
    """A command run in a process of its own, where modules `without` cannot be imported."""
    code = f"""
import sys
class Missing:
    def find_spec(self, name, *_):
        if name in {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from megatron_wlb.cli.main import main
sys.exit(main())"""
    options = {"capture_output": True, "text": True, "cwd": ROOT, "check": False} | options
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], **options)
