"""`megatron-wlb audit`: was every document of a run trained exactly once?"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.plan import document_log
from megatron_wlb.plan.dataset import read_tokens
from megatron_wlb.plan.state import check_format
from megatron_wlb.plan.state import waiting as waiting_of


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "audit",
        help="check a run's document log: nothing lost, nothing doubled",
        description="Checks that the steps of a run trained every document exactly once in every pass over the data,\n"
        "over all restarts; where the data began anew (--wlb-restart-packing), from the last time on. Prints what it\n"
        "found as JSON; exit code 1 if something is wrong.",
    )
    parser.add_argument("log", help="the file that --wlb-document-log named")
    parser.add_argument(
        "--state",
        required=True,
        help="packer state of the checkpoint up to which the log is checked (iter_XXXXXXX.wlb.json): it knows what "
        "waits",
    )
    parser.add_argument(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="datasets of the blend, in order, without weights: checks that documents are trained to their ends",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for files that are not what they must be. Returns 1 if the audit finds something."""
    state = _state(args.state)
    waiting = waiting_of(state)
    entries = document_log.read(args.log)
    entries = entries[entries["step"] < state["step"]]
    if not len(entries):
        raise ValueError(f"{args.log} has no step before step {state['step']} of {args.state}; name a later state")
    if entries["step"][-1] != state["step"] - 1:
        raise ValueError(
            f"{args.log} ends with step {entries['step'][-1]}, before step {state['step'] - 1} of {args.state}; "
            "name an earlier state, or the whole log"
        )
    pairs = [np.maximum(read_tokens(prefix) - 1, 0) for prefix in args.data_path or ()] or None
    found = document_log.audit(entries, waiting, int(state["stream"]["position"]), pairs)
    if found.restarts:
        print(
            f"{args.log}: the data began anew at step {found.first_step}; the steps before are not judged",
            file=sys.stderr,
        )
    print(json.dumps(asdict(found) | {"waiting": len(waiting), "clean": found.clean}, indent=1))
    return 0 if found.clean else 1


def _state(path: str) -> dict[str, Any]:
    try:
        state = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; give iter_XXXXXXX.wlb.json") from error
    check_format(state, path)
    return dict(state)
