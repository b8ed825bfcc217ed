"""Does a model come out the same under every packing policy? The same GPT on the same text, policy by policy.

    python -m benchmarks.convergence [--quick] [--device cuda] [--seeds 3] [--jobs 2] [--output FOLDER] [--report]

One process trains all N micro-batches of a step and adds up their gradients, which is what any layout computes
(`tests/benchmarks/test_convergence.py` compares it with Megatron on 4 processes): only packing differs. Model, text,
trained tokens and learning rate over tokens are the same for all; a seed draws the weights and the order of documents.
All runs of a seed go on from one model, trained in the original order until it is past the chaos of its first steps.

A run is one file in the output folder (benchmarks/results/convergence by default, POLICY-SEED.json). A run that is
there is kept, one that was killed is done again. At the end, or with --report alone over the runs that are there, it
writes benchmarks/results/convergence.json, docs/convergence.png and the tables of docs/convergence.md. About two hours
on two cores; --quick takes two minutes and writes no report. With --device cuda a larger model on more text, in bf16.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import queue
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import convergence_corpus as text
from benchmarks.convergence_model import Corpus, Gpt, Shape, accumulate
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import Packer, make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.types import Packing
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend

ROOT = Path(__file__).parent
BASELINE = "original"
MEASUREMENTS = 10
"""Validations over a run, evenly over its tokens, the last after its last step; one more before its first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Everything that all runs of a report have in common."""

    name: str
    shape: Shape
    context_length: int
    num_micro_batches: int = 8
    start_batches: int
    """Global batches in the original order, before what is compared; over the first half the learning rate rises."""
    global_batches: int
    """Tokens of a run, in global batches of N * C; the learning rate falls to 0 along a cosine."""
    validation_tokens: int
    learning_rate: float
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    pivot_bytes: int
    held_out_share: float = 0.04
    max_tokens_over_window: float = 1.25
    """S_max."""
    crossover_over_window: float = 51_200 / 131_072
    """Lc of a 7B model on H100 over 128K: work is judged as there, not by this small model."""

    @property
    def batch_tokens(self) -> int:
        return self.num_micro_batches * self.context_length

    @property
    def start_tokens(self) -> int:
        return self.start_batches * self.batch_tokens

    @property
    def tokens(self) -> int:
        return self.global_batches * self.batch_tokens

    @property
    def crossover_tokens(self) -> int:
        return round(self.crossover_over_window * self.context_length)


def folder_of(scale: Scale) -> Path:
    """Of the logs; those of the report lie in the tree."""
    if scale.name == "quick":
        return ROOT.parent / "demo/convergence-quick"
    return ROOT / "results" / ("convergence" if scale.name == "cpu" else f"convergence-{scale.name}")


def corpus_path(scale: Scale) -> Path:
    return ROOT.parent / f"demo/data/convergence-{scale.name}.npz"


CPU = Scale(
    name="cpu",
    shape=Shape(num_layers=3, hidden_size=128, ffn_hidden_size=384, num_heads=2, vocab_size=1024),
    context_length=4096,
    start_batches=40,
    global_batches=92,
    validation_tokens=131_072,
    learning_rate=2e-3,
    pivot_bytes=1500,
)
SCALES = {
    "cpu": CPU,
    "quick": replace(
        CPU,
        name="quick",
        shape=Shape(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_heads=2, vocab_size=512),
        context_length=1024,
        start_batches=4,
        global_batches=20,
        validation_tokens=16_384,
        pivot_bytes=300,
    ),
    "cuda": replace(
        CPU,
        name="cuda",
        shape=Shape(num_layers=8, hidden_size=512, ffn_hidden_size=1536, num_heads=8, vocab_size=4096),
        context_length=8192,
        start_batches=100,
        global_batches=400,
        validation_tokens=524_288,
        learning_rate=2e-3,
        pivot_bytes=4000,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy as it is compared."""

    policy: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of `make_policy`; thresholds in shares of the window."""
    weight_gradients: bool = False
    """Multiply the gradient of a step by its tokens over N * C (`--wlb-weight-gradients`)."""


VARIANTS = {
    BASELINE: Variant(policy="original"),
    "fixed-1": Variant(policy="fixed", settings={"num_global_batches": 1}),
    "fixed-8": Variant(policy="fixed", settings={"num_global_batches": 8}),
    "wlb": Variant(policy="wlb", settings={"outlier_thresholds": (1 / 4, 1 / 2)}),
    "adaptive-constant-tokens": Variant(policy="adaptive", settings={"mode": "constant-tokens"}),
    "adaptive-low-displacement": Variant(policy="adaptive", settings={"mode": "low-displacement"}),
    "adaptive-low-displacement-weighted": Variant(
        policy="adaptive", settings={"mode": "low-displacement"}, weight_gradients=True
    ),
}


def packer_of(variant: Variant, scale: Scale, pairs: np.ndarray, seed: int) -> Packer:
    """The variant over documents of `pairs` in the order of `seed`."""
    settings = dict(variant.settings)
    if "outlier_thresholds" in settings:
        settings["outlier_thresholds"] = [round(s * scale.context_length) for s in settings["outlier_thresholds"]]
    return make_packer(
        DocumentStream([Source(pairs=pairs)], seed=seed, context_length=scale.context_length),
        num_micro_batches=scale.num_micro_batches,
        crossover_tokens=scale.crossover_tokens,
        policy=variant.policy,
        max_tokens=round(scale.max_tokens_over_window * scale.context_length),
        fingerprint="",
        **settings,
    )


class Trainer:
    """A model, its optimizer, and the clock of the learning rate: trained tokens, below 0 before what is compared."""

    def __init__(self, scale: Scale, corpus: Corpus, seed: int, device: torch.device) -> None:
        self._scale, self._corpus, self._device = scale, corpus, device
        options = AttentionOptions(backend=get_backend("auto", device))
        self.model = Gpt(scale.shape, attention=options, max_positions=scale.context_length, seed=seed).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": scale.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=scale.betas)
        self.tokens = -scale.start_tokens

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "tokens": self.tokens}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.tokens = state["tokens"]

    def step(self, packing: Packing, *, weight_gradients: bool) -> tuple[float, float]:
        """Train one step; returns the mean loss of its tokens and the norm of the gradient before it is clipped."""
        tokens = int(packing.documents["length"].sum())
        weight = tokens / self._scale.batch_tokens if weight_gradients else 1.0
        rate = learning_rate(self.tokens + tokens / 2, self._scale)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss = accumulate(self.model, self._corpus, packing, self._device, weight=weight)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._scale.clip))
        self._optimizer.step()
        self.tokens += tokens
        return loss, norm

    @torch.no_grad()
    def validate(self, corpus: Corpus, packing: Packing) -> dict[str, float]:
        """Mean loss of the packed tokens: of all, and of documents longer than a quarter of the window."""
        losses = []
        for i in range(len(packing)):
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                batch = corpus.micro_batch(packing.micro_batch(i), self._device)
                losses.append(self.model(batch).double().cpu())
        loss, lengths = torch.cat(losses).numpy(), packing.documents["length"]
        is_long = np.repeat(4 * lengths > self._scale.context_length, lengths)
        return {"all": round(float(loss.mean()), 6), "long": round(float(loss[is_long].mean()), 6)}


def learning_rate(tokens: float, scale: Scale) -> float:
    """After `tokens` trained tokens."""
    if tokens < 0:
        return scale.learning_rate * min(2 + 2 * tokens / scale.start_tokens, 1.0)
    return scale.learning_rate * 0.5 * (1 + math.cos(math.pi * min(tokens / scale.tokens, 1.0)))


def start(seed: int, scale: Scale, data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """State of the trainer that all variants go on from."""
    train = split(data, False)
    packer, trainer = packer_of(VARIANTS[BASELINE], scale, train.pairs, seed), Trainer(scale, train, seed, device)
    while trainer.tokens < 0:
        trainer.step(packer.next().packing, weight_gradients=False)
    return trainer.state()


def run(
    name: str,
    seed: int,
    scale: Scale,
    data: dict[str, Any],
    device: torch.device,
    started: dict[str, Any],
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """Train one variant from the state `started`; `tell` hears the trained tokens. Returns the log of the run."""
    variant, began = VARIANTS[name], time.time()
    train, held_out = (split(data, held) for held in (False, True))
    validation = validation_packing(held_out, scale)
    # Another order of documents than the start had.
    packer, trainer = packer_of(variant, scale, train.pairs, seed + 1000), Trainer(scale, train, seed, device)
    trainer.load(started)
    steps: dict[str, list[float]] = {key: [] for key in ("tokens", "loss", "gradient_norm", "imbalance", "long_tokens")}
    measured, validations = [], [{"tokens": 0, **trainer.validate(held_out, validation)}]
    while trainer.tokens < scale.tokens:
        packed = packer.next()
        packing = packed.packing
        loss, norm = trainer.step(packing, weight_gradients=variant.weight_gradients)
        m = metrics.measure(
            packing, packed.step, crossover_tokens=scale.crossover_tokens, context_length=scale.context_length
        )
        measured.append(m)
        for key, value in zip(steps, (m.tokens, loss, norm, m.imbalance, m.long_tokens), strict=True):
            steps[key].append(value if isinstance(value, int) else round(value, 5))
        if trainer.tokens * MEASUREMENTS // scale.tokens > (trainer.tokens - m.tokens) * MEASUREMENTS // scale.tokens:
            validations.append({"tokens": trainer.tokens, **trainer.validate(held_out, validation)})
        tell(trainer.tokens)
    delays = Counter[int]()
    for m in measured:
        delays.update(m.delays)
    summary = asdict(metrics.summarise(measured, num_waiting=packed.num_waiting))
    return {
        "variant": name,
        "seed": seed,
        **common(scale, data, device),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "seconds": round(time.time() - began, 1),
        "validation": validations,
        "packing": {key: value for key, value in summary.items() if not key.startswith("plan_ms")},
        "tokens_by_delay": {str(delay): delays[delay] for delay in sorted(delays)},
        "steps": steps,
    }


def common(scale: Scale, data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What the runs of a report must share, as it comes back from JSON."""
    settings = {"scale": asdict(scale), "corpus": data["summary"], "device": device.type}
    return json.loads(json.dumps(settings))


