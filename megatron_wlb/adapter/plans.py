"""The plans of a run: planners of splits, their counts, and the state of a run with delay beside a checkpoint."""

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.training import print_rank_0

import megatron_wlb
import megatron_wlb._native as _native
from megatron_wlb.adapter import jobs
from megatron_wlb.adapter.clock import ranged
from megatron_wlb.adapter.data import SampleReader
from megatron_wlb.adapter.sources.source import SplitData
from megatron_wlb.job import Job, differences
from megatron_wlb.packing import state
from megatron_wlb.plan.packer import PackedStep, Packer
from megatron_wlb.plan.step import Planner, StepPlan, digest_of, packing_gain


def state_path(folder: str, iteration: int) -> Path:
    """Return `FOLDER/iter_0000010.wlb.json`, next to upstream's checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}.wlb.json"


class Plans:
    """Plans by split and step; every rank makes the same plans."""

    def __init__(
        self, args: Namespace, job: Job, splits: dict[str, SplitData], readers: dict[str, SampleReader]
    ) -> None:
        self._args, self._splits, self._readers = args, splits, readers
        self._jobs = {split: [(0, jobs.evaluation_job(job, args))] for split in splits if split != "train"}
        """By split, from which step on which job."""
        if "train" in splits:
            self._jobs["train"] = jobs.jobs_by_step(args, job, args.iteration)
        self._planners: dict[str, Planner] = {}
        self._pending: dict[str, RankCheck] = {}
        """The next step of a split."""
        self._first_state: Any = None
        self.first_step: int = args.iteration
        """The first training step of this process."""
        self.last_step: int | None = None
        """The training step that is running, or ran last."""
        self._same = _code() | {f"{split} data": data.identity for split, data in splits.items()}
        self._same |= {"--wlb-digest": int(args.wlb_digest)}
        self._same |= {f"{split} loss mask": 2 * self._reads(split) + self._weighs(split) for split in splits}
        self._same |= {f"{split} micro-batch size": readers[split].samples_per_micro_batch or 0 for split in splits}
        """Digests of values that must be the same on all ranks in every step, by their names in words."""

    def planner(self, split: str, first_step: int) -> Planner:
        """Return the planner of a split. Raises ValueError if the state of a run with delay does not fit."""
        if split not in self._planners:
            data = self._splits[split]
            (_, job), *later = self._jobs[split]
            packer = Packer(data.samples, job, first_sample=data.first_sample, step=first_step)
            if split == "train" and not job.packing.same_steps:
                self._resume(packer, first_step)
            elif split == "train" and first_step:
                self._leave(first_step)
            if self._args.wlb_sft_skip and not later:
                packer.check()
            # Others wait for this rank in collectives: be heard before those time out.
            patience = 30 * self._args.distributed_timeout_minutes
            self._planners[split] = Planner(
                packer,
                job,
                mpu.get_data_parallel_rank(),
                first_step=first_step,
                patience_seconds=patience,
                count=self._count(split),
                later=later,
            )
        return self._planners[split]

    def _count(self, split: str) -> Callable[[PackedStep], np.ndarray | None]:
        """Return the function that counts a step's trained targets, by slot, int64 [slots, 1 + depths].

        A slot is a sample, or a micro-batch where documents run in other steps. Where tokens mark trained targets, each
        rank counts some slots, and leaves 0 for others.
        """
        reader, read = self._readers[split], self._reads(split)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

        def count(packed: PackedStep) -> np.ndarray | None:
            if not self._weighs(split):
                return None
            slots = _slots(packed, reader)
            counts = np.zeros((len(slots), 1 + reader.depths), np.int64)
            for i in range(rank, len(slots), ranks) if read else range(len(slots)):
                counts[i] = reader.targets(slots[i], read=read).sum(axis=0)
            return counts

        return count

    def _reads(self, split: str) -> bool:
        """Whether tokens mark trained targets."""
        return any(each.masks for each in self._readers[split].datasets)

    def _weighs(self, split: str) -> bool:
        """Whether targets weigh differently, or a digest has their weights."""
        reader, mean = self._readers[split], not self._args.wlb_per_token_loss
        if split != "train":
            return reader.mean_of_means
        return (mean and self._reads(split)) or reader.depths > 0 or reader.digest

    def job(self, split: str, step: int) -> Job:
        """Return the job of a step; the first one's for steps before this process."""
        by_step = self._jobs[split]
        return next((job for first, job in reversed(by_step) if first <= step), by_step[0][1])

    @ranged("wlb plan")
    def begin(self, split: str, step: int, device: torch.device) -> tuple[StepPlan, np.ndarray | None]:
        """Return the plan of a step about to run, and all ranks' counts; forgets plans before the last one.

        Raises RuntimeError on every rank if any two planned the step differently, with the differences.
        """
        planner = self._planners[split]
        planner.release(step - 1)  # upstream may save in the middle of a step
        plan = planner.get(step)
        if split == "train":
            self.last_step = step
        pending = self._pending.pop(split, None)
        reads = self._reads(split)
        if pending is None or pending.step != step:  # the first, or one that is replayed
            same, counted = self._same | plan.digests, plan.counted if reads else None
            RankCheck(split, step, same, plan.own_digest, None, device).check()  # that all ranks count
            pending = RankCheck(split, step, same, plan.own_digest, counted, device)
        counts = pending.check()
        try:
            following = planner.get(step + 1)
            sent = self._same | following.digests, following.own_digest, following.counted if reads else None
        except RuntimeError:  # raised again when that step begins
            sent = dict.fromkeys(self._same | plan.digests, 0), 0, plan.counted if reads else None
        self._pending[split] = RankCheck(split, step + 1, *sent, device)
        return plan, counts if reads else plan.counted

    def trained(self, iteration: int) -> StepPlan:
        """Return the plan of the step that training counts as `iteration`, from 1 on."""
        return self._planners["train"].get(iteration - 1)

    def gain(self, plan: StepPlan) -> float | None:
        """Return the `packing_gain` of a training step."""
        job, samples, first = self.job("train", plan.step), self._splits["train"].samples, plan.packed.first
        stop = first + job.global_batch_size
        own = samples.documents(first, stop if samples.order is not None else min(stop, len(samples)))
        return packing_gain(plan.batch, own, job)

    @property
    def wait_seconds(self) -> float:
        return self._planners["train"].wait_seconds

    def save(self, iteration: int) -> None:
        """With delay, save waiting documents of `iteration` next to the checkpoint. Raises OSError if the disk fails.

        It follows `iteration`, not the last step that ran: a step that failed validation is saved as still to come.
        """
        job = self.job("train", iteration - 1)
        if not job.packing.same_steps:
            packer = self.trained(iteration).packed.state if iteration > self.first_step else self._first_state
            consumed = self._args.consumed_train_samples
            state.save(state_path(self._args.save, iteration), packer, job, consumed, self._documents)
            self._forget(iteration)

    @functools.cached_property
    def _documents(self) -> int:
        """Digest of the documents that a state names by number."""
        train = self._splits["train"]
        datasets: Any = zip(train.samples.datasets, train.datasets, strict=True)  # windows: no rows of --sft wait
        return digest_of(*((digest_of(each.document_index, each.lengths), tokens.size) for each, tokens in datasets))

    def _forget(self, iteration: int) -> None:
        """Remove the states of checkpoints that are gone; states of local ones lie elsewhere."""
        args, save = self._args, Path(self._args.save)
        if getattr(args, "non_persistent_ckpt_type", None) == "local":
            return
        apart = getattr(args, "non_persistent_global_ckpt_dir", None) or save / "non_persistent"
        for path in save.glob("iter_*.wlb.json"):
            name = path.name.removesuffix(".wlb.json")
            if path != state_path(args.save, iteration) and not any((Path(f) / name).is_dir() for f in (save, apart)):
                path.unlink(missing_ok=True)

    def _folder(self, step: int) -> str:
        """Return the folder of a checkpoint's state: --load, or --save for a non-persistent one."""
        here: str = self._args.load
        lies_apart = getattr(self._args, "non_persistent_ckpt_type", None) and not (
            here and state_path(here, step).exists()
        )
        return self._args.save if lies_apart else here

    def _leave(self, first_step: int) -> None:
        """Raise ValueError if documents wait at the checkpoint and this run has no delay, unless told to go on."""
        folder = self._folder(first_step)
        if folder and state_path(folder, first_step).exists() and not self._args.wlb_no_load:
            raise ValueError(
                f"documents wait at the checkpoint {first_step} of {folder}, and none may wait here; give the delay "
                "that it was saved with, or leave them out by --no-load-wlb"
            )

    def _resume(self, packer: Packer, first_step: int) -> None:
        """Bring a new packer with delay to `first_step`, and print the changes."""
        try:
            if first_step:
                folder, consumed = self._folder(first_step), self._args.consumed_train_samples
                before = _load(packer, folder, first_step, consumed, self._documents)
                changes = ", ".join(differences(before, self.job("train", first_step).to_json()))
                print_rank_0(
                    f"> wlb: resumed at iteration {first_step} with {packer.num_waiting} documents waiting; "
                    f"{f'changed: {changes}' if changes else 'no changes'}"
                )
        except ValueError as error:
            first = self._splits["train"].first_sample
            lost = (
                f"documents of the samples before {first} that waited then are not trained, and later ones maybe twice"
            )
            if not self._args.wlb_no_load:
                raise ValueError(f"{error}; or go on without it by --no-load-wlb: {lost}") from error
            print_rank_0(f"> wlb: WARNING: {error}; --no-load-wlb: {lost}")
        self._first_state = packer.state()


