"""Distributed tests without launchers: fork a world of gloo processes from the warm parent."""

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_fork = mp.get_context("fork")

HANGS_SECONDS = 600.0
"""What takes longer hangs, on the slowest machine, too."""


def run_world(fn: Callable[..., Any], size: int, *args: Any, timeout: float = HANGS_SECONDS) -> list[Any]:
    """`fn(*args)` in the processes of a `world`; the results by rank.

    Results are pickled. An exception in a process is raised here with its traceback (RuntimeError), and a world that
    takes longer than `timeout` seconds is killed (TimeoutError). The parent joins no process group.
    """
    with world(fn, size, *args) as readers:
        return collect(readers, time.monotonic() + timeout)


@contextlib.contextmanager
def world(fn: Callable[..., Any], size: int, *args: Any, backend: str = "gloo") -> Iterator[list[Connection]]:
    """Fork `size` processes with a process group that run `fn(*args)`; yields where they answer, by rank.

    At the end they are killed (SIGKILL), wherever they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        readers, processes = [], []
        for rank in range(size):
            reader, writer = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_main, args=(fn, rank, size, folder, backend, writer, args))
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            yield readers
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started itself
                process.join()


def _main(
    fn: Callable[..., Any], rank: int, size: int, folder: str, backend: str, writer: Connection, args: tuple[Any, ...]
) -> None:
    os.setpgrp()
    gc.freeze()  # a collection would write to every object of the parent, and so copy its memory
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    tempfile.tempdir = folder  # killed or ended by os._exit, no process cleans up after itself
    try:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
        answer = (True, fn(*args))
        dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    # Bytes, since a connection would pass tensors by file descriptors of a process that is about to end.
    writer.send_bytes(pickle.dumps(answer))
    os._exit(0)


def collect(readers: list[Connection], deadline: float) -> list[Any]:
    """The answers of a `world` by rank, as `run_world` returns or raises them."""
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        pending = {id(reader): rank for rank, reader in enumerate(readers) if rank not in results}
        ready = mp.connection.wait(
            [readers[rank] for rank in pending.values()], timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending.values())} of {len(readers)} did not answer in time")
        for reader in ready:
            rank = pending[id(reader)]
            try:
                ok, results[rank] = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"rank {rank} of {len(readers)} died without an answer") from None
            if not ok:
                raise RuntimeError(f"rank {rank} of {len(readers)} failed:\n{results[rank]}")
    return [results[rank] for rank in range(len(readers))]
