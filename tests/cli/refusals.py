"""A command line that is refused, whichever command's."""

import re

from megatron_wlb.cli.main import main


def refusal(capsys, *arguments):
    """What it says; checks the exit code, and that nothing is printed but a line that says it."""
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
