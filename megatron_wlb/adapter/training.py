"""A run with `--wlb`: inputs of upstream's `pretrain()`, and replacements in it."""

import collections
import contextlib
import functools
import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import checkpointing, initialize, print_rank_0, training

from megatron_wlb import files
from megatron_wlb.adapter import compat, data, describe, loss, tiles
from megatron_wlb.adapter.data import Batch, DocumentDataset
from megatron_wlb.adapter.loss import token_loss
from megatron_wlb.adapter.model import WlbPackedSeqParams, adapt_mtp, configure
from megatron_wlb.adapter.p2p import PlannedP2PCommunicator, by_direction, connect
from megatron_wlb.adapter.plans import Plans
from megatron_wlb.adapter.report import Report
from megatron_wlb.adapter.wgrad import DeferredWeightGradients, Step, defer
from megatron_wlb.describe.settings import RunSettings
from megatron_wlb.plan.step import StepPlan
from megatron_wlb.runtime import all_to_all
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.simulate.weight_gradients import part_counts


class Training:
    """A run, made before any process group exists. Raises ValueError on bad input."""

    def __init__(self, args: Namespace) -> None:
        self._args, run = args, RunSettings.from_args(args)
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(args.local_rank)  # upstream sets it later, after backends are tested
        self._device = torch.device("cuda" if gpu else "cpu")
        files.INPUTS.clear()
        self._splits = data.load_splits(args)
        if run.log and args.rank == args.world_size - 1:  # the ranks that write them
            files.check_log(run.log, "--wlb-log")
        if args.rank == 0:
            if run.document_log:
                files.check_log(run.document_log, "--wlb-document-log")
            if args.save and os.path.isdir(args.save):
                files.check_room(args.save, "--save")
        train = functools.partial(data.stream_of, args, "train", self._splits["train"])
        self._job, tried = describe.best_job(args, train)
        job = self._job
        self.attention = AttentionOptions(
            backend=get_backend(run.attention_backend, self._device, job.model.head_sizes),
            save_gathered=job.sharding.save_gathered_kv,
            gradients_in_fp32=job.sharding.cp_gradients == "fp32",
            latents=job.cp_exchange == "latents",
        )
        self._plans = Plans(args, job, run, self._splits)
        self._passes: dict[str, int] = {}
        """Steps in which an evaluation goes once through each validation set, for --full-validation."""
        if args.full_validation:
            self._passes = {name: self._plans.steps_of_pass(name) for name in data.validation_sets(self._splits)}
            if not args.multiple_validation_sets:  # upstream takes its own number of steps for a list
                args.eval_iters, args.full_validation = self._passes["valid"], False
        if getattr(args, "sft", False):
            print_rank_0(
                f"> wlb: --sft: a step trains {args.global_batch_size} windows of tokens, not as many rows; "
                "--train-samples counts windows"
            )
        args.sft = False  # upstream would average evaluation over micro-batches; this is per trained token
        self._report = Report(args, job, run, self._plans, tried)
        self._batches: dict[str, tuple[Iterator[Batch], ...]] = {}
        self._weight_gradients: DeferredWeightGradients | None = None
        self._deferring: Step | None = None
        self._mtp_weights: list[float] = []
        """Loss weight of each depth in the running step."""

    def configure(self, model: Any, ddp: Any) -> None:
        """Make upstream build the model of its configs as this run needs it."""
        configure(model, options=self.attention, context_length=self._args.seq_length)
        job = self._job
        if job.tp_tile_rows:
            model.pre_wrap_hooks.append(self._tiled(tiles.tile_layers))
        if job.defer_weight_gradients:
            # Set after upstream's check of its flags, which allows this only with overlapped expert communication.
            transformer = model.transformer
            transformer.delay_wgrad_compute = ddp.delay_wgrad_compute = True
            # TransformerEngine refuses both in a layer; `defer` lets each layer have one of them.
            bulk = transformer.tp_comm_overlap and transformer.tp_comm_bulk_wgrad
            transformer.tp_comm_bulk_wgrad = False
            model.pre_wrap_hooks.append(functools.partial(defer, bulk=bulk))

    def _tiled(self, function: Any) -> Any:
        return functools.partial(function, sizes=self._job.tiles, ranks=self._job.parallel.tp)

    def dataset_provider(self, num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        """Return this rank's endless batches of the three splits."""
        if not vp_stage:
            if self._device.type == "cuda":
                connect(self._job, self._device)
            # Load each split once for all model chunks: workers for every chunk would be many processes.
            found, copies = self.batches().items(), self._job.parallel.vpp
            self._batches = {split: itertools.tee(each, copies) for split, each in found if each is not None}
        batches = {split: chunks[vp_stage or 0] for split, chunks in self._batches.items()}
        valid: Any = batches.get("valid")
        if self._args.multiple_validation_sets:
            valid = [_Pass(batches[name], steps) for name, steps in self._passes.items()]
        return batches["train"], valid, batches.get("test")

    dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank gets iterators

    def batches(self) -> dict[str, Iterator[Batch] | None]:
        """Return this rank's endless batches of every split, None for one without; prints what is trained."""
        found = {split: self._load(split) for split in self._splits}
        self._report.start(self._splits["train"], self.attention.backend.name)
        return found

    def _load(self, split: str) -> Iterator[Batch] | None:
        args = self._args
        if not self._plans.runs(split):
            return None
        first_step = args.iteration if split == "train" else 0
        if split == "valid" and not self._passes:
            first_step = args.consumed_valid_samples // args.eval_global_batch_size
        planner = self._plans.planner(split, first_step)
        dataset = DocumentDataset(
            split,
            self._splits[split],
            cp_rank=mpu.get_context_parallel_rank(),
            is_first=mpu.is_pipeline_first_stage(ignore_virtual=True),
            is_last=mpu.is_pipeline_last_stage(ignore_virtual=True),
            mmap=args.mmap_bin_files,
            vocabulary=args.padded_vocab_size,
            encode=self.attention.backend.encode,
            depths=args.mtp_num_layers or 0,
            order=self._tiled(tiles.order) if self._job.tp_tile_rows else None,
        )
        exit_signal = args.exit_signal if args.exit_signal_handler else None
        return data.loader(dataset, planner, first_step, args.num_workers, exit_signal)

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        """Run the forward pass of one micro-batch."""
        if self._deferring is not None:
            self._deferring.begin_forward()
        with training.stimer(bdata=True):  # --log-straggler
            batch = next(data_iterator).to(self._device)
        positions = batch.metadata.positions if batch.positions is None else batch.positions
        name = f"wlb {batch.split} step {batch.step}: {positions.numel()} of {batch.padded_tokens} tokens"
        ahead = loss.rolled(batch, positions, self._mtp_weights, self._job.context_length)
        tokens, labels, loss_mask = (
            given[:1] if given is not None else None for given in (batch.tokens, batch.labels, batch.loss_mask)
        )
        with training.stimer, torch.profiler.record_function(name), self._report.clock.span("forward"):
            output = model(
                tokens,
                positions.unsqueeze(0),
                None,
                labels=labels,
                loss_mask=loss_mask,
                packed_seq_params=WlbPackedSeqParams(wlb=batch.metadata, ahead=ahead),
            )
        # Upstream's model keeps its last input, and with it the input's gradient, until its next forward pass.
        get_attr_wrapped_model(model, "set_input_tensor")(None)
        return output, functools.partial(token_loss, self._args, loss_mask)

    def ran(self, loss_dict: Any, iteration: int) -> np.ndarray:
        """Report a training step that ran as `iteration`; returns the lengths of its documents, int64 [n]."""
        self._report.log(loss_dict, iteration)
        return self._report.trained_lengths()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Apply the replacements for training in upstream, and in our exchange to time it."""
        predicts_ahead = loss.installed(functools.partial(adapt_mtp, options=self.attention))
        with (
            predicts_ahead if self._args.mtp_num_layers else contextlib.nullcontext(),
            compat.replaced(training, "get_forward_backward_func", self.planned_forward_backward, ()),
            compat.replaced(training, "dummy_train_step", self._skipped, ("data_iterator",)),
            compat.replaced(schedules, "backward_step", self._report.clock.backward, ()),
            compat.replaced(p2p_communication, "_p2p_ops", by_direction, ("group", "next_pipeline_rank")),
            compat.replaced(initialize, "_initialize_tp_communicators", tiles.sized(self._job.tiles), ()),
            compat.replaced(all_to_all, "_all_to_all", self._report.clock.exchange, ()),
            compat.replaced(checkpointing, "maybe_save_dataloader_state", self._saved, ("train_iterator", "iteration")),
            compat.mean_losses(self._job.global_batch_size / self._job.num_micro_batches),
            compat.whole_tracker(),
            self._report.installed(),
        ):
            yield

    def planned_forward_backward(self, original: Any) -> Any:
        """Wrap upstream's schedules to run a step as planned."""

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            return functools.partial(self._forward_backward, original(*args, **kwargs))

        return get_forward_backward_func

    def _forward_backward(self, schedule: Any, *, data_iterator: Any, model: Any, num_microbatches: int, **rest: Any):  # type: ignore[no-untyped-def]
        self._report.begin_step()
        first, plan, feeds = self._drawn(data_iterator)
        if depths := self._args.mtp_num_layers or 0:
            self._mtp_weights = loss.weights(self._splits[first.split].targets(plan.batch.documents, depths))
        if first.split == "train":
            self._report.planned(plan)
        count = len(plan.micro_batches)  # not `num_microbatches`: upstream counts windows
        parallel, chunks = self._job.parallel, model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        if parallel.vpp > 1:
            config.microbatch_group_size_per_vp_stage = self._plans.job(first.split, first.step).schedule().group
        with self._deferred(plan, chunks, config) as fill:
            communicator = None
            if parallel.pp > 1:
                # Every stage knows all lengths before its first receive.
                ranks = parallel.cp * parallel.sequence_ranks
                rest["p2p_communicator"] = communicator = PlannedP2PCommunicator(
                    mpu.get_pipeline_model_parallel_group(),
                    config,
                    [m.padded_tokens // ranks for m in plan.micro_batches],
                    fill,
                )
                rest["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
            done = schedule(
                data_iterator=feeds if isinstance(data_iterator, list) else feeds[0],
                model=model,
                num_microbatches=count,
                **rest,
            )
            if communicator is not None:
                communicator.settle()
            return done

    def _drawn(self, data_iterator: Any) -> tuple[Batch, StepPlan, list[Iterator[Batch]]]:
        """Begin a step: its first batch, its plan, and the batches of every model chunk."""
        # The first batch names the step. A replay (rerun state machine) repeats the same batches.
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        batches = [next(iterator) for iterator in iterators]
        first = batches[0]
        plan, both = self._plans.begin(first.split, first.step, self._device), zip(batches, iterators, strict=True)
        return first, plan, [_of_step(first, batch, iterator, len(plan.micro_batches)) for batch, iterator in both]

    def _skipped(self, original: Any) -> Any:
        """Wrap upstream's step of --iterations-to-skip, to draw as many micro-batches as the plan has."""

        def dummy_train_step(data_iterator: Any) -> None:
            while get_rerun_state_machine().should_run_forward_backward(data_iterator):
                for feed in self._drawn(data_iterator)[2]:
                    collections.deque(feed, maxlen=0)

        return dummy_train_step

    @contextlib.contextmanager
    def _deferred(self, plan: StepPlan, chunks: list[Any], config: Any) -> Iterator[Callable[[], None] | None]:
        """Defer weight gradients inside; yields `Step.fill`, or None if none."""
        if plan.weight_gradients_before is None:
            yield None
            return
        stage = mpu.get_pipeline_model_parallel_rank()
        if self._weight_gradients is None:
            measured = functools.partial(self._report.clock.span, "weights")
            self._weight_gradients = DeferredWeightGradients(chunks, part_counts(self._job)[stage], measured)
        schedule, before = self._job.schedule(len(plan.micro_batches)), plan.weight_gradients_before[:, stage]
        with self._weight_gradients.step(schedule, stage, before, config) as self._deferring:
            try:
                yield self._deferring.fill
            finally:
                self._deferring = None

    def save(self, iteration: int) -> None:
        """Save the packer's state after `iteration`, on rank 0 alone."""
        if torch.distributed.get_rank() == 0:
            self._plans.save(iteration)

    def _saved(self, original: Any) -> Any:
        """Wrap upstream's save hook to save the packer before the checkpoint completes."""

        @functools.wraps(original)
        def maybe_save_dataloader_state(train_iterator: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
            self.save(iteration)

        return maybe_save_dataloader_state


class _Pass:
    """Endless batches of a validation set, with the steps of a pass as their length, as upstream asks for it."""

    def __init__(self, batches: Iterator[Batch], steps: int) -> None:
        self._batches, self._steps = batches, steps

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def __len__(self) -> int:
        return self._steps


def _of_step(first: Batch, batch: Batch, others: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield `batch` and `count` - 1 `others`; RuntimeError if not of `first`'s step."""
    for i in range(count):
        if i:
            batch = next(others)
        if (batch.step, batch.split) != (first.step, first.split):
            raise RuntimeError(
                f"micro-batches of {batch.split} step {batch.step} in {first.split} step {first.step}: the data "
                "iterators are apart; report it, with the flags"
            )
        yield batch
