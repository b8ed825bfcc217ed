"""Real training on cores of this machine: upstream's `pretrain()`, and the CPU time of each rank's passes.

Processes are forks of one that has imported everything, with one thread on a core of their own. Methods take turns in
every step, and which begins changes from step to step; so what else the machine does hits all.
"""

import logging
import multiprocessing as mp
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.results import Row
from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.describe import make
from megatron_wlb.job import Job
from tests.adapter.datasets import write_index
from tests.reference.sharding import rank_work
from tests.worlds import HANGS_SECONDS, collect, world

SHAPE = "--hidden-size 256 --num-attention-heads 8 --kv-channels 64 --ffn-hidden-size 704 --swiglu".split()
SEED = 1234
TRAINING = f"""
--num-layers 2 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --lr 1e-3
--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 255 --split 100,0,0 --eval-iters 0 --num-workers 0
--calculate-per-token-loss --seed {SEED} --log-interval 1000000
""".split()
VOCABULARY = 255
"""Tokens are below it, as bytes of UTF-8 are, and it ends a document."""
Steps = list[Row]
"""The steps of one rank: "seconds", "other" CPU time (optimizer, planning, logging); of all ranks "tokens" and "group"
(`Parallel.group_size`); beginning and end of each pass in order, "passes"; and for each micro-batch of the rank the
CPU time of its passes, "busy", and the sizes that planning knows: "rows", "pairs", "kernel_us"."""


def write_dataset(folder: Path, lengths: np.ndarray, text: bytes | None = None) -> str:
    """Documents of a text, or of random tokens, each with an end; returns the prefix."""
    folder.mkdir(exist_ok=True)
    total = int(lengths.sum())
    if text is None:
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, total, dtype=np.int32)
    else:
        tokens = np.frombuffer(text, np.uint8, total).astype(np.int32)
    tokens[np.cumsum(lengths) - 1] = VOCABULARY
    (folder / "data.bin").write_bytes(tokens.tobytes())
    write_index(folder / "data.idx", lengths)
    return str(folder / "data")


def warm() -> None:
    """Import what every run needs, so that its processes, forks of this one, begin at once."""
    from megatron_wlb.adapter import cpu

    if "megatron" not in sys.modules and not torch.cuda.is_available():
        cpu.install()
        cpu.install_megatron()
    import megatron.core.tokenizers.text  # noqa: F401

    import megatron_wlb.adapter.training  # noqa: F401


def arguments(dataset: str, window: int, windows: int, last_step: int, flags: str) -> list[str]:
    """Command line of a run that ends after `last_step`, of `windows` context windows a step."""
    sizes = f"--seq-length {window} --max-position-embeddings {window} --global-batch-size {windows}"
    return [*SHAPE, *TRAINING, *sizes.split(), "--data-path", dataset, "--train-iters", str(last_step), *flags.split()]


class Turns:
    """Whose turn it is: all ranks of a way train a step, then all of another."""

    def __init__(self, ranks: int, ways: int) -> None:
        self._ranks, self._ways, self._finished, self._changed = ranks, ways, mp.Value("q", 0), mp.Condition()

    def wait(self, way: int, step: int) -> None:
        """Return when this way may train its step, from 0 on; its step before has ended."""
        with self._changed:
            self._finished.value += step > 0
            self._changed.notify_all()
            place = self._ways * step + (way + step) % self._ways
            self._changed.wait_for(lambda: self._finished.value >= place * self._ranks)

    def end(self) -> None:
        """Let others train when the last step has ended."""
        with self._changed:
            self._finished.value += 1
            self._changed.notify_all()


def by_turns(methods: Mapping[str, Callable[[Turns, int], Steps]], ranks: int = 2) -> dict[str, list[Steps]]:
    """Train in a world for every method, by turns; the steps of its ranks."""
    turns = Turns(ranks, len(methods))
    with ExitStack() as stack:
        readers = {
            method: stack.enter_context(world(trains, ranks, turns, way))
            for way, (method, trains) in enumerate(methods.items())
        }
        deadline = time.monotonic() + len(methods) * HANGS_SECONDS
        return {method: collect(of_method, deadline) for method, of_method in readers.items()}


