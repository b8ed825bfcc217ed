"""Do several NCCL ranks share this GPU?

    python -m benchmarks.gpu.smoke [--ranks 2 4] [--library libnccl.so.2] [--output FOLDER]

NCCL takes several ranks on one device from 2.30 on (`NCCL_MULTI_RANK_GPU_ENABLE`). Runs the collectives of training:
all-reduce, all-to-all with uneven and empty parts, in two groups at once, sends and receives of neighbours one by one
and batched, reduce-scatter. Every result is checked. Where NCCL refuses or hangs, other settings are tried in turn; the
result file has the first that work. Without a GPU, Gloo stands for NCCL.
"""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import results
from benchmarks.gpu import machine
from benchmarks.results import ROOT, Row, at_least

SHARED = {
    **{"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "WARN"},
    **{"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
}
"""Environment of ranks on one GPU."""
TRIED: tuple[dict[str, str], ...] = ({}, {"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_P2P_DISABLE": "1"})
SIZES = (1 << 10, 1 << 16, 1 << 22)
"""Values of a tensor."""
WRONG, REFUSED, HANGS = "wrong values", "NCCL refuses", "hangs"
STATUS = {3: REFUSED, 4: WRONG}


def settings_of(ranks: int, library: Path | None) -> dict[str, str]:
    """Return the environment of `ranks` on one GPU; their kernels must be resident together."""
    preloaded = {"LD_PRELOAD": str(library.resolve())} if library else {}
    return SHARED | {"NCCL_MAX_CTAS": "4" if ranks <= 2 else "2"} | preloaded


def launch(ranks: int, env: dict[str, str], port: int, limit: float) -> str:
    """Run the ranks; return "" or why they failed."""
    given = os.environ | env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--rank"]
    processes = [subprocess.Popen(command, env=given | {"RANK": str(i)}, cwd=ROOT) for i in range(ranks)]
    end = time.monotonic() + limit
    while any(each.poll() is None for each in processes):
        if time.monotonic() > end or any(each.poll() for each in processes):
            statuses = [each.poll() for each in processes]
            for each in processes:
                each.kill()
                each.wait()
            return next((STATUS.get(status, f"status {status}") for status in statuses if status), HANGS)
        time.sleep(0.1)
    return next((f"status {each.returncode}" for each in processes if each.returncode), "")


def rank() -> None:
    """One rank; ends with a status of STATUS."""
    on_gpu, me, world = torch.cuda.is_available(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        version = ctypes.c_int()
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version))  # torch's own number is that of its build
        print(f"rank {me}: NCCL {version.value}", flush=True)
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
        _check(me, world, device)
    except AssertionError as error:
        print(f"rank {me}: {error}", flush=True)
        os._exit(4)
    except Exception as error:
        print(f"rank {me}: {error}", flush=True)
        os._exit(3)
    dist.destroy_process_group()


def _check(me: int, world: int, device: torch.device) -> None:
    after, before = (me + 1) % world, (me - 1) % world

    def full(size: int, value: float = float(me)) -> torch.Tensor:
        return torch.full((size,), value, device=device)

    def reduced(size: int) -> None:
        dist.all_reduce(x := full(size, me + 1.0))
        assert x.eq(world * (world + 1) / 2).all(), "all-reduce"

    def moving(rows: int, group: Any) -> Callable[[], None]:
        # Rank i sends i x rows to every rank, so rank 0 sends nothing.
        given = full(me * rows * world * 256).view(-1, 256)
        into = full(sum(range(world)) * rows * 256, -1.0).view(-1, 256)
        work = dist.all_to_all_single(into, given, [i * rows for i in range(world)], [me * rows] * world, group, True)
        wanted = torch.cat([torch.full((i * rows,), float(i)) for i in range(world)]).to(device)

        def check() -> None:
            work.wait()
            assert into.eq(wanted[:, None]).all(), "all-to-all"

        return check

    def both(size: int) -> None:
        for check in [moving(max(1, size >> 13), group) for group in (None, second) * 4]:
            check()

    def neighbours(size: int) -> None:
        given, into = full(size), full(size, -1.0)
        order = [lambda: dist.isend(given, after), lambda: dist.irecv(into, before)]
        for work in [move() for move in (order if me % 2 == 0 else order[::-1])]:
            work.wait()
        assert into.eq(before).all(), "neighbours"

    def batched(size: int) -> None:
        given, into = full(size), full(size, -1.0)
        moves = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, into, before)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        assert into.eq(before).all(), "batched"

    def scattered(size: int) -> None:
        dist.reduce_scatter_tensor(into := full(size), full(size * world, me + 1.0))
        assert into.eq(world * (world + 1) / 2).all(), "reduce-scatter"

    def held(what: str) -> None:
        if me == 0 and device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            print(f"all ranks hold {(total - free) / 2**30:.2f} GiB after {what}", flush=True)

    reduced(SIZES[0])
    held("the first group")
    second = dist.new_group(list(range(world)), use_local_synchronization=True)
    dist.all_reduce(full(1), group=second)
    held("the second group")
    for name, call in {
        "all-reduce": reduced,
        "all-to-all": lambda size: moving(max(1, size >> 10), None)(),
        "two groups, eight under way": both,
        "neighbours": neighbours,
        "batched": batched,
        "reduce-scatter": scattered,
    }.items():
        for size in SIZES[: 3 if device.type == "cuda" else 2]:
            begin = time.perf_counter()
            for _ in range(3):
                dist.barrier()
                call(size)
            if me == 0:
                print(f"{name}, {size} values: {1e3 * (time.perf_counter() - begin) / 3:.2f} ms", flush=True)
    held("all of them")


def main() -> None:
    if sys.argv[1:] == ["--rank"]:
        rank()
        return
    parser = machine.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--library", type=Path, help="NCCL's, preloaded; default: torch's")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a try; default: %(default)s")
    args = parser.parse_args()
    rows: list[Row] = []
    works: dict[str, str] = {}
    for ranks in args.ranks:
        for env in TRIED:
            why = launch(ranks, settings_of(ranks, args.library) | env, 29431 + len(rows), args.limit)
            rows.append({"ranks": ranks, "env": env, "failed": why})
            print(rows[-1], flush=True)
            if not why:
                works |= env
                break
    gpu = machine.gpu()
    goals = [at_least("numbers of ranks that share the GPU", len({r["ranks"] for r in rows if not r["failed"]}), 1)]
    settings = {"command": sys.argv[1:], "works": works, "shared": SHARED}
    if args.output:
        print(results.write("smoke", settings=settings, rows=rows, goals=goals, **machine.where(args, gpu)))
    results.conclude(goals, check=True)


if __name__ == "__main__":
    main()
