"""The plans of a run: planners of splits, packer state, and resuming."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import print_rank_0

import megatron_wlb
from megatron_wlb import _native
from megatron_wlb.adapter import describe
from megatron_wlb.adapter.data import SplitData, stream_of, validation_sets
from megatron_wlb.describe.settings import RunSettings
from megatron_wlb.job import Job, differences
from megatron_wlb.plan import document_log, state
from megatron_wlb.plan.packer import IDENTITY, Packer, make_packer
from megatron_wlb.plan.step import Planner, StepPlan, digest_of


def state_path(folder: str, iteration: int) -> Path:
    """Return `FOLDER/iter_0000010.wlb.json`, next to upstream's checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}.wlb.json"


class Plans:
    """Plans by split and step; every rank makes the same plans."""

    def __init__(self, args: Namespace, job: Job, run: RunSettings, splits: dict[str, SplitData]) -> None:
        self._args, self._run, self._splits = args, run, splits
        self._jobs = {"train": [(0, job)]}
        """By split, from which step on which job."""
        if args.eval_iters > 0 or args.full_validation:
            evaluated = [*validation_sets(splits), *(() if args.multiple_validation_sets else ("test",))]
            self._jobs |= {split: [(0, describe.evaluation_job(job, args))] for split in evaluated}
        self._planners: dict[str, Planner] = {}
        self._asked: dict[str, Comparison] = {}
        """The next step of a split."""
        self._first_state: Any = None
        self.first_step = 0
        """The first training step of this process."""
        self.last_step: int | None = None
        """The training step that is running, or ran last."""
        self.begins_anew = False
        """The first step trains the beginning of the data, although training is further along."""
        self._agreed = _code() | {f"{split} {words}": 0 for split in splits for words in IDENTITY.values()}
        """Digests of what must be the same on all ranks in every step, in words; 0 for splits that are not there."""

    def runs(self, split: str) -> bool:
        """Whether the run trains or evaluates a split."""
        return split in self._jobs and bool(self._splits[split].sources)

    def steps_of_pass(self, split: str) -> int:
        """Return the steps in which an evaluation goes once through a split."""
        stream, steps = stream_of(self._args, split, self._splits[split], num_epochs=1), 0
        packer = make_packer(stream, self._jobs[split][0][1])
        while not packer.finished:
            packer.next()
            steps += 1
        return steps

    def planner(self, split: str, first_step: int) -> Planner:
        """Return the planner of a split. Raises ValueError if the packer state does not fit."""
        if split not in self._planners:
            if split == "train":
                self._jobs[split] = describe.jobs_by_step(self._args, self._jobs[split][0][1], first_step)
            (_, job), *later = self._jobs[split]
            packer, *others = (
                make_packer(stream_of(self._args, split, self._splits[split]), each) for _, each in self._jobs[split]
            )
            for name, value in packer.identity.items():
                self._agreed[f"{split} {IDENTITY[name]}"] = digest_of(value)
            if split == "train":
                self._resume(packer, first_step)
            else:
                for _ in range(first_step):
                    packer.next()
            dp_rank = mpu.get_data_parallel_rank()
            # Others wait for this rank in collectives: be heard before those time out.
            patience = 30 * self._args.distributed_timeout_minutes
            self._planners[split] = Planner(
                packer,
                job,
                dp_rank,
                first_step=first_step,
                patience_seconds=patience,
                later=[(*at, other) for at, other in zip(later, others, strict=True)],
            )
        return self._planners[split]

    def job(self, split: str, step: int) -> Job:
        """Return the job of a step; the first one's for steps before this process."""
        jobs = self._jobs[split]
        return next((job for first, job in reversed(jobs) if first <= step), jobs[0][1])

    def begin(self, split: str, step: int, device: torch.device) -> StepPlan:
        """Return the plan of a step about to run; forgets those before the last one.

        Raises RuntimeError on every rank if any two planned the step differently, with what differs.
        """
        planner = self._planners[split]
        planner.release(step - 1)  # upstream may save in the middle of a step
        plan = planner.get(step)
        if split == "train":
            self.last_step = step
        asked = self._asked.pop(split, None)
        if asked is None or asked.step != step:  # the first, or one that is replayed
            asked = Comparison(split, step, self._agreed | plan.digests, plan.own_digest, device)
        asked.check()
        try:
            ahead = planner.get(step + 1)
            told = self._agreed | ahead.digests, ahead.own_digest
        except RuntimeError:  # raised again when that step begins
            told = dict.fromkeys(self._agreed | plan.digests, 0), 0
        self._asked[split] = Comparison(split, step + 1, *told, device)
        return plan

    def trained(self, iteration: int) -> StepPlan:
        """Return the plan of the step that training counts as `iteration`, from 1 on."""
        return self._planners["train"].get(iteration - 1)

    @property
    def wait_seconds(self) -> float:
        return self._planners["train"].wait_seconds

    def save(self, iteration: int) -> None:
        """Write the packer state after `iteration` next to the checkpoint. Raises OSError if the disk fails.

        It follows `iteration`, not the last step that ran: a step that failed validation is saved as still to come.
        """
        packer = self.trained(iteration).packed.state if iteration > self.first_step else self._first_state
        state.save(state_path(self._args.save, iteration), packer, self.job("train", iteration - 1))

    def _folder(self, step: int) -> str:
        """Return the folder of a checkpoint's state: --load, or --save for a non-persistent one."""
        here: str = self._args.load
        lies_apart = getattr(self._args, "non_persistent_ckpt_type", None) and not (
            here and state_path(here, step).exists()
        )
        return self._args.save if lies_apart else here

    def _resume(self, packer: Packer, first_step: int) -> None:
        """Bring a new packer to `first_step`, and print what changed."""
        self.first_step = first_step
        if self._run.document_log and torch.distributed.get_rank() == 0:
            document_log.mend(self._run.document_log)
        try:
            if first_step:
                before = _load(packer, self._folder(first_step), first_step)
                changes = ", ".join(differences(before, self.job("train", first_step).to_json()))
                print_rank_0(
                    f"> wlb: resumed at iteration {first_step} with {sum(map(len, packer.waiting().values()))} "
                    f"documents waiting; {f'changed: {changes}' if changes else 'nothing changed'}"
                )
        except ValueError as error:
            if not self._run.restart_packing:
                raise ValueError(f"{error}; or begin with the data anew by --wlb-restart-packing") from error
            packer.begin_at(first_step)
            self.begins_anew = True
            print_rank_0(f"> wlb: WARNING: the data begins anew at iteration {first_step}: {error}")
        self._first_state = packer.state()


