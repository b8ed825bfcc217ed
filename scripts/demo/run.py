"""The demo: predicts a 64-GPU job, then trains plain and with `--wlb` by turns, kills that run and resumes it.

Plain is Megatron's windows and schedule with the attention of `--wlb`, inside documents. (Megatron's own attention over
packed documents needs a GPU.) Both train the same tokens in every step, in other micro-batches, to the same loss. Two
groups of processes, forks of one, take turns in every step, and which begins changes from step to step; so what else
the machine does hits both.

Documents are pieces of Python's standard library, byte by byte, of two lengths (`lengths`). Two or more GPUs are used,
which nobody has tried; one has nobody to wait for. Writes demo/report.html.
"""

import functools
import json
import logging
import multiprocessing as mp
import multiprocessing.connection
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import training_cpu
from benchmarks.training_cpu import TRAINING, write_dataset
from scripts.demo import report
from tests import worlds
from tests.adapter.datasets import write_index

type Step = dict[str, Any]

FOLDER = Path("demo")
STEPS, SAVED, WARM = 32, 30, 2
"""Steps that count, the one that leaves a checkpoint, and those at the start that warm up."""
WINDOW = 6144
LONGER = 16
"""The documents of the predicted job are longer by this, as its window is."""
SHAPE = "--hidden-size 64 --num-attention-heads 8 --kv-channels 64 --ffn-hidden-size 128 --swiglu"
WAYS = {
    "plain": "--wlb --wlb-packing original --wlb-cp-sharding per-sequence",
    "--wlb": "--wlb",
}
JOB = (
    "--model llama2-7b -- torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --global-batch-size 16 --dataloader-inter-document-masking --split 100,0,0"
)
"""The job that is predicted, whose attention stays inside documents, too."""
SILENCE_SECONDS = 4.0


