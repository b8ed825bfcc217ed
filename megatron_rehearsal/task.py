"""The task of a worker, and the GPUs that can be rehearsed."""

from typing import Any

import msgspec

from megatron_wlb.hardware.profile import GPUS as PROFILES
from megatron_wlb.hardware.profile import load_profile


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
    name: Gpu(name.upper(), load_profile(PROFILES[name]).memory_gib, capability, processors, shared << 10, l2 << 20)
    for name, capability, processors, shared, l2 in (
        ("a100", (8, 0), 108, 163, 40),
        ("h100", (9, 0), 132, 227, 50),
        ("h200", (9, 0), 132, 227, 50),
        ("b200", (10, 0), 148, 227, 126),
        ("gb200", (10, 0), 148, 227, 126),
        ("gb300", (10, 3), 148, 227, 126),
    )
}
"""Shared memory of a block in KiB, L2 cache in MiB."""


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
    """Where results go: RANK.json, and RANK.log for the stand-in's records."""
