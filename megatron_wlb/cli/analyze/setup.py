"""The subject of an analysis: a run with --wlb, its data, and the other ways to train it."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from megatron_wlb import layers
from megatron_wlb.cli.data import data_of
from megatron_wlb.cli.job import Run
from megatron_wlb.describe import alternatives
from megatron_wlb.describe.alternatives import Alternative
from megatron_wlb.describe.masks import masks_documents
from megatron_wlb.describe.price import alone
from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.packing import DEFAULT_POLICY
from megatron_wlb.plan.alone import activation_bytes
from megatron_wlb.plan.packer import PackedStep, Packer
from megatron_wlb.plan.samples import Samples
from megatron_wlb.plan.step import shard_step
from megatron_wlb.settings import flag_with_value
from megatron_wlb.simulate.passes import untimed
from megatron_wlb.simulate.step import SimulatedStep, simulate_step

WARM_UP = 30
"""Steps that are packed and not counted, while queues of a scheme that delays fill."""
SAMPLES, LEAST_STEPS, MOST_STEPS = 1 << 15, 64, 256
"""Windows that are cut from the data, and bounds on the steps that hold them, after which they repeat."""
MOST = 1 << 14
"""Most windows, or micro-batches, of a step that are simulated."""


class Schemes[T](NamedTuple):
    """One of each for the three ways to train the same data that a report has side by side."""

    plain: T
    """Megatron, tokens attending to all of their window."""
    thd: T
    """Megatron, attention inside documents, as in packed sequences (THD)."""
    ours: T
    """--wlb."""


class Scheme(NamedTuple):
    """A way to train the data of a run."""

    job: Job
    samples: Samples
    crosses: bool = False
    """Tokens attend across documents: every window is simulated as one document."""
    micro_batch_size: int = 1
    """Windows per micro-batch."""
    padded: bool = False
    """Windows that are not full are padded, as rows of --sft are."""

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a micro-batch."""
        return self.micro_batch_size * self.job.context_length if self.job.packing.fixed_length else self.job.max_tokens

    @property
    def num_micro_batches(self) -> int:
        return self.job.num_micro_batches // self.micro_batch_size

    @property
    def same_steps(self) -> bool:
        """Whether every step trains the documents of Megatron's."""
        return self.job.packing.same_steps

    def steps(self, count: int) -> Iterator[PackedStep]:
        """Yield `count` steps as they would be trained, after a warm-up if documents wait from step to step."""
        packer = Packer(self.samples, self.job)
        for _ in range(0 if self.same_steps else WARM_UP):
            packer.next()
        for _ in range(count):
            yield packer.next()

    def simulate(self, batch: PackedBatch) -> SimulatedStep:
        """Simulate a step."""
        job, lengths = self.job, batch.lengths
        if self.padded:  # the last document of a row takes the padding
            lengths = [np.append(each[:-1], job.context_length - each[:-1].sum()) for each in lengths]
        if self.crosses:
            lengths = [np.array([each.sum()]) for each in lengths]
        return simulate_step(job, shard_step(job, lengths, batch.ranks, size=self.micro_batch_size))

    def activation_bytes(self) -> float:
        """Return the peak of the fullest stage."""
        return activation_bytes(self.job, self.micro_batch_size)


