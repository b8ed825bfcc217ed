"""Startup summary, and the log of a step: a line, JSON, TensorBoard and W&B."""

import contextlib
import functools
import inspect
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from typing import Any

import megatron.core
import msgspec
import numpy as np
import torch
from megatron.training import get_tensorboard_writer, get_wandb_writer, is_last_rank, print_rank_0, training

from megatron_wlb import __version__, files, layers
from megatron_wlb.adapter import forecast
from megatron_wlb.adapter.clock import Clock
from megatron_wlb.adapter.digest import digest_line, reduced
from megatron_wlb.adapter.layers.attention import attended_squares
from megatron_wlb.adapter.plans import Plans
from megatron_wlb.adapter.sources.source import SplitData
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import RunSettings
from megatron_wlb.describe.megatron import Description
from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import Versions
from megatron_wlb.job import Job
from megatron_wlb.plan import metrics
from megatron_wlb.plan.micro_batches import Prediction
from megatron_wlb.plan.step import StepPlan, shard_step
from megatron_wlb.runtime.backends import Choice
from megatron_wlb.runtime.measure import device_name, versions
from megatron_wlb.simulate import memory
from megatron_wlb.simulate.passes import untimed
from megatron_wlb.simulate.step import shares, simulate_step

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Report:
    """Replaces upstream's step log (`installed`), and adds the output of `--wlb`."""

    def __init__(self, args: Namespace, run: RunSettings, said: Sequence[str]) -> None:
        self._args, self._run = args, run
        self._said = list(said)  # printed before the first step, together
        self._forecast: Callable[[], Any] | None = None  # begun then
        self._job: Job
        self._plans: Plans
        self._tried: Sequence[Prediction] = ()
        self._digested: Callable[[], torch.Tensor]
        self._waited = 0.0  # seconds for the planner, up to the last log line
        self._began = 0.0  # start of the last step, by `time.perf_counter`
        self._scalar_interval = args.tensorboard_log_interval if args.tensorboard_dir or args.wandb_project else 0
        self._thread = ThreadPoolExecutor(1, "wlb-prediction")
        self._predicted: Future[tuple[float, dict[str, float]]] | None = None
        self._flops: list[float] = []  # of the steps since the last log line
        self._in_line = False
        self.clock = Clock()
        self.writers: Callable[[], tuple[Any, Any]] = _upstreams_writers
        """Returns the writers of TensorBoard and W&B, None where there is none; called at every step that is logged."""

    def begin(self, job: Job, plans: Plans, tried: Sequence[Prediction], digested: Callable[[], torch.Tensor]) -> None:
        """Take the values that depend on the data; `digested` returns this rank's part of the last step's digest."""
        self._job, self._plans, self._tried, self._digested = job, plans, tried, digested
        # All ranks measure a step that the last one reports, also if it alone has the flags.
        wanted = [self._args.log_interval, bool(self._run.log), self._scalar_interval]
        torch.distributed.broadcast_object_list(wanted, torch.distributed.get_world_size() - 1)
        self._wanted = tuple(wanted)

    def start(self, data: SplitData, backend: Choice, described: Description) -> None:
        """Take the data and the plan, to print them before the first step."""
        job, device = self._job, "cuda" if torch.cuda.is_available() else "cpu"
        if misfit := job.profile.misfit(torch.cuda.get_device_name() if device == "cuda" else None, job.precision):
            self._say(f"warning: {misfit}")
        if data.remark:
            self._say(data.remark)
        groups = f" in groups of {job.schedule().group}" if job.parallel.vpp > 1 else ""
        self._say(
            f"{len(data.samples)} samples of {len(data.samples.datasets)} datasets, from {data.first_sample} on; "
            f"--wlb-packing {job.packing} into {job.num_micro_batches} micro-batches per step{groups} for "
            f"{job.global_batch_size} windows of {job.context_length} tokens, S_max {job.max_tokens}, crossover "
            f"{job.crossover_tokens} tokens, CP sharding {job.sharding.cp_sharding}"
            f"{' of latents' * (job.cp_exchange == 'latents')}"
        )
        for line in layers.assumed(job.model):
            self._say(line)
        if self._tried:
            why = untimed(job)
            assumed = f" (assumed to follow work, since {why})" * bool(why)
            times = ", ".join(f"{each.job.num_micro_batches}: {each.time:.3f}" for each in self._tried)
            self._say(
                f"--wlb-micro-batches auto chose {job.num_micro_batches}; predicted time of a step by its "
                f"micro-batches{assumed}: {times}"
            )
        if torch.distributed.get_rank() == 0 and not untimed(job):
            before = MegatronArguments.of(vars(self._args) | vars(self._args).get("wlb_before", {}))
            self._forecast = functools.partial(forecast.tell, job, described, before, data)
        peaks = [memory.peak_bytes(job, stage) / 2**30 for stage in range(job.parallel.pp)]
        self._say(
            "activations by stage, predicted peak with as many micro-batches of S_max tokens as a rank can hold: "
            f"{', '.join(f'{peak:.2f}' for peak in peaks)} GiB"
        )
        other = job.profile.differences(
            head_size=job.model.head_size,
            dtype=_DTYPES[self._args.params_dtype],
            backend=backend.name,
            versions=Versions(**versions(device)),
        )
        measured = f" (measured with {other})" if other else ""
        self._say(f"attention backend {backend}, profile {job.profile.name}{measured}")

    def _say(self, line: str) -> None:
        self._said.append(f"> wlb: {line}")

    def begin_step(self) -> None:
        """Start a forward-backward pass, before its data are there."""
        if self._said:
            print_rank_0("\n".join(self._said))
            self._said.clear()
            if self._forecast is not None:
                self._thread.submit(self._forecast)
        self._began = time.perf_counter()
        self.clock.begin()

    def planned(self, plan: StepPlan) -> None:
        """Take a training step's plan; measure and simulate a step to be reported."""
        self._predicted = None
        if not self._wants(plan.step + 1):
            return
        job = self._plans.job("train", plan.step).of_step(len(plan.batch), plan.tokens)
        self.clock.measure(job)
        if is_last_rank() and not untimed(job):
            self._predicted = self._thread.submit(_predicted, job, plan.batch)

    def _wants(self, iteration: int) -> bool:
        line, log, scalars = self._wanted
        return iteration % line == 0 or log or (scalars > 0 and iteration % scalars == 0)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, upstream's step log and FLOP count go through this class."""
        counted = ("args", "batch_size", "seqlen_squared_sum_in_batch", "total_real_tokens_in_batch")
        logged = ("loss_dict", "total_loss_dict", "iteration", "skipped_iter")
        with (
            replaced(training, "training_log", self._logged, logged),
            replaced(training, "num_floating_point_operations", self._counted, counted),
        ):
            yield

    def trained_lengths(self) -> np.ndarray:
        """Return the lengths of the documents of the last training step, int64 [n]."""
        assert self._plans.last_step is not None
        return self._plans.trained(self._plans.last_step + 1).batch.documents["length"]

    def _counted(self, original: Any) -> Any:
        """Pass documents of a step, or the mean of a log line's steps, to upstream's FLOP count."""

        @functools.wraps(original)
        def num_floating_point_operations(args: Namespace, batch_size: int, *rest: Any, **options: Any) -> float:
            if not self._in_line:
                lengths = self.trained_lengths()
                counts = {
                    "seqlen_squared_sum_in_batch": attended_squares(args, lengths),
                    "total_real_tokens_in_batch": float(lengths.sum()),
                }
                self._flops.append(original(args, batch_size, **counts))
                return self._flops[-1]
            return sum(self._flops) / len(self._flops)

        return num_floating_point_operations

    def _logged(self, original: Any) -> Any:
        """Wrap upstream's `training_log` to print its line, then ours."""

        @functools.wraps(original)
        def training_log(loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args, **kwargs):  # type: ignore[no-untyped-def]
            call = inspect.signature(original).bind(
                loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
            )
            # Upstream accumulates and clears these losses, so read the loss first.
            measured = self._measured(loss_dict, iteration)
            steps = 1 + sum(int(total_loss_dict.get(f"{kind} iterations", 0)) for kind in ("advanced", "skipped"))
            del self._flops[:-steps]
            self._in_line = True
            result = original(*call.args, **call.kwargs)
            self._in_line = False
            self._write(iteration, bool(call.arguments["skipped_iter"]), *measured)
            return result

        return training_log

    def log(self, loss_dict: Any, iteration: int, *, skipped: bool) -> None:
        """Report a step that has run; only the last rank has its loss. `skipped`: its gradients were not finite."""
        self._write(iteration, skipped, *self._measured(loss_dict, iteration))

    def _measured(self, loss_dict: Any, iteration: int) -> tuple[float | None, float]:
        wanted = self._wants(iteration) or self._run.digest
        loss = float(loss_dict["lm loss"]) if is_last_rank() and wanted else None
        return loss, time.perf_counter() - self._began  # on a GPU, too: reading the loss waits for the step

    def _write(self, iteration: int, skipped: bool, loss: float | None, took: float) -> None:
        digest = reduced(self._digested()) if self._run.digest else None
        measured = self.clock.shares(None if loss is None else took) if self._wants(iteration) else None
        if loss is None:
            return
        plan = self._plans.trained(iteration)
        entry = self._entry(plan, loss, took, measured) | {"skipped": skipped}
        if digest is not None:
            print(digest_line(iteration, digest), flush=True)
            entry["digest"] = digest
        if iteration % self._args.log_interval == 0:
            print(line(entry), flush=True)
        if self._run.log:
            append(self._run.log, entry | details(plan, self._plans.job("train", plan.step)) | _machine())
        if self._scalar_interval and iteration % self._scalar_interval == 0:
            _write_scalars(*self.writers(), iteration, plan, entry)

    def _entry(self, plan: StepPlan, loss: float, took: float, measured: dict[str, float] | None) -> dict[str, Any]:
        """Return the log entry of a step that took so many seconds, as JSON types; `loss` is the mean over tokens."""
        waited, self._waited = self._plans.wait_seconds - self._waited, self._plans.wait_seconds
        microseconds, predicted = self._predicted.result() if self._predicted else (None, None)
        tokens, (late, latest) = plan.tokens, metrics.lateness(plan.batch, plan.step)
        return {
            "step": plan.step + 1,
            "plan": f"{plan.digest:016x}",
            "loss": loss,
            "tokens": tokens,
            "num_micro_batches": len(plan.work),
            "imbalance_original": metrics.imbalance(plan.original_work),
            "imbalance": metrics.imbalance(plan.work),
            "gain_by_work": self._plans.gain(plan),
            "delay_mean_steps": late / tokens,
            "delay_max_steps": latest,
            "waiting_documents": plan.packed.num_waiting,
            "step_ms": took * 1e3,
            "tokens_per_second_per_gpu": tokens / took / self._job.parallel.num_gpus,
            "plan_wait_ms": waited * 1e3,
            "predicted_ms": None if microseconds is None else microseconds / 1e3,
            "predicted": predicted,
            "measured": measured,
        }


