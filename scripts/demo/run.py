"""The demo: predicts a small run, trains it Megatron's way and with `--wlb` by turns, kills and resumes it.

Megatron's way is its windows and schedule with the attention of `--wlb`, inside documents. (Its own attention over
packed documents needs a GPU.) Both train the same tokens in every step, in other micro-batches, to the same loss. Two
groups of processes, forks of one, take turns in every step, and which begins changes from step to step; so what else
the machine does hits both. The prediction is by a profile of this machine, measured first.

Documents are pieces of Python's standard library, byte by byte, of two lengths (`lengths`); a shorter run has documents
that are all alike, where nothing can be gained. Two or more GPUs are used, which nobody has tried; one has nobody to
wait for. Writes demo/report.html.
"""

import functools
import json
import logging
import math
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
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import training_cpu
from benchmarks.training_cpu import TRAINING, Turns, write_dataset
from scripts.demo import report
from tests import worlds

type Step = dict[str, Any]


class Seconds(NamedTuple):
    """CPU time of the parts of the demo, as measured; two free cores take at most as long."""

    profile: float
    prediction: float
    training: float
    resume: float


FOLDER = Path("demo")
STEPS, SAVED, WARM = 24, 22, 2
"""Steps that are shown, the one that leaves a checkpoint, and those at the start that warm up."""
ALIKE_STEPS = 6
WINDOW = 4608
SHAPE = "--hidden-size 64 --num-attention-heads 8 --kv-channels 64 --ffn-hidden-size 128 --swiglu"
WAYS = {
    "megatron": "--wlb --wlb-packing megatron --wlb-cp-sharding per-sequence",
    "wlb": "--wlb",
}
SILENCE_SECONDS = 15.0
SECONDS = Seconds(profile=9, prediction=21, training=83, resume=6)
BUSY = 1.5
"""Times the duration on free cores from which the demo warns of the load."""