def train(
    turns: Turns, way: int, argv: list[str], first: int, crossover: int | None = None, wait: float = 0.0
) -> Steps:
    """In every process: train the steps from `first` on, at least 1, and the one before to warm up.

    `crossover` is that of training here, which no profile has; None: of the profile. Passes last longer by `wait`
    seconds for each of their rows, backward by twice as much.
    """
    pin()
    if crossover is not None:
        make.crossover = lambda job: crossover  # type: ignore[assignment]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # upstream says hundreds of lines, here and in its log
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import get_args, training

    from megatron_wlb.adapter import cpu
    from megatron_wlb.plan import step

    steps: Steps = []
    costs: dict[int, Row] = {}
    orders: dict[int, list[int]] = {}
    passes: dict[str, list[tuple[float, float, float]]] = {}
    """Beginnings, ends and CPU time by direction."""
    setup, train_step, plan_packed = training.setup_model_and_optimizer, training.train_step, step.plan_packed
    last = [0.0, 0.0]

    def timed(function: Callable[..., Any], direction: str, wait: float) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, computing = time.perf_counter(), time.thread_time()
            result = function(*args, **kwargs)
            computing, number, of_direction = time.thread_time() - computing, first - 1 + len(steps), passes[direction]
            if wait:  # sleeping for no time would let others run
                time.sleep(wait * costs[number]["rows"][orders[number][len(of_direction)]])
            of_direction.append((begin, time.perf_counter(), computing))
            return result

        return call

    def setup_for_later(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        given = get_args()
        given.iteration, given.consumed_train_samples = first - 1, (first - 1) * given.global_batch_size
        return result

    def train_step_timed(*args: Any, **kwargs: Any) -> Any:
        turns.wait(way, len(steps))
        last[:] = [time.perf_counter(), time.thread_time()]
        passes.update(forward=[], backward=[])
        result = train_step(*args, **kwargs)
        now = [time.perf_counter(), time.thread_time()]
        number = first - 1 + len(steps)
        cost, order = costs[number], orders[number]
        both = [one[2] + other[2] for one, other in zip(passes["forward"], passes["backward"], strict=True)]
        # Backward goes through the virtual stages from the last one, and through micro-batches in the same order.
        seconds, computing = (end - begin for begin, end in zip(last, now, strict=True))
        step = {"seconds": seconds, "busy": np.bincount(order, weights=both).tolist()}
        step["passes"] = sorted(each[:2] for of_direction in passes.values() for each in of_direction)
        steps.append(step | {"other": computing - sum(step["busy"])} | cost)
        return result

    def plan_kept(packed: Any, job: Any, dp_rank: int) -> Any:
        plan = plan_packed(packed, job, dp_rank)
        of_all = {"tokens": plan.tokens, "group": job.parallel.group_size}
        costs[plan.step] = of_all | costs_of(plan.micro_batches, job)
        orders[plan.step] = job.schedule(len(plan.micro_batches)).table()[:, 0].tolist()
        return plan

    schedules.forward_step = timed(schedules.forward_step, "forward", wait)
    schedules.backward_step = timed(schedules.backward_step, "backward", 2 * wait)
    training.setup_model_and_optimizer, training.train_step = setup_for_later, train_step_timed
    step.plan_packed = plan_kept
    pretrain([*argv, "--distributed-backend", "gloo", *cpu.FLAGS])
    turns.end()
    return steps[1:]


def pretrain(argv: list[str]) -> None:
    """Train in this process of a world, as upstream's script does with these flags."""
    from megatron_wlb.adapter import script

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=rank)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *argv]
    script.patch_upstream()
    script.train()


def pin() -> None:
    """All threads of this process to the core of its rank."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[dist.get_rank() % len(cores)]})


def costs_of(micro_batches: Any, job: Job) -> Row:
    """Rows, attended pairs and kernel times of this rank's micro-batches, from which their times are predicted."""
    from megatron.core import mpu

    rank, kernel = mpu.get_context_parallel_rank(), sharding_kernel(job)
    return {
        "rows": [m.shards.shards[rank].tokens for m in micro_batches],
        "pairs": [int((m.documents["length"] ** 2).sum()) for m in micro_batches],
        "kernel_us": [float(rank_work(m.shards, kernel)[rank]) for m in micro_batches],
    }
