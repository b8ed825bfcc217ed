"""Does a model come out the same if documents may wait? The same GPT on the same text, policy by policy.

    python -m benchmarks.convergence [--quick] [--seeds 8] [--logs FOLDER] [--report]

One process trains all micro-batches of a step and sums their gradients, as any layout does
(`tests/benchmarks/test_convergence.py` compares it with Megatron on 4 processes): only the steps in which pieces of
documents run differ. Model, text, windows, trained tokens and learning rate over tokens are equal; a seed draws the
weights and the order of documents. All runs of a seed continue from one model, trained in the original order until it
is past the chaos of its first steps. The control `original-shuffled` changes nothing but the order of documents, so its
gain or loss is noise. Packing that lets nothing wait, as adaptive packing by default, has the gradients of `original`.

A run is one file in the folder of logs (benchmarks/results/convergence/windows by default, POLICY-SEED.json; those in
whole_documents are of the former release, whose documents were not cut at windows). A finished run is kept, one that
was killed is done again. At the end, or with --report alone, benchmarks/results/convergence.json and
docs/convergence.png are written from the logs; `python -m scripts.docs` then writes the table of docs/convergence.md. A
run takes about a quarter of an hour on a calm core; --quick takes minutes.
"""

import copy
import json
import math
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import convergence_report, metrics, results
from benchmarks.convergence_model import Corpus, Gpt, accumulate
from benchmarks.convergence_report import BASELINE, COLORS, CONTROL
from benchmarks.corpus import load
from benchmarks.fixed import FixedPacking
from benchmarks.lengths import S_MAX
from benchmarks.results import ROOT, Row
from megatron_wlb.describe.make import make_job
from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job, Packing, Parallel
from megatron_wlb.model import MODELS, ModelShape, shape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Samples, Windows, windows
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend

CPU = torch.device("cpu")
VARIANTS = tuple(COLORS)
SPARE_BATCHES = 20
"""Global batches of the data beyond those of a run: what still waits at its end."""
MEASUREMENTS = 5
"""Validations over a run, evenly over its tokens, the last after its last step; one more before its first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The settings that all runs of a report share."""

    name: str
    shape: ModelShape
    context_length: int
    global_batch_size: int = 8
    """N, in windows."""
    dp: int = 2
    pp: int = 8
    """Data-parallel ranks and pipeline stages, by which adaptive packing goes: documents wait for long there."""
    start_batches: int
    """Global batches in the original order before the comparison; over the first half the learning rate rises."""
    global_batches: int
    """Tokens of a run, in global batches of N * C; the learning rate falls to 0 along a cosine."""
    validation_tokens: int
    learning_rate: float
    pivot_bytes: int
    crossover_over_window: float = 51_200 / 131_072
    """Lc of a 7B model on H100 over 128K: work is judged as there, not by this small model."""

    @property
    def start_tokens(self) -> int:
        return self.start_batches * self.global_batch_size * self.context_length

    @property
    def tokens(self) -> int:
        return self.global_batches * self.global_batch_size * self.context_length


REPORT = Scale(
    name="windows",
    shape=shape(3, 128, 384, 2, 2, 1024, kv_channels=64),
    context_length=4096,
    start_batches=40,
    global_batches=92,
    validation_tokens=131_072,
    learning_rate=2e-3,
    pivot_bytes=2000,
)
QUICK = replace(
    REPORT,
    name="quick",
    shape=shape(2, 64, 128, 2, 2, 512, kv_channels=32),
    context_length=1024,
    start_batches=4,
    global_batches=20,
    validation_tokens=16_384,
    pivot_bytes=500,
)


PACKINGS: dict[str, Packing] = {
    BASELINE: MegatronPacking(),
    CONTROL: MegatronPacking(),
    "paper": PaperPacking(),
    "delay": AdaptivePacking(max_delay_steps=30),
    "fixed-8": FixedPacking(global_batches=8),
}
"""What is compared, by name."""


