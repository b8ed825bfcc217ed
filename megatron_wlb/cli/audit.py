"""`megatron-wlb audit`: check a run's document log: nothing lost, nothing doubled.

Checks that, over all restarts, the steps of a run trained every document exactly once in every pass over the data, and
with --sft all conversations of an epoch before the next one began.
After --wlb-restart-packing, only steps since the data last began anew count. Prints the result as JSON; the exit code
is 1 if something is wrong.
"""

import argparse
import json
import sys
from dataclasses import asdict

import numpy as np

from megatron_wlb.cli.common import Words
from megatron_wlb.plan import document_log
from megatron_wlb.plan import state as saved
from megatron_wlb.plan.dataset import read_tokens, trained_tokens

USAGE = "LOG --state FILE [--data-path PREFIX ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the file that --wlb-document-log named")
    parser.add_argument(
        "--state",
        required=True,
        metavar="FILE",
        help="packer state of the checkpoint up to which the log is checked (iter_XXXXXXX.wlb.json): it knows what "
        "waits",
    )
    parser.add_argument(
        "--data-path",
        nargs="+",
        default=[],
        metavar="PREFIX",
        help="datasets of the blend, in order, without weights: checks that documents are trained to their ends",
    )


def run(args: argparse.Namespace, words: Words) -> int:
    """Audit and print; returns 1 for findings. Raises ValueError for wrong files."""
    state, _ = saved.load(args.state)
    entries = document_log.read(args.log)
    entries = entries[entries["step"] < state["step"]]
    if not len(entries):
        raise ValueError(f"{args.log} has no step before step {state['step']} of {args.state}; name a later state")
    if entries["step"][-1] != state["step"] - 1:
        raise ValueError(
            f"{args.log} ends with step {entries['step'][-1]}, before step {state['step'] - 1} of {args.state}; "
            "name an earlier state, or the whole log"
        )
    waiting = np.concatenate(list(saved.waiting(state).values()))
    lengths = [trained_tokens(read_tokens(prefix)) for prefix in args.data_path] or None
    stream = state["stream"]
    whole = stream.get("whole_epochs", False)
    result = document_log.audit(entries, waiting, stream["position"], lengths, whole_epochs=whole)
    if result.restarts:
        print(
            f"{args.log}: the data began anew at step {result.first_step}; the steps before are not judged",
            file=sys.stderr,
        )
    print(json.dumps(asdict(result) | {"waiting": len(waiting), "clean": result.clean}, indent=1))
    return 0 if result.clean else 1
