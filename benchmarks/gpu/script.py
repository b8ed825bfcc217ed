"""Upstream's script in processes of their own, as `torchrun -m megatron_wlb.run` starts it, and watched from inside.

    python -m benchmarks.gpu.script WATCHER FILE SCRIPT FLAGS

WATCHER is a module of this folder. Its `watch(FILE)` is called when megatron is imported, before the script runs. A
process imports at once, and trains when its run may `go`, so that the GPU does not wait for imports.
"""

import importlib
import os
import re
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import ROOT

LOOK_SECONDS = 0.05
STAND_IN = ROOT / "tests" / "adapter" / "upstream_script.py"
"""Trains as upstream's pretrain_gpt.py on a CPU; no wheel ships that."""
ON_CPU = "--distributed-backend gloo --reset-attention-mask --reset-position-ids --num-workers 0"
ON_GPU = "--dataloader-inter-document-masking --no-gradient-accumulation-fusion"
"""Attention ends with the document: by a dense mask on a CPU, in TransformerEngine on a GPU."""


@dataclass(kw_only=True)
class Run:
    """Ranks of a run, each with a log of its own."""

    name: str
    folder: Path
    script: Path
    flags: Sequence[str]
    watcher: str
    ranks: Sequence[int] = (0,)
    """Those that run, of `world`."""
    world: int = 1
    env: dict[str, str] = field(default_factory=dict)
    began: float = 0.0
    """When it might go, by `time.monotonic`."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._go.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.world)}
        # Every rank takes the one GPU.
        shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GO": str(self._go)}
        for rank in self.ranks:
            words = [self.watcher, str(self.file(rank)), str(self.script), *self.flags]
            with self.log(rank).open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.gpu.script", *words],
                        env={**os.environ, "OMP_NUM_THREADS": "1", **shared, **self.env, "RANK": str(rank)},
                        cwd=ROOT,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def go(self) -> None:
        self.began = time.monotonic()
        self._go.touch()

    def ended(self) -> bool:
        """Whether all processes have; the rest of a run ends with the first that fails."""
        if any(process.poll() for process in self.processes):
            self.kill()
        return all(process.poll() is not None for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    @property
    def failed(self) -> bool:
        return any(process.returncode for process in self.processes)

    def file(self, rank: int) -> Path:
        """What the watcher writes."""
        return self.folder / f"{self.name}, rank {rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.folder / f"{self.name}, rank {rank}.log"

    def text(self) -> str:
        """What all ranks printed."""
        return "".join(self.log(rank).read_text(errors="replace") for rank in self.ranks)

    @property
    def _go(self) -> Path:
        return self.folder / f"{self.name}.go"


def losses(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"lm loss: (\S+)", text)]


def digests(text: str) -> list[str]:
    return re.findall(r"\| digest (\w+)", text)


def trained(runs: Sequence[Run], at_once: int = 1, ahead: int = 1) -> Iterator[Run]:
    """Yield runs as they end, `at_once` of them training and `ahead` more importing."""
    waiting, started, going = [*runs], list[Run](), list[Run]()
    try:
        while waiting or started or going:
            while waiting and len(started) + len(going) < at_once + ahead:
                started.append(waiting.pop(0))
                started[-1].start()
            while started and len(going) < at_once:
                going.append(started.pop(0))
                going[-1].go()
            for run in [run for run in going if run.ended()]:
                going.remove(run)
                yield run
            time.sleep(LOOK_SECONDS)
    finally:
        for run in (*started, *going):
            run.kill()


def main() -> None:
    watcher, file, *sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    from megatron_wlb.adapter.script import install

    install()
    importlib.import_module(f"benchmarks.gpu.{watcher}").watch(Path(file))
    while not os.path.exists(os.environ["GO"]):
        time.sleep(LOOK_SECONDS)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