SOURCES = ("predicted", "measured")
"""Fields of an entry that hold shares, in the words and order of `simulate.TIME_SHARES`."""


def _upstreams_writers() -> tuple[Any, Any]:
    return get_tensorboard_writer(), get_wandb_writer()


def _write_scalars(board: Any, wandb: Any, iteration: int, plan: StepPlan, entry: dict[str, Any]) -> None:
    """Write numbers and shares of an entry, and shares of micro-batches by sharding."""
    values = {f"wlb/{name}": value for name, value in entry.items() if isinstance(value, int | float)}
    for how in SOURCES:
        values |= {f"wlb/{how}/{name}": share for name, share in (entry[how] or {}).items()}
    chosen = Counter(m.shards.strategy.replace("-", "_") for m in plan.micro_batches)
    values |= {f"wlb/sharding/{name}": count / len(plan.micro_batches) for name, count in chosen.items()}
    if board:
        for name, value in values.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)


def _predicted(job: Job, packing: PackedBatch) -> tuple[float, dict[str, float]]:
    step = simulate_step(job, shard_step(job, packing.lengths, packing.ranks))
    return step.time, shares(step)


@functools.cache
def _machine() -> dict[str, Any]:
    """Return the fields of the log entry on device and software."""
    versions = {
        "megatron-wlb": __version__,
        "megatron-core": megatron.core.__version__,
        "torch": str(torch.__version__),
    }
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["transformer-engine"] = metadata.version("transformer-engine")
    return {"device": device_name("cuda" if torch.cuda.is_available() else "cpu"), "versions": versions}