class Setup:
    """A run as --wlb would train it, and its data. Raises ValueError if the data are no dataset."""

    def __init__(self, run: Run) -> None:
        self.data = data = data_of(run.arguments, run.notes, run.run_settings)
        self.run = run = run.on_device()
        self.notes = run.notes
        job = run.job()
        if why := untimed(job):
            raise ValueError(why)
        sizes = {"global-batch-size": job.global_batch_size, "wlb-micro-batches": job.num_micro_batches}
        if over := next((name for name, size in sizes.items() if size > MOST), None):
            raise ValueError(
                f"--{over} {sizes[over]} is over {MOST}, too many to simulate; divide both it and --num-gpus by the "
                "same number, so that every data-parallel rank keeps its windows"
            )
        count = job.global_batch_size * min(MOST_STEPS, max(LEAST_STEPS, SAMPLES // job.global_batch_size))
        self.samples = data.samples(run.arguments.seed, job.context_length, count)
        self.job, self.tried = alternatives.best(run, job.packing, self.samples)
        a, stated = run.arguments, run.launched.stated
        model, half = job.model, job.crossover_tokens
        self.notes += layers.assumed(model)
        if model.attention_layers < model.num_layers and job.context_length < half:
            share = job.context_length / (job.context_length + half)
            self.notes.append(
                f"Only {model.attention_layers} of {model.num_layers} layers have attention, {share:.0%} of the time "
                f"of a document that fills the window: this model needs little balance below windows of {half:,} "
                "tokens, where it is half."
            )
        if job.parallel.cp > 1 and (why := layers.attention_of(model).no_ring(model)):
            self.notes.append(f"Megatron is taken to gather K and V (--cp-comm-type all_gather): {why}.")
        self.masks_documents = masks_documents(stated)
        if a.fp8_dot_product_attention and job.profile.fp8 is None:
            self.notes.append(f"Profile {job.profile.name} has no attention in FP8; Megatron's is timed in bf16.")
        if not data.has_validation and stated.get("eval_iters") != 0:
            run.screened.remarks.append("The data have no validation split; with --wlb the run needs --eval-iters 0.")
        if stated.get("dataloader_inter_document_masking") and self.job.parallel.cp > 1:
            run.screened.remarks.append(
                "--dataloader-inter-document-masking with context parallelism: upstream divides the window, where "
                "TransformerEngine expects each document to be divided. So tokens attend to other documents, and not "
                "to all of their own. With --wlb they attend to their own."
            )

    def others(self) -> Iterator[Alternative]:
        """Yield the other ways to train the run with --wlb on its GPUs."""
        return alternatives.others(self.run, self.job, self.samples, may_wait=not self.data.has_rows)

    @property
    def of_run(self) -> Scheme:
        """The run as it is, without --wlb."""
        return self.without_wlb(crosses=not self.masks_documents)

    def with_wlb(self, job: Job) -> Scheme:
        return Scheme(job, self.samples)

    def without_wlb(self, job: Job | None = None, *, crosses: bool = False) -> Scheme:
        """Return how Megatron alone trains a job (None: this one), attention crossing documents or inside them.

        Inside, each document is divided over context-parallel ranks. `--overlap-p2p-communication-warmup-flush` is
        assumed to overlap all transfers between stages.
        """
        a = self.run.arguments
        job = alone(job or self.job, a, cp_sharding="per-sequence" if crosses else "per-document")
        overlap = bool(self.run.launched.stated.get("overlap_p2p_comm_warmup_flush"))
        job = replace(job, overlap_transfers=overlap)
        return Scheme(job, self.samples, crosses, a.micro_batch_size, self.data.has_rows)

    def flags(self) -> str:
        """Return the flags to add to a command: --wlb, the flags that it needs, and its flags that were given."""
        run, flags = self.run, ["--wlb"]
        if run.launched.stated.get("attention_dropout") and not run.launched.is_log:  # which has defaults, too
            flags.append("--attention-dropout 0")
        if str(run.packing) != DEFAULT_POLICY:
            flags.append(flag_with_value("packing", run.packing))
        for each in (run.sharding, run.settings, run.run_settings):
            values = {f: getattr(each, f.name) for f in fields(each)}  # type: ignore[arg-type]
            if not run.trains_mock_data:  # training refuses their lengths without
                values = {f: value for f, value in values.items() if f.name != "mock_lengths"}
            flags += [flag_with_value(f.name, value) for f, value in values.items() if value != f.default]
        return " ".join(flags)

    def pins(self) -> str:
        """Return the flags that pin the choices of `auto`."""
        chooses = alternatives.chooses(self.run, self.job.packing)
        chosen = {"micro_batches": self.job.num_micro_batches} if chooses else {}
        if self.run.settings.max_tokens == "auto" or (chosen and self.run.settings.max_tokens is None):
            chosen["max_tokens"] = self.job.max_tokens
        return " ".join(flag_with_value(name, value) for name, value in chosen.items())