def lengths(window: int, tokens: int) -> np.ndarray:
    """Lengths of documents with so many tokens in all: a fifth of them in documents of 0.45 to 0.7 windows.

    Balance brings most where few tokens are in long documents: two of a step are then rarely alike.
    """
    rng = np.random.default_rng(0)
    long = rng.integers(int(0.45 * window), int(0.7 * window), max(1, int(0.2 * tokens / (0.575 * window))))
    short = rng.integers(window // 128, window * 3 // 128, tokens * 4 // 5 * 64 // window)
    return rng.permutation(np.concatenate((long, short)))


def make_data(folder: Path, drawn: np.ndarray) -> str:
    """Write documents of these lengths; returns the prefix."""
    text, files = b"", iter(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")))
    while len(text) < drawn.sum():
        text += next(files).read_bytes()
    folder.mkdir(exist_ok=True, parents=True)
    return write_dataset(folder, drawn, text)


def train(name: str, folder: Path, argv: list[str], turns: Turns | None) -> None:
    """In every process: train, by turns, and keep of every step's passes: kind, begin, end, and CPU time."""
    rank, gpu = torch.distributed.get_rank(), torch.cuda.is_available()
    if not gpu:
        training_cpu.pin()
    output = os.open(folder / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
        with open(folder / f"{name}-{rank}.jsonl", "a") as file:
            print(json.dumps({"begin": begin, "end": now(), "passes": passes}), file=file)
        step += 1
        return result

    schedules.forward_step = timed("forward", schedules.forward_step)
    schedules.backward_step = timed("backward", schedules.backward_step)
    training.train_step = in_turn
    training_cpu.pretrain(argv)


def arguments(name: str, folder: Path, data: str, ranks: int, *more: str) -> list[str]:
    """The command line of a way; both differ in their flags of `--wlb` only."""
    from megatron_wlb.adapter import cpu

    if torch.cuda.is_available():
        # Otherwise atomics in backward add in another order every time, and no two runs are equal to the bit.
        device = ["--bf16", "--deterministic-mode", "--transformer-impl", "local", *cpu.FLAGS[-4:]]
    else:
        device = ["--distributed-backend", "gloo", *cpu.FLAGS]
    sizes = f"--seq-length {WINDOW} --max-position-embeddings {WINDOW} --global-batch-size {ranks}"
    # More steps than are shown: the run is killed before its end.
    log = f"--train-iters {STEPS + 2} --log-interval 1 --wlb-log {folder}/{name}.jsonl"
    words = [*SHAPE.split(), *TRAINING, *sizes.split(), *device, *WAYS[name].split(), *log.split()]
    return [*words, "--wlb-profile", f"{FOLDER}/profile.json", "--data-path", data, *more]


def read(name: str, folder: Path = FOLDER) -> list[Step]:
    """The steps that a way has logged so far."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def expected() -> tuple[float, str]:
    """How many times as long as two free cores this machine may take now, and what the demo says first."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    times = max(1.0, (load + 2) / cores)
    said = f"The demo takes about {sum(SECONDS) / 60:.0f} minutes on two free cores"
    if times > BUSY:
        said += (
            f", and here up to {sum(SECONDS) / 60 * times:.0f}: {load:.0f} processes run on {cores} cores. Their "
            "noise may hide all differences; better wait until this machine has less to do"
        )
    return times, f"{said}."


@contextmanager
def alive(what: str, seconds: float) -> Iterator[None]:
    """Say from time to time that something still goes on, which may take so many seconds."""
    ended, began = threading.Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(SILENCE_SECONDS):
            print(f"   {time.monotonic() - began:.0f} s of up to {seconds:.0f} s", flush=True)

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
    for name in ("checkpoint", "alike"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for file in FOLDER.glob("*.*"):
        file.unlink()
    times, said = expected()
    print(said, flush=True)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = gpus or 2
    on = f"{gpus} GPUs" if gpus else "2 CPU cores"
    data = make_data(FOLDER, lengths(WINDOW, 400_000))
    alike = make_data(FOLDER / "alike", np.full(60 * ranks, WINDOW // 6))
    with alive("Profile of this machine", SECONDS.profile * times):
        profile("cuda" if gpus else "cpu")
    with alive(f"What --wlb would bring to this run on {on}", SECONDS.prediction * times):
        predicted, of_alike = predict(FOLDER, data, ranks), predict(FOLDER / "alike", alike, ranks)
        training_cpu.warm()  # meanwhile
        prediction, alike_prediction = predicted(), of_alike()
    print(f"predicted: {prediction:.2f} times as many tokens per second as with Megatron's windows", flush=True)
    print(f"== {STEPS} steps of {ranks * WINDOW} tokens, Megatron's windows and --wlb by turns, on {on}", flush=True)
    compare(FOLDER, data, ranks, STEPS, "--save", f"{FOLDER}/checkpoint", "--save-interval", str(SAVED))
    killed = f"--wlb was killed in step {len(read('wlb')) + 1}; resumed from the checkpoint of step {SAVED}"
    with alive(killed, SECONDS.resume * times):
        resumed = resume(data, ranks)
    print(resumed)
    print(f"== {ALIKE_STEPS} steps of documents that are all alike: predicted {alike_prediction:.2f}", flush=True)
    compare(FOLDER / "alike", alike, ranks, ALIKE_STEPS)
    measured = report.ratio(*(read(name, FOLDER / "alike")[WARM:ALIKE_STEPS] for name in WAYS))
    nothing = report.nothing(alike_prediction, *measured)
    print(nothing)
    plain, ours = (read(name)[:STEPS] for name in WAYS)
    words = {"prediction": prediction, "resumed": resumed, "nothing": nothing}
    print(report.write(FOLDER, plain, ours, warm=WARM, on=on, **words))
    print(f"{FOLDER}/report.html written; {time.monotonic() - began:.0f} seconds beside the installation")


def profile(device: str) -> None:
    """Measure the times of the model's kernels and matrices on this machine."""
    words = f"profile --device {device} --quick --output {FOLDER}/profile.json {SHAPE} --num-layers 2"
    done = subprocess.run([sys.executable, "-m", "megatron_wlb", *words.split()], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"demo: profile failed:\n{done.stderr}")


def predict(folder: Path, data: str, ranks: int) -> Callable[[], float]:
    """Begin to analyse a run; tokens per second over Megatron with intra-document attention, when they are there."""
    command = ["torchrun", "--nproc-per-node", str(ranks), "pretrain_gpt.py", *arguments("wlb", folder, data, ranks)]
    outputs = ["--json", f"{folder}/analyze.json", "--html", f"{folder}/analyze.html"]
    words = [sys.executable, "-m", "megatron_wlb", "analyze", *outputs, "--", *command]
    analysis = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def value() -> float:
        if analysis.wait():
            sys.exit("demo: analyze failed")
        return float(json.loads((folder / "analyze.json").read_text())["schemes"]["ours"]["speedup"])

    return value


def compare(folder: Path, data: str, ranks: int, steps: int, *save: str) -> None:
    """Train both ways by turns and print every step; then kill all processes, in the middle of a step of --wlb."""
    print(f"{'step':>4}{'windows':>10}{'--wlb':>8}{'loss':>8}    loss{'waiting':>10}  waiting{'so far':>14}{'left':>8}")
    turns, began = Turns(ranks, len(WAYS)), time.monotonic()
    with ExitStack() as stack:
        readers: list[Any] = []
        for name in WAYS:
            argv = arguments(name, folder, data, ranks, *(save if name == "wlb" else ()))
            readers += stack.enter_context(started(name, folder, argv, ranks, turns))
        done, said = 0, time.monotonic()
        while done < steps:
            if time.monotonic() - said > SILENCE_SECONDS:
                said = time.monotonic()
                print(f"{done + 1:4} is running", flush=True)
            both = [read(name, folder) for name in WAYS]
            if min(map(len, both)) > done:
                began = began if done else time.monotonic()
                done += 1
                left = (time.monotonic() - began) / max(1, done - 1) * (steps - done)
                print(row(*(of[:done] for of in both), left), flush=True)
                said = time.monotonic()
            elif failed := multiprocessing.connection.wait(readers, 0.1):
                worlds.collect(failed, time.monotonic())
                raise RuntimeError(f"training ended early; its output is in {folder}/*.txt")


def row(plain: list[Step], ours: list[Step], left: float) -> str:
    """A line of the table: the last step of both, and the ratio of all but those that warm up."""
    a, b = plain[-1], ours[-1]
    (seconds, idle), (of_ours, less) = ((s["step_ms"] / 1e3, 1 - s["measured"]["busy"]) for s in (a, b))
    value, error = report.ratio(plain[WARM:], ours[WARM:]) if len(plain) > WARM else (math.nan, math.nan)
    so_far = "" if math.isnan(value) else f"{value:.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")
    same = "=" if math.isclose(a["loss"], b["loss"], rel_tol=1e-5) else "≠"
    return (
        f"{a['step']:4}{seconds:8.2f} s{of_ours:6.2f} s{a['loss']:8.3f}  {same} {b['loss']:.3f}"
        f"{idle:10.0%} -> {less:5.0%}{so_far:>14}{left:6.0f} s"
    )


def started(name: str, folder: Path, argv: list[str], ranks: int, turns: Turns | None) -> Any:
    """The processes of a way."""
    return worlds.world(
        train, ranks, name, folder, argv, turns, backend="nccl" if torch.cuda.is_available() else "gloo"
    )


def resume(data: str, ranks: int) -> str:
    """Resume the killed run; whether its steps are equal to those before it was killed, in a sentence."""
    before = {step["step"]: step for step in read("wlb")}
    count = before[1]["job"]["num_micro_batches"]  # auto would choose anew, by the samples from here on
    load = ["--load", f"{FOLDER}/checkpoint", "--wlb-micro-batches", str(count)]
    argv = arguments("wlb", FOLDER, data, ranks, *load)
    with started("wlb", FOLDER, argv, ranks, None) as readers:
        worlds.collect(readers, time.monotonic() + worlds.HANGS_SECONDS)
    after = read("wlb")[len(before) :]
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
