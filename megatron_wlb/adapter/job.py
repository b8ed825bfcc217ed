"""A training run with `--wlb`: what upstream's `pretrain()` is given, and where we step in (`installed`)."""

import contextlib
import functools
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import checkpointing, print_rank_0, training

from megatron_wlb.adapter import arguments, checkpoint, compat, data, log, memory
from megatron_wlb.adapter.data import Batch, DocumentDataset, SplitData
from megatron_wlb.adapter.loss import scale_sharded, token_loss
from megatron_wlb.adapter.model import WlbPackedSeqParams
from megatron_wlb.adapter.p2p import PlannedP2PCommunicator
from megatron_wlb.adapter.resume import RunLayout, packing_settings, resume, run_layout
from megatron_wlb.adapter.telemetry import Telemetry
from megatron_wlb.adapter.throughput import Throughput
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan import document_log, native
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.sharding.exchange import head_groups
from megatron_wlb.plan.step import Layout, Planner, is_order_free
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.plan.workload import KernelModel, load_profile
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import choose_backend, get_backend


class WlbJob:
    """Built from validated arguments before any process group exists; raises ValueError on bad input."""

    def __init__(self, args: Namespace, config: WlbConfig) -> None:
        self._args, self._config = args, config
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(args.local_rank)  # upstream does so later, and backends are tried before
        self._device = torch.device("cuda" if gpu else "cpu")
        self._unit = arguments.unit_tokens(args)
        self._memory = memory.activation_model(args, config)
        fitting = memory.fitting_tokens(args, config, self._memory, self._micro_batches_per_rank(), self._unit)
        self._max_tokens = config.max_tokens_for(args.seq_length, self._unit, fitting)
        self._splits = data.load_splits(args)
        self._profile = load_profile(config.profile or ("h100-fa2" if gpu else "flops"))
        self._crossover = config.crossover or self._profile.crossover_for(self._memory.model)
        self._use_native = native.use(config.planner)
        self._planners: dict[str, Planner] = {}
        self._first_step = 0
        self._last_step: int | None = None
        self._begins_anew = False  # the data, in the first step
        self._initial_state: dict[str, Any] = {}
        self._layout: RunLayout = {}
        self._throughput = Throughput(self._trained_lengths)
        self._telemetry = Telemetry(args)
        self._waited = 0.0  # for the planner, up to the last line of the log
        self._began = 0.0  # the last training step, by `time.perf_counter`

    @functools.cached_property
    def attention_options(self) -> AttentionOptions | None:
        """None for Megatron's own attention."""
        config = self._config
        if config.attention_backend == "megatron":
            return None
        return AttentionOptions(
            backend=get_backend(config.attention_backend, self._device),
            head_groups=config.cp_head_groups,
            save_gathered=config.save_gathered_kv,
        )

    def _micro_batches_per_rank(self) -> int:
        return int(self._args.global_batch_size // self._args.data_parallel_size)

    # What pretrain() is given -----------------------------------------------------------------------------------------

    def dataset_provider(self, num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        """Endless batches of this rank for training, validation and test (`--dataloader-type external`)."""
        args = self._args
        first_steps = {
            "train": args.iteration,
            "valid": args.consumed_valid_samples // args.eval_global_batch_size,
            "test": 0,
        }
        chunks = args.virtual_pipeline_model_parallel_size or 1
        stage = vp_stage or 0
        is_first = mpu.is_pipeline_first_stage(ignore_virtual=True) and stage == 0
        is_last = mpu.is_pipeline_last_stage(ignore_virtual=True) and stage == chunks - 1
        loaders: list[Iterator[Batch] | None] = []
        for split, split_data in self._splits.items():
            wanted = split == "train" or args.eval_iters > 0
            if not split_data.sources or not wanted:
                loaders.append(None)
                continue
            if split not in self._planners:
                self._planners[split] = self._planner(split, split_data, first_steps[split])
            dataset = DocumentDataset(
                split,
                split_data,
                cp_rank=mpu.get_context_parallel_rank(),
                is_first=is_first,
                is_last=is_last,
                mmap=args.mmap_bin_files,
                thd=self.attention_options is None,
            )
            workers = args.num_workers if is_first or is_last else 0  # others read nothing
            exit_signal = args.exit_signal if args.exit_signal_handler else None
            loaders.append(data.loader(dataset, self._planners[split], first_steps[split], workers, exit_signal))
        train, valid, test = loaders
        return train, valid, test

    dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank gets iterators

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        """Forward one micro-batch."""
        with training.stimer(bdata=True):  # --log-straggler
            batch = next(data_iterator).to(self._device)
        positions = batch.metadata.positions
        name = f"wlb {batch.split} step {batch.step}: {positions.numel()} of {batch.padded_tokens} tokens"
        thd = batch.thd.packed_seq_params() if batch.thd is not None else None
        with training.stimer, torch.profiler.record_function(name), self._telemetry.forward(batch, model):
            output = model(
                batch.tokens,
                positions.unsqueeze(0),
                None,
                labels=batch.labels,
                packed_seq_params=WlbPackedSeqParams(wlb=batch.metadata, thd=thd),
            )
        # Summed over N micro-batches and CP ranks: the N x --seq-length tokens that a step has on average.
        mean = self._args.seq_length // self._args.context_parallel_size if self._config.weight_gradients else None
        return output, functools.partial(token_loss, self._args, batch.loss_mask, divisor=mean)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The scoped replacements in upstream that training needs."""
        with (
            compat.replaced(training, "get_forward_backward_func", self._planned_forward_backward, ()),
            compat.replaced(training, "training_log", self._logged, ("loss_dict", "total_loss_dict", "iteration")),
            compat.replaced(
                training, "num_floating_point_operations", self._throughput.counted, ("args", "batch_size")
            ),
            compat.replaced(checkpointing, "maybe_save_dataloader_state", self._saved, ("train_iterator", "iteration")),
            compat.replaced(TorchFullyShardedDataParallel, "scale_gradients", scale_sharded, ("scaling_factor",)),
            compat.whole_router_losses(),
            compat.whole_tracker(),
        ):
            yield

    # Where we step in -------------------------------------------------------------------------------------------------

    def _planned_forward_backward(self, original: Any) -> Any:
        """Schedules of upstream, each call with a communicator that knows the lengths of its micro-batches."""

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            return functools.partial(self._forward_backward, original(*args, **kwargs))

        return get_forward_backward_func

    def _forward_backward(self, schedule: Any, *, data_iterator: Any, model: Any, num_microbatches: int, **rest: Any):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        # The first batch says which step it is; a replay (rerun state machine) hands out the same batches again.
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        batches = [next(iterator) for iterator in iterators]
        first = batches[0]
        feeds = [
            _of_step(first, batch, iterator, num_microbatches)
            for batch, iterator in zip(batches, iterators, strict=True)
        ]
        planner = self._planners[first.split]
        planner.release(first.step - 1)  # upstream may save in the middle of a step
        if first.split == "train":
            self._last_step, self._began = first.step, began
            if first.step == self._first_step or first.step % self._config.digest_interval == 0:
                self._compare_digests(first.step)
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            # Every stage knows all lengths before its first receive.
            tokens = [m.padded_tokens for m in planner.get(first.step).micro_batches]
            rest["p2p_communicator"] = self._communicator(model, tokens)
            rest["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
        return schedule(
            data_iterator=feeds if isinstance(data_iterator, list) else feeds[0],
            model=model,
            num_microbatches=num_microbatches,
            **rest,
        )

    def _communicator(self, model: Any, tokens: list[int]) -> PlannedP2PCommunicator:
        args = self._args
        return PlannedP2PCommunicator(
            mpu.get_pipeline_model_parallel_group(),
            get_model_config(model[0] if isinstance(model, list) else model),
            tokens,
            args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1),
            self._config.check_shapes,
        )

    def _compare_digests(self, step: int) -> None:
        """Raise RuntimeError on every rank if any two planned differently."""
        digest = self._planners["train"].get(step).digest
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        highest, lowest = int(extremes[0]), -int(extremes[1])
        if highest != lowest:
            raise RuntimeError(
                f"ranks planned step {step} differently (this rank {digest:016x}; lowest {lowest:016x}, highest "
                f"{highest:016x}): check that all nodes have the same dataset files, flags and megatron_wlb version"
            )

    def _logged(self, original: Any) -> Any:
        """Upstream's log line, then ours; only the last rank has the loss."""

        @functools.wraps(original)
        def training_log(loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args, **kwargs):  # type: ignore[no-untyped-def]
            # Upstream adds up and clears the losses that it is given, so read ours first.
            last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            wanted = self._telemetry.wants(iteration) or iteration % self._args.log_interval == 0 or self._config.log
            loss = float(loss_dict["lm loss"]) if last and wanted else None
            took = time.perf_counter() - self._began  # on a GPU, too: to read the loss waits for all of the step
            with self._throughput.line(total_loss_dict):
                result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
            planner = self._planners["train"]
            if self._config.document_log and torch.distributed.get_rank() == 0:
                begins_anew = self._begins_anew and iteration - 1 == self._first_step
                packing = planner.get(iteration - 1).packing
                document_log.append(self._config.document_log, iteration - 1, packing, begins_anew=begins_anew)
            imbalance = self._telemetry.imbalance(iteration)
            if loss is not None:
                plan = planner.get(iteration - 1)
                waited, self._waited = planner.wait_seconds - self._waited, planner.wait_seconds
                entry = log.summary(plan, loss, took, waited)
                if iteration % self._args.log_interval == 0:
                    print(log.line(entry), flush=True)
                if self._config.log:
                    layout = self._layout | {"packing": self._config.packing}
                    log.append(self._config.log, entry | log.details(plan, self._kernel, layout))
                self._telemetry.write(iteration, plan, entry, imbalance)
            return result

        return training_log

    def _saved(self, original: Any) -> Any:
        """Save the packer with the model; upstream marks the checkpoint complete only after this."""

        @functools.wraps(original)
        def maybe_save_dataloader_state(train_iterator: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
            if torch.distributed.get_rank() == 0:
                # By the iteration, not by what ran last: a step that failed validation is saved as one still to come.
                trained = iteration > self._first_step
                state = self._planners["train"].get(iteration - 1).state if trained else self._initial_state
                checkpoint.save_state(self._args.save, iteration, state, self._layout)

        return maybe_save_dataloader_state

    def _trained_lengths(self) -> np.ndarray:
        assert self._last_step is not None
        lengths: np.ndarray = self._planners["train"].get(self._last_step).packing.documents["length"]
        return lengths

    # How the plan is made ---------------------------------------------------------------------------------------------

    @property
    def _kernel(self) -> KernelModel:
        model, tp_size = self._memory.model, self._args.tensor_model_parallel_size
        return self._profile.layer_kernel(
            model,
            tp_size=tp_size,
            bytes_per_value=self._args.params_dtype.itemsize,
            head_groups=head_groups(self._config.cp_head_groups, model.heads_per_rank(tp_size)[1]),
        )

    def _planner(self, split: str, split_data: SplitData, first_step: int) -> Planner:
        args, config = self._args, self._config
        training_split = split == "train"
        num_micro_batches = args.global_batch_size if training_split else args.eval_global_batch_size
        packing = config.packing if training_split else "original"
        stream = DocumentStream(
            split_data.sources, seed=args.seed + data.SPLITS.index(split), context_length=args.seq_length
        )
        packer = make_packer(
            stream,
            num_micro_batches=num_micro_batches,
            crossover_tokens=self._crossover,
            policy=packing,
            max_tokens=self._max_tokens,
            fingerprint=split_data.fingerprint,
            use_native=self._use_native,
            **config.policy_settings(args.seq_length),
        )
        if training_split:
            self._first_step = first_step
            self._layout = run_layout(args, config, max_tokens=self._max_tokens, crossover=self._crossover)
            self._begins_anew = resume(packer, args, config, first_step, self._layout)
            self._initial_state = packer.state()
            if config.document_log and torch.distributed.get_rank() == 0:
                document_log.mend(config.document_log)
            self._announce(split_data, num_micro_batches)
        else:
            for _ in range(first_step):
                packer.next()
        layout = Layout(
            dp_size=mpu.get_data_parallel_world_size(),
            dp_rank=mpu.get_data_parallel_rank(),
            cp_size=args.context_parallel_size,
            pp_size=args.pipeline_model_parallel_size,
            vp_size=args.virtual_pipeline_model_parallel_size or 1,
            unit_tokens=self._unit,
            cp_sharding=config.cp_sharding,
            kernel=self._kernel,
            crossover_tokens=self._crossover,
            balance=packing != "original",
            free_order=is_order_free(packing, config.cp_sharding),
            use_native=self._use_native,
        )
        return Planner(packer, layout, first_step=first_step, ahead=config.plan_ahead)

    def _announce(self, split_data: SplitData, num_micro_batches: int) -> None:
        config = self._config
        documents = sum(len(s.pairs) for s in split_data.sources)
        short = sum(s.too_short for s in split_data.sources)
        why_not = "" if native.AVAILABLE else f": the native core {native.WHY_NOT}"
        core = "native" if self._use_native else f"python{why_not}"
        detail = "".join(f"{name} {value}, " for name, value in packing_settings(self._args, config).items())
        print_rank_0(
            f"> wlb: {documents} documents ({short} under 2 tokens are left out), packing {config.packing} ({core}) "
            f"into {num_micro_batches} micro-batches a step, window {self._args.seq_length}, S_max {self._max_tokens}, "
            f"{detail}crossover {self._crossover} tokens, CP sharding {config.cp_sharding}"
        )
        peaks = self._memory.peak_bytes_of_stages(self._max_tokens, self._micro_batches_per_rank())
        print_rank_0(
            "> wlb: activations by stage, predicted peak if every micro-batch had S_max tokens: "
            + ", ".join(f"{peak / 2**30:.2f}" for peak in peaks)
            + " GiB"
        )
        backend = options.backend.name if (options := self.attention_options) else "megatron"
        chosen = str(choose_backend(self._device.type)) if config.attention_backend == "auto" else backend
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self._args.params_dtype]
        other = self._profile.differences(head_size=self._args.kv_channels, dtype=dtype, backend=backend)
        measured = f" (measured with {other})" if other else ""
        print_rank_0(f"> wlb: attention backend {chosen}, profile {self._profile.name}{measured}")


def _of_step(first: Batch, batch: Batch, others: Iterator[Batch], count: int) -> Iterator[Batch]:
    """`batch` and `count` - 1 `others`; all must be of the step of `first`."""
    for i in range(count):
        if i:
            batch = next(others)
        if (batch.step, batch.split) != (first.step, first.split):
            raise RuntimeError(
                f"micro-batches of {batch.split} step {batch.step} in {first.split} step {first.step}: the data "
                "iterators are apart; report it, with the flags"
            )
        yield batch