def lengths(window: int, tokens: int) -> np.ndarray:
    """Lengths of documents with so many tokens in all: a fifth of them in documents of 0.45 to 0.7 windows.

    Balance brings most where few tokens are in long documents: two of a step are then rarely alike, and documents that
    Megatron cuts, which spares attention, are few.
    """
    rng = np.random.default_rng(0)
    long = rng.integers(int(0.45 * window), int(0.7 * window), max(1, int(0.2 * tokens / (0.575 * window))))
    short = rng.integers(window // 128, window * 3 // 128, tokens * 4 // 5 * 64 // window)
    return rng.permutation(np.concatenate((long, short)))


def make_data(folder: Path, window: int, tokens: int) -> str:
    """Write the documents; returns the prefix."""
    text, files = b"", iter(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")))
    drawn = lengths(window, tokens)
    while len(text) < drawn.sum():
        text += next(files).read_bytes()
    folder.mkdir(exist_ok=True)
    return write_dataset(folder, drawn, text)


class Turns:
    """Whose turn it is: all ranks of a way train a step, then all of the other."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._finished, self._changed = ranks, mp.Value("q", 0), mp.Condition()

    def wait(self, way: int, step: int) -> None:
        """Return when this way may train its step; its step before has ended."""
        with self._changed:
            self._finished.value += step > 0
            self._changed.notify_all()
            place = 2 * step + (way if step % 2 else 1 - way)
            self._changed.wait_for(lambda: self._finished.value >= place * self._ranks)


def train(name: str, argv: list[str], turns: Turns | None) -> None:
    """In every process: train, by turns, and keep of every step's passes: kind, begin, end, and CPU time."""
    rank, gpu = torch.distributed.get_rank(), torch.cuda.is_available()
    if not gpu:
        training_cpu.pin()
    output = os.open(FOLDER / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    passes: list[tuple[str, float, float, float]] = []

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, computing = now(), time.thread_time()
            result = function(*args, **kwargs)
            passes.append((kind, begin, now(), time.thread_time() - computing))
            return result

        return call

    def now() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    train_step, step, way = training.train_step, 0, list(WAYS).index(name)

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        if turns is not None:
            turns.wait(way, step)
        passes.clear()
        begin = now()
        result = train_step(*args, **kwargs)
        with open(FOLDER / f"{name}-{rank}.jsonl", "a") as file:
            print(json.dumps({"begin": begin, "end": now(), "passes": passes}), file=file)
        step += 1
        return result

    schedules.forward_step = timed("forward", schedules.forward_step)
    schedules.backward_step = timed("backward", schedules.backward_step)
    training.train_step = in_turn
    training_cpu.pretrain(argv)


def arguments(name: str, data: str, ranks: int, *more: str) -> list[str]:
    """The command line of a way; both differ in their flags of `--wlb` only."""
    from megatron_wlb.adapter import cpu

    if torch.cuda.is_available():
        # Otherwise atomics in backward add in another order every time, and no two runs are equal to the bit.
        device = ["--bf16", "--deterministic-mode", "--transformer-impl", "local", *cpu.FLAGS[-4:]]
    else:
        device = ["--distributed-backend", "gloo", *cpu.FLAGS]
    sizes = f"--seq-length {WINDOW} --max-position-embeddings {WINDOW} --global-batch-size {ranks}"
    # More steps than count: the run is killed before its end.
    log = [
        "--train-iters",
        str(STEPS + 2),
        "--log-interval",
        "1",
        "--wlb-log",
        f"{FOLDER}/{name}.jsonl",
        "--data-path",
        data,
    ]
    return [*SHAPE.split(), *TRAINING, *sizes.split(), *device, *WAYS[name].split(), *log, *more]


def read(name: str) -> list[Step]:
    """The steps that a way has logged so far."""
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def alive(what: str) -> Iterator[None]:
    """Say every few seconds that something still goes on."""
    ended, began = threading.Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(SILENCE_SECONDS):
            print(f"   {what}: {time.monotonic() - began:.0f} s", flush=True)

    thread = threading.Thread(target=say, daemon=True)
    print(f"== {what}", flush=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Run the demo."""
    began = time.monotonic()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("demo: this process may run on one core only; it needs two")
    if torch.cuda.device_count() < 2:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # forks could not use a CUDA that this process began
    logging.disable(logging.WARNING)  # upstream misses packages that are no use here
    warnings.simplefilter("ignore")
    shutil.rmtree(FOLDER / "checkpoint", ignore_errors=True)
    for file in FOLDER.glob("*.*"):
        file.unlink()
    data = make_data(FOLDER, WINDOW, 400_000)
    with alive(f"What --wlb would bring to these documents, {LONGER} times as long, on 64 H100s"):
        prediction = predict()
        training_cpu.warm()  # meanwhile
        verdict = prediction()
    print(verdict, flush=True)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = gpus or 2
    on = f"{gpus} GPUs" if gpus else "2 CPU cores"
    print(f"== {STEPS} steps of {ranks * WINDOW} tokens, plain and with --wlb by turns, on {on}", flush=True)
    compare(data, ranks)
    with alive(f"--wlb was killed in step {len(read('--wlb')) + 1}; resumed from the checkpoint of step {SAVED}"):
        resumed = resume(data, ranks)
    print(resumed)
    plain, ours = (read(name)[:STEPS] for name in WAYS)
    print(report.write(FOLDER, plain, ours, warm=WARM, prediction=verdict, resumed=resumed, on=on))
    print(f"{FOLDER}/report.html written; {time.monotonic() - began:.0f} seconds beside the installation")


def predict() -> Callable[[], str]:
    """Begin to analyse a 64-GPU job whose documents are as here, but longer; the verdict, when it is there."""
    lengths_of_job = lengths(WINDOW, 4_000_000) * LONGER
    write_index(FOLDER / "longer.idx", lengths_of_job)
    words = f"{JOB} --seq-length {WINDOW * LONGER} --data-path {FOLDER}/longer"
    outputs = ["--json", f"{FOLDER}/analyze.json", "--html", f"{FOLDER}/analyze.html"]
    command = [sys.executable, "-m", "megatron_wlb", "analyze", *outputs, *words.split()]
    analysis = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def verdict() -> str:
        if analysis.wait():
            sys.exit("demo: analyze failed")
        return str(json.loads((FOLDER / "analyze.json").read_text())["headline"])

    return verdict


def compare(data: str, ranks: int) -> None:
    """Train both ways by turns and print every step; then kill all processes, in the middle of a step of --wlb."""
    # Idle: waiting and exchange, of the time of a step.
    print(f"{'step':>4}{'plain s':>9}{'--wlb s':>9}{'ratio':>7}{'loss':>8} =  loss{'idle':>8} -> idle{'left':>8}")
    turns, began = Turns(ranks), time.monotonic()
    with ExitStack() as stack:
        readers: list[Any] = []
        for name in WAYS:
            save = ["--save", f"{FOLDER}/checkpoint", "--save-interval", str(SAVED)] if name == "--wlb" else []
            argv = arguments(name, data, ranks, *save)
            readers += stack.enter_context(started(name, argv, ranks, turns))
        done, said = 0, time.monotonic()
        while done < STEPS:
            if time.monotonic() - said > SILENCE_SECONDS:
                said = time.monotonic()
                print(f"{done + 1:4} ...", flush=True)
            both = [read(name) for name in WAYS]
            if min(map(len, both)) > done:
                began = began if done else time.monotonic()
                done += 1
                left = (time.monotonic() - began) / max(1, done - 1) * (STEPS - done)
                print(row(*(steps[done - 1] for steps in both), left), flush=True)
                said = time.monotonic()
            elif failed := mp.connection.wait(readers, 0.1):
                worlds.collect(failed, time.monotonic())
                raise RuntimeError(f"training ended early; its output is in {FOLDER}/*.txt")


def row(plain: Step, ours: Step, left: float) -> str:
    """A line of the table."""
    (seconds, idle), (of_ours, less) = ((s["step_ms"] / 1e3, 1 - s["measured"]["busy"]) for s in (plain, ours))
    return (
        f"{plain['step']:4}{seconds:9.2f}{of_ours:9.2f}{report.ratio([plain], [ours])[0]:7.2f}{plain['loss']:8.3f} ="
        f" {ours['loss']:.3f}{idle:7.0%} -> {less:4.0%}{left:6.0f} s"
    )


def started(name: str, argv: list[str], ranks: int, turns: Turns | None) -> Any:
    """The processes of a way."""
    return worlds.world(train, ranks, name, argv, turns, backend="nccl" if torch.cuda.is_available() else "gloo")


def resume(data: str, ranks: int) -> str:
    """Resume the killed run; whether its steps are equal to those before it was killed, in a sentence."""
    before = {step["step"]: step for step in read("--wlb")}
    argv = arguments("--wlb", data, ranks, "--load", f"{FOLDER}/checkpoint")
    with started("--wlb", argv, ranks, None) as readers:
        worlds.collect(readers, time.monotonic() + worlds.HANGS_SECONDS)
    after = read("--wlb")[len(before) :]
    for step in after[: len(before) - SAVED]:
        for key in ("loss", "plan", "tokens", "lengths"):
            if step[key] != (was := before[step["step"]])[key]:
                sys.exit(f"demo: step {step['step']} has {key} {was[key]} before it was killed and {step[key]} resumed")
    return (
        f"Killed in step {len(before) + 1} and resumed from the checkpoint of step {SAVED}: steps {SAVED + 1} to "
        f"{len(before)} have the same documents, and the same loss to the last bit."
    )


if __name__ == "__main__":
    main()
