"""A run with `--wlb`: inputs of upstream's `pretrain()`, and replacements in it."""

import collections
import contextlib
import functools
import itertools
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import checkpointing, training

from megatron_wlb import files
from megatron_wlb.adapter import data, jobs, layers, loss
from megatron_wlb.adapter.data import Batch, BatchDataset, SampleReader
from megatron_wlb.adapter.digest import Planned
from megatron_wlb.adapter.errors import one_line
from megatron_wlb.adapter.layers.kind import Run
from megatron_wlb.adapter.loss import token_loss
from megatron_wlb.adapter.model import WlbPackedSeqParams, configure
from megatron_wlb.adapter.p2p import PlannedP2PCommunicator, by_direction, connect
from megatron_wlb.adapter.plans import Plans, state_path
from megatron_wlb.adapter.report import Report
from megatron_wlb.adapter.sources import datasets
from megatron_wlb.adapter.sources.source import SPLITS, SplitData, empty, evaluates
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.tracker import whole_tracker
from megatron_wlb.plan.micro_batches import Prediction
from megatron_wlb.plan.step import StepPlan
from megatron_wlb.runtime import spans
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import choose_backend, get_backend


class Training:
    """A run, made before any process group exists. Raises ValueError on bad input."""

    def __init__(self, args: Namespace, said: Sequence[str] = ()) -> None:
        """`said`: lines that are printed before the first step."""
        self._args, gpu = args, torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(args.local_rank)  # upstream sets it later, after backends are tested
        self._device = torch.device("cuda" if gpu else "cpu")
        files.INPUTS.clear()
        self._source = datasets.source_of(args)
        self._source.check()
        if args.wlb_log and args.rank == args.world_size - 1:  # the rank that writes it
            files.check_log(args.wlb_log, "--wlb-log")
        if args.rank == 0 and args.save:
            folder = Path(args.save).absolute()  # which upstream makes when it saves
            files.check_room(str(next(each for each in (folder, *folder.parents) if each.is_dir())), "--save")
        self._run = jobs.described(args)
        self._job = job = self._run.job()
        asked = str(getattr(args, "attention_backend", "auto")).rpartition(".")[2]
        self._backend = choose_backend(self._device.type, job.model.head_sizes, asked)
        self.attention = AttentionOptions(
            backend=get_backend(self._backend.name, self._device, job.model.head_sizes),
            gradients_in_fp32=job.sharding.cp_gradients == "fp32",
            exchanged_before=job.keeps_exchanged,
        )
        self._kinds = layers.of(args)
        self._tiles: Any = None
        if args.tp_comm_overlap:
            from megatron_wlb.adapter.tiles import Tiles

            self._tiles = Tiles(job.tiles, job.parallel.tp)
        self._plans: Plans
        self._report = Report(args, self._run.run_settings, said)
        self._splits: dict[str, SplitData] = {}
        self._readers: dict[str, SampleReader] = {}
        self._batches: dict[str, tuple[Iterator[Batch], ...]] = {}
        self._weights: torch.Tensor | None = None
        """Weights of targets by depth and micro-batch without `--wlb`, float32 [1 + depths, micro-batches]; None: 1."""
        self._windows_per_micro_batch = 1.0
        """In the running step, by its micro-batches."""
        self._trained_share = 1.0
        """Share of the running step's tokens that is trained, if upstream would not divide by their number."""
        self._digest = Planned(args, self.attention.backend, self._device)

    def writes_to(self, writers: Callable[[], tuple[Any, Any]]) -> None:
        """Write scalars to these of TensorBoard and W&B, None where there is none, in the place of upstream's."""
        self._report.writers = writers

    def configure(self, model: Any) -> None:
        """Make upstream build the model of its config as this run needs it."""
        configure(model, options=self.attention, context_length=self._args.seq_length)
        if self._job.tiles:
            model.pre_wrap_hooks.append(self._tiles.tile_layers)

    @property
    def _order(self) -> Any:
        """See `BatchDataset`."""
        return self._tiles.order if self._job.tiles else None

    @one_line()
    def dataset_provider(self, num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        """Return this rank's endless batches of the three splits."""
        if not vp_stage:
            self.load(datasets.build(self._args, num_samples))
            if self._device.type == "cuda":
                connect(self._job, self._device, [name for kind in self._kinds for name in kind.groups])
            # Load each split once for all model chunks: workers for every chunk would be many processes.
            found, copies = self.batches().items(), self._job.parallel.vpp
            self._batches = {split: itertools.tee(each, copies) for split, each in found if each is not None}
        batches = {split: chunks[vp_stage or 0] for split, chunks in self._batches.items()}
        valid: Any = batches.get("valid")
        if self._args.multiple_validation_sets:
            valid = [_Pass(each, self._splits[name].steps or 0) for name, each in batches.items() if "valid" in name]
        return batches.get("train"), valid, batches.get("test")

    dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank gets iterators

    def load(self, built: Sequence[Any], split_data: Callable[..., SplitData] | None = None) -> None:
        """Take the datasets of the three splits, and settle how they are trained; `split_data` reads them.

        Raises ValueError for an empty training split, and for an empty validation set if the run evaluates.
        """
        args, (train, valid, test) = self._args, built
        sets = {"train": train} if not args.skip_train else {}
        if evaluates(args):
            validation = {"valid": valid}
            if args.multiple_validation_sets:
                several = valid if isinstance(valid, list) else [valid]
                validation = {f"valid {i}": each for i, each in enumerate(several)}
            sets |= validation | ({} if test is None or args.multiple_validation_sets else {"test": test})
        for name, dataset in sets.items():
            if dataset is None or not len(dataset):
                raise empty(args, name)
        first = {"train": _consumed(args)}
        if not args.skip_train and not args.full_validation:
            first["valid"] = args.consumed_valid_samples
        held = split_data or datasets.split_data
        self._splits = {name: held(each, args, name, first.get(name, 0)) for name, each in sets.items()}
        if args.full_validation and not args.multiple_validation_sets:
            # Upstream takes its own number of steps for a list.
            args.eval_iters, args.full_validation = self._splits["valid"].steps, False
        tried: list[Prediction] = []
        if train := self._splits.get("train"):
            self._job, tried = jobs.best_job(args, self._run, train)
        windows = args.wlb_windows_per_micro_batch if self._job.packing.same_steps else None
        apart = self._source.apart or args.dataloader_inter_document_masking
        anew = apart or args.reset_position_ids
        self._readers = {
            name: SampleReader(
                split=name,
                datasets=each.datasets,
                context_length=args.seq_length,
                samples_per_micro_batch=windows if name == "train" else args.wlb_eval_windows_per_micro_batch,
                vocabulary=args.padded_vocab_size,
                depths=sum(kind.depths(args) for kind in self._kinds),
                ahead_in_document=apart,
                in_window=args.position_embedding_type == "learned_absolute" and not anew,
                mean_of_means=args.wlb_means_in_evaluation and name != "train",
                digest=self._run.run_settings.digest and name == "train",
            )
            for name, each in self._splits.items()
        }
        self._plans = Plans(args, self._job, self._splits, self._readers)
        self._report.begin(self._job, self._plans, tried, lambda: self._digest.part)

    def batches(self) -> dict[str, Iterator[Batch] | None]:
        """Return this rank's endless batches of every split, None for one that does not run."""
        found = {split: self._load(split) for split in self._splits}
        if "train" in self._splits:
            self._report.start(self._splits["train"], self._backend, self._run)
        return dict.fromkeys(SPLITS) | found

    def _load(self, split: str) -> Iterator[Batch]:
        args = self._args
        first_step = args.iteration if split == "train" else 0
        dataset = BatchDataset(
            reader=self._readers[split],
            cp_rank=mpu.get_context_parallel_rank(),
            is_first=mpu.is_pipeline_first_stage(ignore_virtual=True),
            is_last=mpu.is_pipeline_last_stage(ignore_virtual=True),
            padded=any(kind.padded for kind in self._kinds),
            in_order=any(kind.in_order for kind in self._kinds),
            encode=self.attention.backend.encode,
            attention_windows=self._job.model.windows,
            order=self._order,
        )
        exit_signal = args.exit_signal if args.exit_signal_handler else None
        planner = self._plans.planner(split, first_step)
        return data.loader(dataset, planner, first_step, args.num_workers, exit_signal)

    def forward_step(
        self, data_iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """Run the forward pass of one micro-batch, or return its plan for upstream's combined schedule."""
        with training.stimer(bdata=True):  # --log-straggler
            batch = next(data_iterator).to(self._device)
        positions = batch.metadata.positions if batch.positions is None else batch.positions
        name = f"wlb {batch.split} step {batch.step}: {positions.numel()} of {batch.padded_tokens} tokens"
        reader = self._readers[batch.split]
        seen = self._digest.given(batch, model, self._order) if reader.digest else None
        weights = None
        if self._weights is not None and batch.upstream_micro_batch is not None:
            weights = self._weights[:, batch.upstream_micro_batch]
        depth_inputs = layers.depth_inputs(batch, positions, weights, self._job.context_length)
        inputs = {name: value for kind in self._kinds for name, value in kind.inputs(batch, model).items()}
        tokens, labels, loss_mask = (
            given[:1] if given is not None else None for given in (batch.tokens, batch.labels, batch.loss_mask)
        )
        # A plan is timed as it runs (`layers.overlap`).
        timed = contextlib.nullcontext() if return_schedule_plan else self._report.clock.span("forward")
        with training.stimer, torch.profiler.record_function(name), timed:
            output = (model.build_schedule_plan if return_schedule_plan else model)(
                tokens,
                positions.unsqueeze(0),
                None,
                labels=labels,
                loss_mask=loss_mask,
                packed_seq_params=WlbPackedSeqParams(wlb=batch.metadata, depth_inputs=depth_inputs),
                **inputs,
            )
        if not return_schedule_plan:  # which has yet to read it
            # Upstream's model keeps its last input, and with it the input's gradient, until its next forward pass.
            get_attr_wrapped_model(model, "set_input_tensor")(None)
        given, of_means = None if weights is None else weights[0], reader.mean_of_means
        return output, functools.partial(token_loss, self._args, loss_mask, given, reports_weighted=of_means, seen=seen)

    def ran(self, loss_dict: Any, iteration: int, *, skipped: bool) -> np.ndarray:
        """Report a training step that ran as `iteration`; returns the lengths of its documents, int64 [n]."""
        self._report.log(loss_dict, iteration, skipped=skipped)
        return self._report.trained_lengths()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Apply the replacements for training in upstream, and watch our exchange to time it."""
        run = Run(
            trained=lambda: self._trained_share,
            windows=lambda: self._windows_per_micro_batch,
            adapt=functools.partial(layers.adapt, options=self.attention),
            clock=self._report.clock,
        )
        with (
            layers.installed(self._args, run),
            self._tiles.installed() if self._tiles is not None else contextlib.nullcontext(),
            replaced(training, "get_forward_backward_func", self.planned_forward_backward, ()),
            replaced(training, "dummy_train_step", self._skipped, ("data_iterator",)),
            replaced(schedules, "backward_step", self._report.clock.span("backward"), ()),
            replaced(p2p_communication, "_p2p_ops", by_direction, ("group", "next_pipeline_rank")),
            replaced(checkpointing, "maybe_save_dataloader_state", self._saved, ("train_iterator", "iteration")),
            whole_tracker(),
            self._report.installed(),
            spans.watched(self._report.clock.watch),
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
        count = len(plan.micro_batches)  # not `num_microbatches`: upstream counts windows
        if first.split == "train":
            self._windows_per_micro_batch = num_microbatches / count
            self._digest.begin()
            self._report.planned(plan)
        parallel, chunks = self._job.parallel, model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        if parallel.vpp > 1:
            config.microbatch_group_size_per_vp_stage = self._plans.job(first.split, first.step).schedule(count).group
        communicator = None
        if parallel.pp > 1:
            # Every stage knows all lengths before its first receive.
            ranks = parallel.cp * parallel.sequence_ranks
            rest["p2p_communicator"] = communicator = PlannedP2PCommunicator(
                mpu.get_pipeline_model_parallel_group(),
                config,
                [m.padded_tokens // ranks for m in plan.micro_batches],
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
        plan, counts = self._plans.begin(first.split, first.step, self._device)
        self._weigh(first.split, counts, plan.tokens)
        both = zip(batches, iterators, strict=True)
        return first, plan, [_of_step(first, batch, iterator, len(plan.micro_batches)) for batch, iterator in both]

    def _weigh(self, split: str, counts: np.ndarray | None, tokens: int) -> None:
        """Set the weights of a step's targets, by the counts of all ranks."""
        reader, self._weights = self._readers[split], None
        self._trained_share = 1.0
        if counts is not None:
            per_token = self._args.wlb_per_token_loss and split == "train"
            if not per_token:
                self._trained_share = float(counts[:, 0].sum() / tokens)
            weights = torch.from_numpy(loss.weights(counts, reader.samples_per_micro_batch, per_token=per_token))
            if self._device.type == "cuda":
                weights = weights.pin_memory().to(self._device, non_blocking=True)
            self._weights = weights

    def _skipped(self, original: Any) -> Any:
        """Wrap upstream's step of --iterations-to-skip, to draw as many micro-batches as the plan has."""

        def dummy_train_step(data_iterator: Any) -> None:
            while get_rerun_state_machine().should_run_forward_backward(data_iterator):
                for feed in self._drawn(data_iterator)[2]:
                    collections.deque(feed, maxlen=0)

        return dummy_train_step

    def save(self, iteration: int) -> None:
        """Save documents that wait after `iteration`, on rank 0 alone; a copy if upstream converts a checkpoint."""
        if torch.distributed.get_rank():
            return
        if getattr(self._args, "ckpt_convert_format", None) is None:
            self._plans.save(iteration)
        elif (waits := state_path(self._args.load, iteration)).exists():
            os.makedirs(self._args.save, exist_ok=True)
            shutil.copy(waits, self._args.save)

    def _saved(self, original: Any) -> Any:
        """Wrap upstream's save hook to save waiting documents before the checkpoint completes."""

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


def _consumed(args: Namespace) -> int:
    """Return the first sample that this process trains, as upstream counts them in a phase."""
    if not args.phase_transition_iterations:
        return int(args.consumed_train_samples)
    begins = max(each for each in (0, *args.phase_transition_iterations) if each <= args.iteration)
    return int((args.iteration - begins) * args.global_batch_size)


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