def _slots(packed: PackedStep, reader: SampleReader) -> Sequence[np.ndarray]:
    """Return the DOCUMENT rows of every sample of a step; of every micro-batch if they run in other steps."""
    if reader.samples_per_micro_batch is None:
        return [packed.batch.micro_batch(i) for i in range(len(packed.batch))]
    sample = packed.drawn["index"] // reader.context_length - packed.first
    last = int(sample.max(initial=-1))
    bounds = np.searchsorted(sample, np.arange(last + 2))
    return np.split(packed.drawn, bounds[1:-1])


def _load(packer: Packer, folder: str, step: int, consumed_samples: int, documents: int) -> Any:
    path = state_path(folder, step)
    saved, job, consumed, named = state.load(path)
    if saved["step"] != step:
        raise ValueError(f"packer state {path} is of step {saved['step']}, not of iteration {step}; copy that one's")
    if consumed != consumed_samples:
        raise ValueError(
            f"packer state {path} is of {consumed} consumed samples, and the checkpoint of {consumed_samples}: it is "
            "another job's; copy that one's, and give every job its own --save"
        )
    if named != documents:
        raise ValueError(
            f"the documents that wait in packer state {path} are of other data, another order or other epochs; give "
            "the data, --split, --seed and number of samples that it was saved with"
        )
    packer.load_state(saved)
    return job