def details(plan: StepPlan, job: Job) -> dict[str, Any]:
    """Return further fields of the log entry."""
    return {
        "job": job.to_json(),
        "work": plan.work.tolist(),
        "micro_batches": [
            {"tokens": m.tokens, "strategy": m.shards.strategy, "key_bounds": m.shards.key_bounds}
            for m in plan.micro_batches
        ],
        "lengths": [lengths.tolist() for lengths in plan.batch.lengths],
        "ranks": None if plan.batch.ranks is None else plan.batch.ranks.tolist(),
    }


def line(entry: dict[str, Any]) -> str:
    """Format the line that training prints."""
    return (
        f" wlb step {entry['step']:6d} | loss {entry['loss']:.6f} | tokens {entry['tokens']} in "
        f"{entry['num_micro_batches']} micro-batches{_gain(entry['gain_by_work'])} | "
        f"delay mean {entry['delay_mean_steps']:.2f} max {entry['delay_max_steps']} steps | "
        f"waiting {entry['waiting_documents']} documents | tokens/s/GPU {entry['tokens_per_second_per_gpu']:.1f}"
        + "".join(f" | {how} {_percent(entry[how])}" for how in SOURCES if entry[how])
    )


def _gain(by_work: float | None) -> str:
    if by_work is None:
        return ""
    gained = f"{by_work:.3f} times as fast as" if f"{by_work:.3f}" != "1.000" else "no gain over"
    return f" | predicted by work: {gained} Megatron's windows"


def _percent(shares: Mapping[str, float]) -> str:
    """Format shares as "busy 71, bubble 24, exchange 0, waiting 5 %"."""
    return ", ".join(f"{name} {round(100 * share)}" for name, share in shares.items()) + " %"


def append(path: str, entry: dict[str, Any]) -> None:
    """Append one JSON line, all or nothing. Raises OSError, as `files.append`."""
    files.append(path, msgspec.json.encode(entry, enc_hook=np.generic.item) + b"\n", "--wlb-log")  # NaN is null
