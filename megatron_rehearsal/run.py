"""Runs chosen ranks of a job, a process each, and judges their results."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rehearsal import record
from megatron_rehearsal.build import library
from megatron_rehearsal.match import match, program
from megatron_rehearsal.task import Task
from megatron_wlb.job import Parallel

ROOM = 0.95
"""Share of a card that may be reserved: the rest is for the context and NCCL, which a rehearsal does not see."""
CLOSE, CLOSE_GIB = 0.05, 0.25
"""By which prediction and rehearsal may differ, the larger of the two: workspaces of kernels are not predicted."""
WHOLE = 64
"""Ranks of a job that are all run where their calls are matched."""


def chosen(p: Parallel, *, every: bool) -> list[int]:
    """Return a rank of every kind: each stage, at both ends of its context-parallel and data-parallel ranks.

    `every`: those whose calls stand for the calls of all. These are all ranks of jobs of up to `WHOLE`. Of larger ones,
    they are two tensor-parallel ranks, and the first and the last data-parallel rank, of every stage and context-
    parallel rank: others make the calls of their neighbors.
    """
    whole = every and p.num_gpus <= WHOLE
    tp = range(p.tp if whole else min(2, p.tp) if every else 1)
    dp, cp = range(p.dp) if whole else {0, p.dp - 1}, range(p.cp) if every else {0, p.cp - 1}
    return sorted(p.rank(*kind) for kind in itertools.product(range(p.pp), dp, cp, tp))


def rehearse(
    task: Task, ranks: Sequence[int], advance: Callable[[int], None], whole: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run ranks, as many at a time as there are processors.

    Returns the result of each, of the last step and of all, and the faults in their NCCL calls, [] if none. `whole`:
    the ranks stand for all of the job, so that their calls are matched. `advance` is told of ranks that have ended.
    Raises ValueError with the reason if one ends before its first step for another reason than memory.
    """
    seen, programs = {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(_run(task, ranks, Path(folder))) as ended:
        for rank, status in ended:
            advance(1)
            result = _result(Path(folder), rank, status)
            records = np.fromfile(Path(folder, f"{rank}.log"), record.RECORD)
            seen[rank] = record.summary(result, records)
            if whole:
                programs[rank] = program(result, records)
    fitting = whole and not any(rank["out_of_memory"] for rank in seen.values())
    wrong = [said for one_queue in (True, False) for said in match(programs, one_queue)] if fitting else []
    return [seen[rank] for rank in ranks], list(dict.fromkeys(wrong))


def _run(task: Task, ranks: Sequence[int], folder: Path) -> Generator[tuple[int, int | None]]:
    """Run `megatron_rehearsal.worker`; yields ranks that have ended, with their status, None if it ended itself."""
    cuda = str(library() / "libcuda.so.1")  # cuDNN's frontend opens a library for itself
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", **os.environ}
    environment |= {"LD_PRELOAD": cuda, "LD_LIBRARY_PATH": str(library()), "CUDNN_FRONTEND_CUDART_LIB_NAME": cuda}
    environment |= {"WORLD_SIZE": str(task.world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    caches = ("TMPDIR", "TORCH_EXTENSIONS_DIR", "TRITON_HOME", "HF_MODULES_CACHE", "HF_DATASETS_CACHE", "MPLCONFIGDIR")
    environment |= dict.fromkeys(caches, str(folder)) | {"UB_SKIPMC": "1"}  # TransformerEngine without multicast
    given = folder / "task.json"
    given.write_bytes(msgspec.json.encode(msgspec.structs.replace(task, ranks=ranks, folder=str(folder))))
    # -P: nothing that happens to lie in this folder is imported.
    command = [sys.executable, "-P", "-m", "megatron_rehearsal.worker", str(given)]
    options: Any = {"text": True, "env": environment, "start_new_session": True}
    left = [*ranks]
    with (
        (folder / "worker.txt").open("w") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, **options) as worker,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(os.killpg, worker.pid, signal.SIGKILL)  # ranks that still run, too
        assert worker.stdout is not None
        while left:
            if not (line := worker.stdout.readline()):
                yield left[0], None
            rank, status = map(int, line.split())
            left.remove(rank)
            yield rank, status


def _result(folder: Path, rank: int, status: int | None) -> dict[str, Any]:
    """Return the result of a rank. Raises ValueError with the reason if it ended for another reason than memory."""
    written = folder / f"{rank}.json"
    result: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {"error": "SystemExit"}
    error = result.get("error")
    if error and error.startswith("SystemExit"):  # what was wrong is in its own words
        text = (folder / ("worker.txt" if status is None else f"{rank}.txt")).read_text()
        said = re.search(r"(?:: error\b[^:]*|^rehearsal): (.+)", text, re.M)
        error = said[1] if said else (text.splitlines() or [error])[-1]
    if error and "OutOfMemoryError" not in error:
        raise ValueError(f"rank {rank} ended with status {status}: {error.partition('\n')[0]}")
    return result


def verdict(ranks: list[dict[str, Any]], task: Task, wrong: Sequence[str], *, modelled: bool) -> tuple[str, str]:
    """Return whether a job fits, and the remedy if not, or if memory is predicted wrong.

    `wrong`: with its NCCL calls. `modelled`: memory is predicted, of the job's own number format.
    """
    if wrong:
        return "hangs", f"{wrong[0]}; report it with the flags"
    smaller = f"{'give a smaller --wlb-max-tokens, or ' * task.wlb}recompute activations"
    if worst := [r for r in ranks if r["out_of_memory"]]:
        return "does not fit", f"rank {worst[0]['rank']} runs out of memory; {smaller}"
    if worst := [r for r in ranks if r["retries"] or r["reserved_gib"] > ROOM * task.gpu.gib]:
        r = max(worst, key=lambda r: (r["retries"], r["reserved_gib"]))
        return "thrashes", (
            f"rank {r['rank']} reserves {r['reserved_gib']:.1f} of {task.gpu.gib:.1f} GiB and frees cached memory "
            f"{r['retries']} times; {smaller}, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is not"
        )

    def wrongly(r: dict[str, Any]) -> float:
        return float(abs(r["predicted_gib"] - r["allocated_gib"]) / max(CLOSE * r["allocated_gib"], CLOSE_GIB))

    if modelled and wrongly(off := max(ranks, key=wrongly)) > 1:
        return "fits", (
            f"rank {off['rank']} allocates {off['allocated_gib']:.2f} GiB where {off['predicted_gib']:.2f} were "
            "predicted: --wlb-max-tokens auto may be wrong; report it with the flags"
        )
    return "fits", ""
