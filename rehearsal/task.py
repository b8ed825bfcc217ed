"""What a worker is told, and the GPUs that can be rehearsed."""

from typing import Any

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """A kind of GPU, as its runtime describes it."""

    name: str
    gib: float
    capability: tuple[int, int]
    processors: int
    shared_bytes: int
    """Of a block, if it asks for all."""
    l2_bytes: int


GPUS = {
    "a100": Gpu("A100", 80, (8, 0), 108, 163 << 10, 40 << 20),
    "h100": Gpu("H100", 80, (9, 0), 132, 227 << 10, 50 << 20),
    "h200": Gpu("H200", 141e9 / 2**30, (9, 0), 132, 227 << 10, 50 << 20),
}


class Task(msgspec.Struct, kw_only=True):
    """Ranks of a job, and how much of it to run."""

    world_size: int
    steps: int
    gpu: Gpu
    script: list[str]
    """The script that runs, behind `megatron_wlb.run` if that does; with `--wlb` and alone, it stands for our own."""
    flags: list[str]
    wlb: bool
    """Whether the job trains with `--wlb`."""
    stated: dict[str, Any] = {}
    """Arguments from a log, instead of flags."""
    vocab_size: int
    mock_data: bool
    """Train mock data, since the job's own are not here."""
    ranks: list[int] = []
    folder: str = ""
    """Where results go: RANK.json, and RANK.log for what the stand-in writes down."""