def job_of(variant: str, scale: Scale) -> Job:
    """The job that packing goes by: a 7B model in the place of the small one."""
    return make_job(
        model=MODELS["llama2-7b"],
        parallel=Parallel(dp=scale.dp, pp=scale.pp),
        context_length=scale.context_length,
        global_batch_size=scale.global_batch_size,
        max_tokens=round(S_MAX * scale.context_length),
        crossover_tokens=round(scale.crossover_over_window * scale.context_length),
        packing=PACKINGS[variant],
    )


class Ordered(NamedTuple):
    """Documents in an order, and the windows cut from them."""

    corpus: Corpus
    samples: Samples


def ordered(data: Row, scale: Scale, batches: int, *, seed: int) -> Ordered:
    """The documents for training in the order of `seed`, for so many global batches."""
    tokens, lengths = split(data, held_out=False)
    count = (batches + SPARE_BATCHES) * scale.global_batch_size
    return cut(tokens, lengths, windows(lengths, scale.context_length, seed=seed, num_samples=count))


def cut(tokens: np.ndarray, lengths: np.ndarray, of: Windows) -> Ordered:
    return Ordered(Corpus(tokens, lengths, of), Samples(datasets=[of], context_length=of.context_length))


class Trainer:
    """A model, its optimizer, and the clock of the learning rate: trained tokens, below 0 before the comparison."""

    def __init__(self, scale: Scale, corpus: Corpus, seed: int) -> None:
        self._scale, self.corpus = scale, corpus
        options = AttentionOptions(backend=get_backend("auto", CPU))
        self.model = Gpt(scale.shape, attention=options, max_positions=scale.context_length, seed=seed)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
        self.tokens = -scale.start_tokens

    def step(self, packing: PackedBatch) -> None:
        """Train one step."""
        tokens = int(packing.documents["length"].sum())
        rate = learning_rate(self.tokens + tokens / 2, self._scale)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        accumulate(self.model, self.corpus, packing)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.tokens += tokens

    @torch.no_grad()
    def validate(self, corpus: Corpus, packing: PackedBatch) -> dict[str, float]:
        """Mean loss of the packed tokens: of all, and of documents longer than a quarter of the window."""
        losses = [self.model(corpus.micro_batch(packing.micro_batch(i))).double() for i in range(len(packing))]
        loss, lengths = torch.cat(losses).numpy(), packing.documents["length"]
        is_long = np.repeat(4 * lengths > self._scale.context_length, lengths)
        return {"all": round(float(loss.mean()), 6), "long": round(float(loss[is_long].mean()), 6)}


def learning_rate(tokens: float, scale: Scale) -> float:
    """The rate after `tokens` trained tokens."""
    if tokens < 0:
        return scale.learning_rate * min(2 + 2 * tokens / scale.start_tokens, 1.0)
    return scale.learning_rate * 0.5 * (1 + math.cos(math.pi * min(tokens / scale.tokens, 1.0)))


def start(seed: int, scale: Scale, data: Row) -> Trainer:
    """The trainer that all variants continue from."""
    train = ordered(data, scale, scale.start_batches, seed=seed)
    packer, trainer = Packer(train.samples, job_of(BASELINE, scale)), Trainer(scale, train.corpus, seed)
    while trainer.tokens < 0:
        trainer.step(packer.next().batch)
    return trainer


