"""`megatron-wlb analyze`: predict the gain of --wlb for a run.

Predicts the gain from the lengths of the run's documents and its arguments alone. Needs neither a GPU, nor Megatron,
nor torch; of the dataset, it reads only the .idx file.

    megatron-wlb analyze train.log --html report.html
    megatron-wlb analyze --html report.html -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
    megatron-wlb analyze --model llama2-7b --seq-length 131072 --tensor-model-parallel-size 8 ... --data-path DATA

LOG comes first. FLAGS, of Megatron and of --wlb, override those in a log or a command. Megatron (attention across
documents, or intra-document attention) and --wlb train the same tokens every step. Steps are packed, sharded and
simulated as they would be trained.
"""

import argparse
import sys

from megatron_wlb.cli.analyze import report, table
from megatron_wlb.cli.analyze.entries import entries
from megatron_wlb.cli.analyze.setup import Setup
from megatron_wlb.cli.common import console, integer, stages, write_json, writer
from megatron_wlb.cli.job import add_job_flags, run_of
from megatron_wlb.simulate.step import trace_of

USAGE = "[LOG] [-q] [--html FILE] [--json FILE] [--trace FILE] [FLAGS] [-- COMMAND]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("-q", action="store_true", help="print the verdict only; exit status 0: use it, else 1")
    parser.add_argument("--html", metavar="FILE", help="report with pictures to write, in one file")
    parser.add_argument(
        "--json", metavar="FILE", help="numbers to write; - for standard output, the table on the other"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="timeline of a typical step with --wlb, for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--steps", type=integer(1, 1 << 14), metavar="K", help="steps to simulate; default: by the size of the job"
    )
    add_job_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Analyse, print and write. Raises ValueError before anything is written."""
    import jinja2  # noqa: F401  # an extra, missed now rather than after the work

    terminal = console(args.json, args.html, args.trace, width=100)
    if args.html is not None:
        from megatron_wlb.cli.analyze import page  # so are its packages
    with stages(args.json) as begin:
        begin("choosing micro-batches")
        setup = Setup(run_of(args))
        steps = report.steps_of(setup.job)
        if args.steps is not None:
            steps = report.Steps(max(args.steps, steps.packed // args.steps * args.steps), args.steps)
        with (
            writer(args.json, "--json") as file,
            writer(args.html, "--html") as html,
            writer(args.trace, "--trace") as trace,
        ):
            results = report.analyse(setup, steps, begin)
            words = table.rendered(results)
            if file is not None:
                write_json(file, {"headline": words["headline"], "facts": words["facts"]} | entries(results))
            if html is not None:
                html.write(page.page(results, words))
            write_json(trace, trace_of(results.example(results.schemes.ours).step))
    if args.q and setup.run.misfit:
        print(f"! {setup.run.misfit}", file=sys.stderr)
    table.show(words, terminal, verdict_only=args.q)
    return int(args.q and words["tone"] != "gain")