def _load(packer: Packer, folder: str, step: int) -> Any:
    path = state_path(folder, step)
    saved, job = state.load(path)
    if saved["step"] != step:
        raise ValueError(f"packer state {path} is of step {saved['step']}, not of iteration {step}; copy that one's")
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


class Comparison:
    """Whether all ranks plan a step alike.

    Ranks are asked when it is made, and hear the answer in `check`. Between the two lies a step, so that nobody waits;
    but it comes before the step, since behind calls that do not match no rank could say any more what differs.
    """

    def __init__(self, split: str, step: int, same: dict[str, int], own_digest: int, device: torch.device) -> None:
        """`same`: digests that all ranks share; `own_digest`: that of a data-parallel rank."""
        self._split, self.step, self._same, self._own_digest = split, step, same, own_digest
        self._own = len(same) + mpu.get_data_parallel_rank()
        told = torch.full((2, len(same) + mpu.get_data_parallel_world_size()), -1 << 63, dtype=torch.int64)
        told[0, : len(same)] = torch.tensor([*same.values()])
        told[0, self._own] = own_digest
        told[1, : len(same)], told[1, self._own] = -told[0, : len(same)], -told[0, self._own]
        if device.type == "cuda":
            told = told.pin_memory().to(device, non_blocking=True)
        work = torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX, async_op=True)
        self._told, self._wait = told, work.wait
        if device.type == "cuda":
            work.wait()  # the stream waits, not the host
            self._told = torch.empty_like(told, device="cpu", pin_memory=True).copy_(told, non_blocking=True)
            done = torch.cuda.current_stream().record_event()
            self._wait = lambda: done.query() or done.synchronize()

    def check(self) -> None:
        """Raise RuntimeError on every rank if any two plan differently, with what differs."""
        self._wait()
        largest, least = self._told
        if torch.equal(largest, -least):
            return
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