def run(variant: str, seed: int, scale: Scale, data: Row, trainer: Trainer) -> Row:
    """Train one variant with a copy of the trainer that `start` left. Returns the log of the run."""
    job = job_of(variant, scale)
    held_out, validation = validated(data, scale)
    # Another order of documents than the start had, and the control yet another.
    train = ordered(data, scale, scale.global_batches, seed=seed + (2000 if variant == CONTROL else 1000))
    packer, trainer.corpus = Packer(train.samples, job), train.corpus
    measured, validations = [], [{"tokens": 0, **trainer.validate(held_out, validation)}]
    while trainer.tokens < scale.tokens:
        packed, before = packer.next(), trainer.tokens
        trainer.step(packed.batch)
        measured.append(metrics.measure(packed.batch, packed.step, job))
        if trainer.tokens * MEASUREMENTS // scale.tokens > before * MEASUREMENTS // scale.tokens:
            validations.append({"tokens": trainer.tokens, **trainer.validate(held_out, validation)})
    delays = sum((Counter(m.delays) for m in measured), Counter())
    return {
        "variant": variant,
        "seed": seed,
        **common(scale, data),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "validation": validations,
        "packing": metrics.summarise(measured),
        "tokens_by_delay": {str(delay): delays[delay] for delay in sorted(delays)},
        "steps": {key: [getattr(each, key) for each in measured] for key in ("tokens", "long_tokens")},
    }


def common(scale: Scale, data: Row) -> Row:
    """Entries that all logs of a report must share, as they come back from JSON."""
    return json.loads(json.dumps({"scale": asdict(scale), "corpus": data["summary"], "device": CPU.type}))


def split(data: Row, *, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and lengths of the documents for training, or of those held out."""
    chosen = data["held_out"] == held_out
    return data["tokens"][np.repeat(chosen, data["lengths"])], data["lengths"][chosen]


def validated(data: Row, scale: Scale) -> tuple[Corpus, PackedBatch]:
    """The first windows of the held-out documents, of `validation_tokens` at least, a micro-batch each."""
    tokens, lengths = split(data, held_out=True)
    count = -(-scale.validation_tokens // scale.context_length)
    of = windows(lengths, scale.context_length, seed=None)
    rows = of.documents(np.arange(count))
    bounds = np.searchsorted(rows["index"], scale.context_length * np.arange(count + 1))
    return cut(tokens, lengths, of).corpus, PackedBatch(documents=rows, bounds=bounds)


def run_all(scale: Scale, logs: Path, seeds: int) -> None:
    """Do the runs that `logs` lacks, two seeds at a time, each in a process and on a thread of its own."""
    logs.mkdir(parents=True, exist_ok=True)
    text(scale)  # made once
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(run_seed, scale, logs, seed + 1) for seed in range(seeds)]:
            future.result()


def run_seed(scale: Scale, logs: Path, seed: int) -> None:
    """Do the missing runs of a seed. Raises ValueError for a log of other settings, rather than overwrite it."""
    torch.set_num_threads(1)
    data, started = text(scale), None
    for variant in VARIANTS:
        path = logs / f"{variant}-{seed}.json"
        if path.exists():
            log, wanted = json.loads(path.read_text()), common(scale, data)
            if different := [key for key in wanted if log[key] != wanted[key]]:
                raise ValueError(f"{path} is of another {different[0]}; give --logs of its own, or delete it")
            continue
        started = started or start(seed, scale, data)
        log = run(variant, seed, scale, data, copy.deepcopy(started))
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in log.items())
        results.write_whole(path, f"{{\n{lines}\n}}\n")
        print(f"{path.stem}: validation loss {log['validation'][-1]['all']:.4f}", flush=True)


def text(scale: Scale) -> Row:
    path = ROOT / f"demo/data/convergence-{scale.name}.npz"
    return load(path, vocab_size=scale.shape.padded_vocab_size, pivot_bytes=scale.pivot_bytes)


def main() -> None:
    parser = results.parser(__doc__, "a tiny model on little text, to see that it all runs")
    parser.add_argument("--seeds", type=int, default=8, help="seeds 1 to this; default: %(default)s")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="of the runs; default: the report's")
    parser.add_argument("--report", action="store_true", help="run nothing, report over the logs that are there")
    args = parser.parse_args()
    scale = QUICK if args.quick else REPORT
    usual = ROOT / "demo/convergence-quick" if args.quick else results.FOLDER / "convergence" / scale.name
    folder = args.logs or usual
    if not args.report:
        run_all(scale, folder, args.seeds)
    convergence_report.report(args, convergence_report.read(folder))


if __name__ == "__main__":
    main()