def _code() -> dict[str, int]:
    folder = Path(megatron_wlb.__file__).parent
    files = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return {
        "version": digest_of(megatron_wlb.__version__),
        "Python code": digest_of(*files),
        "C++ core": digest_of(Path(_native.__file__).read_bytes()),
    }


class RankCheck:
    """Whether all ranks plan a step in the same way.

    It is sent when it is made, and `check` waits for the result. A step runs between, so that no rank waits. The check
    comes before the planned step: after calls that do not match, no rank could name the differences.
    """

    def __init__(
        self,
        split: str,
        step: int,
        same: dict[str, int],
        own_digest: int,
        counted: np.ndarray | None,
        device: torch.device,
    ) -> None:
        """`same`: digests that all ranks share; `own_digest`: a data-parallel rank's. `counted`: see
        `Plans._count`, each number by one rank or by all."""
        self._split, self.step, self._same, self._own_digest = split, step, same, own_digest
        self._own, self._shape = len(same) + mpu.get_data_parallel_rank(), None if counted is None else counted.shape
        self._size = len(same) + mpu.get_data_parallel_world_size()
        counts = np.empty(0, np.int64) if counted is None else counted.ravel()
        # Reduced by the largest: a digest and its negative, which tell if any two differ, and the counts.
        sent = torch.full((2 * self._size + len(counts),), -1 << 63, dtype=torch.int64)
        digests = sent[: 2 * self._size].view(2, -1)
        digests[0, : len(same)] = torch.tensor([*same.values()])
        digests[0, self._own] = own_digest
        digests[1, : len(same)], digests[1, self._own] = -digests[0, : len(same)], -digests[0, self._own]
        sent[2 * self._size :] = torch.from_numpy(counts)
        if device.type == "cuda":
            sent = sent.pin_memory().to(device, non_blocking=True)
        work = torch.distributed.all_reduce(sent, op=torch.distributed.ReduceOp.MAX, async_op=True)
        self._sent, self._wait = sent, work.wait
        if device.type == "cuda":
            work.wait()  # the stream waits, not the host
            self._sent = torch.empty_like(sent, device="cpu", pin_memory=True).copy_(sent, non_blocking=True)
            done = torch.cuda.current_stream().record_event()
            self._wait = lambda: done.query() or done.synchronize()

    def check(self) -> np.ndarray | None:
        """Return all ranks' counts.

        Raises RuntimeError on every rank if any two plan differently, with the differences.
        """
        self._wait()
        largest, least = self._sent[: 2 * self._size].view(2, -1)
        if torch.equal(largest, -least):
            return None if self._shape is None else self._sent[2 * self._size :].view(self._shape).numpy()
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, (self._own, self._same, self._own_digest))
        for rank, (place, parts, digest) in enumerate(ranks):
            first = next(i for i, each in enumerate(ranks) if each[0] == place)
            differ = {0: [name for name in parts if parts[name] != ranks[0][1][name]]}
            if digest != ranks[first][2]:
                differ.setdefault(first, []).append("order or shards of micro-batches")
            for other, names in differ.items():
                if names:
                    raise RuntimeError(
                        f"ranks planned {self._split} step {self.step} differently: rank {rank} differs from rank "
                        f"{other} in {', '.join(names)}; check that all nodes have the same megatron_wlb, flags and "
                        "dataset files"
                    )
        raise AssertionError("unreachable")
