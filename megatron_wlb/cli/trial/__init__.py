"""`megatron-wlb trial`: run a command by turns without and with --wlb, and report.

Runs the first steps of a run by turns, without --wlb and with it, one after the other on the same GPUs, and compares
speed, digests, losses and memory. It begins where the run would begin, saves no checkpoint, and writes to FOLDER only.

    megatron-wlb trial --html trial.html -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
    megatron-wlb trial -- srun python pretrain_gpt.py --num-layers 32 ...           in a Slurm script

COMMAND is the run's, word by word. FLAGS of --wlb are added to it; other flags, of Megatron, take precedence in the
prediction alone. FOLDER must be one that the run sees, too. A turn that crashes is named, and the trial goes on; the
exit status is 1 if no turn of a side is left. The report has no paths and no names of data, unless --with-paths.
"""

import argparse

from megatron_wlb.cli import common
from megatron_wlb.cli.common import integer, write_json, writer
from megatron_wlb.cli.trial import command, report, turns

USAGE = "[--steps N] [--turns K] [--out FOLDER] [--html FILE] [--json FILE] [--with-paths] [FLAGS] -- COMMAND"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--steps", type=integer(4, 1 << 14), default=30, metavar="N", help="steps of a turn; default: 30"
    )
    parser.add_argument(
        "--turns", type=integer(1, 1 << 10), default=2, metavar="K", help="turns of each side; default: 2"
    )
    parser.add_argument(
        "--out", default="wlb-trial", metavar="FOLDER", help="folder to make, for the logs; default: wlb-trial"
    )
    parser.add_argument("--html", metavar="FILE", help="report with a picture to write, in one file")
    parser.add_argument("--json", metavar="FILE", help="numbers to write; - for standard output")
    parser.add_argument("--with-paths", action="store_true", help="leave paths and names of data in the report")
    # What `run_of` reads of `add_job_flags`.
    parser.set_defaults(log=None, approximate=True, gpu=None, model=None)


def run(args: argparse.Namespace) -> int:
    """Check, run all turns, report. Raises ValueError before anything is started."""
    import jinja2  # noqa: F401  # an extra, missed now rather than after the work

    terminal = common.console(args.json, args.html, width=120)
    if args.html is not None:
        from megatron_wlb.cli.trial import page  # so are its packages
    plan = command.checked(args)
    with writer(args.json, "--json") as file, writer(args.html, "--html") as html:
        ran = turns.run_all(plan, args.turns)
        found = report.reported(args, plan, ran)
        write_json(file, found.entries)
        if html is not None:
            html.write(page.page(found))
    common.show(terminal, found.words, found.tables)
    terminal.print(f"With --wlb: {found.command}", soft_wrap=True)
    return found.status