def split(data: dict[str, Any], held_out: bool) -> Corpus:
    """The documents for training, or those held out."""
    chosen = data["held_out"] == held_out
    return Corpus(data["tokens"][np.repeat(chosen, data["lengths"])], data["lengths"][chosen])


def validation_packing(corpus: Corpus, scale: Scale) -> Packing:
    """Held-out documents of at least `validation_tokens` in all, in file order; none is cut but at the window.

    Documents attend to themselves alone, so how they share micro-batches does not matter to the loss.
    """
    stream = DocumentStream(
        [Source(pairs=corpus.pairs)], seed=0, context_length=scale.context_length, shuffle=False, num_epochs=1
    )
    rows = stream.take(scale.validation_tokens)
    windows = np.cumsum(rows["length"]) // scale.context_length
    return Packing(documents=rows, bounds=np.concatenate(([0], np.flatnonzero(np.diff(windows)) + 1, [len(rows)])))


def run_all(
    runs: list[tuple[str, int]], scale: Scale, corpus: Path, device: torch.device, jobs: int, output: Path
) -> None:
    """Do what is missing in `output` in the order given, `jobs` at a time on one thread each, and show how it goes."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    output.mkdir(parents=True, exist_ok=True)
    wanted = common(scale, read_corpus(corpus, scale), device)
    missing = [r for r in runs if not is_finished(output, *r, wanted)]
    context = multiprocessing.get_context("spawn")
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with (
        context.Manager() as manager,
        Progress(*columns, console=Console(width=120)) as progress,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        news, bars = manager.Queue(), dict[tuple[str, int], TaskID]()
        total = progress.add_task(f"{len(runs)} runs", total=len(runs) * scale.tokens)
        progress.advance(total, (len(runs) - len(missing)) * scale.tokens)
        starts = {pool.submit(start_one, s, scale, corpus, device): s for s in sorted({seed for _, seed in missing})}
        waiting = dict[Future[dict[str, Any]], tuple[str, int]]()
        while starts or waiting:
            for begun in [f for f in starts if f.done()]:
                seed = starts.pop(begun)
                begun.result()
                of_seed = [r for r in missing if r[1] == seed]
                waiting |= {pool.submit(run_one, *r, scale, corpus, device, output, news): r for r in of_seed}
            with contextlib.suppress(queue.Empty):
                *key, tokens = news.get(timeout=1.0)
                if tuple(key) not in bars:
                    bars[tuple(key)] = progress.add_task(" ".join(map(str, key)), total=scale.tokens)
                bar = progress.tasks[progress.task_ids.index(bars[tuple(key)])]
                progress.advance(total, min(tokens, scale.tokens) - bar.completed)
                progress.update(bar.id, completed=min(tokens, scale.tokens))
            for future in [f for f in waiting if f.done()]:
                name, seed = waiting.pop(future)
                if future.exception():
                    pool.shutdown(cancel_futures=True)
                log = future.result()
                loss, seconds = log["validation"][-1]["all"], log["seconds"]
                progress.console.print(f"{name}, seed {seed}: validation loss {loss:.4f} after {seconds:.0f} s")


def start_path(corpus: Path, seed: int) -> Path:
    return corpus.with_name(f"{corpus.stem}-start-{seed}.pt")


def start_one(seed: int, scale: Scale, corpus: Path, device: torch.device) -> None:
    """`start` in a process of its own, unless its state lies beside the corpus."""
    torch.set_num_threads(1)
    data, path = read_corpus(corpus, scale), start_path(corpus, seed)
    wanted = common(scale, data, device)
    if path.exists() and torch.load(path, map_location="cpu", weights_only=True)["common"] == wanted:
        return
    temporary = path.with_suffix(".tmp")
    torch.save({"common": wanted, **start(seed, scale, data, device)}, temporary)
    temporary.rename(path)


def run_one(
    name: str, seed: int, scale: Scale, corpus: Path, device: torch.device, output: Path, news: Any
) -> dict[str, Any]:
    """`run` in a process of its own, with its log written at the end and not before."""
    torch.set_num_threads(1)
    started = torch.load(start_path(corpus, seed), map_location=device, weights_only=True)
    data = read_corpus(corpus, scale)
    log = run(name, seed, scale, data, device, started, lambda tokens: news.put((name, seed, tokens)))
    path = path_of(output, name, seed)
    temporary = path.with_suffix(".tmp")
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in log.items())  # a line for each, to be compact
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    temporary.rename(path)
    return log


def path_of(output: Path, name: str, seed: int) -> Path:
    return output / f"{name}-{seed}.json"


def is_finished(output: Path, name: str, seed: int, wanted: dict[str, Any]) -> bool:
    """Whether this run's log is there. Raises ValueError for one of other settings, rather than to write over it."""
    path = path_of(output, name, seed)
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    if different := [key for key in wanted if found[key] != wanted[key]]:
        raise ValueError(f"{path} is of another {' and '.join(different)}; give an --output of its own, or delete it")
    return True


def read_corpus(path: Path, scale: Scale) -> dict[str, Any]:
    return text.load(
        path,
        vocab_size=scale.shape.vocab_size,
        pivot_bytes=scale.pivot_bytes,
        held_out_share=scale.held_out_share,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model on little text, to see that it all runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this; the first of every policy run first")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated; default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder of the logs, then no report is written")
    parser.add_argument("--report", action="store_true", help="run nothing, report over the logs that are there")
    args = parser.parse_args()
    names = args.variants.split(",")
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; choose among {', '.join(VARIANTS)}")
    scale = SCALES["quick" if args.quick else args.device]
    folder = args.output or folder_of(scale)
    if not args.report:
        runs = [(name, seed) for seed in range(1, args.seeds + 1) for name in names]
        device = torch.device(args.device)
        run_all(runs, scale, corpus_path(scale), device, args.jobs, folder)
    from benchmarks import convergence_report as report  # needs scipy, rich and matplotlib, which runs do not

    logs = report.read(folder)
    report.show(report.compare(logs))
    if args.output is None and not args.quick:
        print(*report.write(logs), sep="\n")


if __name__ == "__main__":
    main()
