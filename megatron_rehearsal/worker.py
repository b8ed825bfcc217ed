"""Ranks of a rehearsal, with the stand-in loaded: `python -m megatron_rehearsal.worker TASK.json`.

Each runs the job's script in a fork, since imports take longer than most ranks, and as many at a time as
there are processors. Standard output has a line "RANK STATUS" for each that has ended.
"""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import os
import runpy
import sys
import tempfile
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_rehearsal import allowed, kernels, world
from megatron_rehearsal.experts import Experts
from megatron_rehearsal.task import Gpu, Task
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.simulate import memory

_DATA = "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path".split()
_UNSET = (
    "save load pretrained_checkpoint save_interval tensorboard_dir wandb_project tokenizer_model train_samples "
    "lr_decay_samples lr_decay_iters lr_warmup_fraction exit_duration_in_mins exit_interval logits_save_dir "
    "non_persistent_save_interval save_activations_interval save_dgrads_interval save_wgrads_interval "
    "save_params_interval save_tokens_per_expert_interval moe_routing_trace_path ckpt_convert_format"
).split()
_OFF = (
    "exit_signal_handler check_for_nan_in_loss_and_grad log_throughput record_memory_history profile log_progress "
    "log_straggler run_workload_inspector_server enable_one_logger adlr_autoresume use_cpu_initialization"
).split()
"""Switches whose files, addresses or values a rehearsal does not have."""


class Watch:
    """Knows where the job is: the source line and the pass that ask the stand-in for something."""

    def __init__(self, gpu: Gpu) -> None:
        self._lines: dict[tuple[str, str], int] = {}
        self.at = "start"
        here = (str(Path(__file__).parent), "/torch/", "<", "contextlib.py", "functools.py", "typing_extensions.py")
        self._passes_on = functools.cache(lambda name: any(part in name for part in here))
        self.native = ctypes.CDLL(None)
        self.asked = ctypes.CFUNCTYPE(ctypes.c_int)(self._where)  # kept: the stand-in calls it
        sizes = (*gpu.capability, gpu.processors, gpu.shared_bytes, gpu.l2_bytes)
        size = ctypes.c_uint64(int(gpu.gib * 2**30))
        self.native.rehearsal_configure(f"rehearsed {gpu.name}".encode(), size, *sizes)

    def lines(self) -> list[tuple[str, str]]:
        """End the log. Returns source lines and passes, by the index that records have."""
        self.native.rehearsal_end()
        return [*self._lines]

    def _where(self) -> int:
        frame: Any = sys._getframe(1)
        while frame is not None and self._passes_on(frame.f_code.co_filename):
            frame = frame.f_back
        line = "torch"  # a thread of autograd, with nothing of Python above it
        if frame is not None:
            parts = Path(frame.f_code.co_filename).parts
            first = next((i for i, part in enumerate(parts) if part.startswith("megatron")), len(parts) - 1)
            if "site-packages" in parts:
                first = parts.index("site-packages") + 1
            line = f"{'/'.join(parts[first:])}:{frame.f_lineno}"
        return self._lines.setdefault((line, self.at), len(self._lines))


def main() -> None:
    """Import the packages of a job, then run each rank in a fork."""
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    allowed.confine(task.folder)
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        apex: Any = ModuleType("fused_weight_gradient_mlp_cuda")  # of which upstream's layers call two functions
        apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = lambda x, gradient, weight_gradient: None
        sys.modules[apex.__name__] = apex
    if os.path.isfile(task.script[-1]) and not task.stated:  # as torchrun has it; a checkout's own megatron comes first
        sys.path.insert(0, os.path.dirname(os.path.abspath(task.script[-1])))
    watch = Watch(task.gpu)
    store = world.install(task.world_size)
    # Imported once for all ranks.
    kernels.install(watch.native.cuLaunchKernel)
    from megatron.core.tokenizers.text import text_tokenizer  # noqa: F401
    from megatron.training import training  # noqa: F401

    if task.wlb:
        from megatron_wlb.adapter import training as ours  # noqa: F401

    waiting, running = [*reversed(task.ranks)], dict[int, int]()
    while waiting or running:
        if waiting and len(running) < len(os.sched_getaffinity(0)):
            rank = waiting.pop()
            if not (child := os.fork()):
                _run(task, rank, watch, store)
            running[child] = rank
        else:
            child, status = os.wait()
            print(running.pop(child), os.waitstatus_to_exitcode(status), flush=True)


def _run(task: Task, rank: int, watch: Watch, store: Any) -> None:
    """Run a rank, write its results, and end at once: the stand-in needs no orderly exit."""
    said = os.open(Path(task.folder, f"{rank}.txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 2)
    os.dup2(said, 1)  # losses and other values mean nothing
    os.environ["RANK"] = str(rank)
    watch.native.rehearsal_begin(os.fsencode(Path(task.folder, f"{rank}.log")), watch.asked)
    run, status = Run(task, rank, watch), 0
    try:
        run.run()
    except BaseException as error:
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # of an assert without words
        run.result["error"] = f"{type(error).__name__}: {why}"
        traceback.print_exc()
        status = 1
    run.result |= {"lines": watch.lines(), "communicators": store.communicators()}
    Path(task.folder, f"{rank}.json").write_text(json.dumps(run.result))
    sys.stderr.flush()
    os._exit(status)


class Run:
    """A rank of the job, and its result."""

    def __init__(self, task: Task, rank: int, watch: Watch) -> None:
        self._task, self._watch = task, watch
        self._planned: dict[str, Any] = {}
        """Of the running step, with `--wlb`: tokens of micro-batches, and the predictions of the memory model."""
        self._passes: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._most, self._kept = [0, 0], 0
        self._experts = Experts()
        self.result: dict[str, Any] = {"rank": rank, "steps": [], "passes": [], "weights": 0, "left_out": []}

    def run(self) -> None:
        """Run the job's script with few steps, so that it leaves no traces."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.optimizer import clip_grads, optimizer
        from megatron.core.pipeline_parallel import combined_1f1b, schedules
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.training import arguments, training

        from megatron_wlb.adapter.upstream.helpers import prebuilt_dataset_helpers

        replacements: list[tuple[Any, ...]] = [
            (MoEAlltoAllTokenDispatcher, "preprocess", self._experts.preprocess, "routing_map"),
            *((module, "get_grad_norm_fp32", _norm) for module in (clip_grads, optimizer)),
            (arguments, "parse_args", self._parse),
            (training, "train_step", self._step, "data_iterator"),
            (schedules, "forward_step", functools.partial(self._pass, "forward")),
            (schedules, "backward_step", functools.partial(self._pass, "backward")),
            (combined_1f1b, "combined_forward_backward_step", functools.partial(self._pass, "combined")),
            (BlendedMegatronDatasetBuilder, "build", _build),
        ]
        if self._task.wlb:
            from megatron_wlb.adapter.plans import Plans
            from megatron_wlb.runtime import backends

            # A package that is here is taken to compute correctly.
            replacements.append((backends, "try_backend", lambda *_: None, "backend"))
            replacements.append((Plans, "begin", self._begin, "split", "step"))
        with prebuilt_dataset_helpers(), contextlib.ExitStack() as stack:
            for each in replacements:
                stack.enter_context(_replaced(*each))
            self._run_script()

    def _run_script(self) -> None:
        first, *rest = self._task.script
        sys.argv = [first, *rest, *self._task.flags]
        if self._task.wlb and not rest:
            from megatron_wlb.adapter import script

            script.main()
        else:
            (runpy.run_module if rest else runpy.run_path)(first, run_name="__main__")

    def _parse(self, original: Any, extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
        parsers = []

        def provider(parser: Any) -> Any:
            parsers.append(extra_args_provider(parser) if extra_args_provider else parser)
            return parsers[0]

        options: Namespace = original(provider, ignore_unknown_args)
        taken, left_out = allowed.of_log(self._task.stated, options, parsers[0])
        vars(options).update(taken)
        changes = self._changes(options)
        self.result["left_out"] = sorted({*left_out} - changes.keys())
        if absent := changes.keys() - vars(options).keys():
            raise RuntimeError(f"this megatron-core has no argument {min(absent)}; adapt rehearsal")
        vars(options).update(changes, do_train=True)  # as rank 0 tells those that read no data
        return options

    def _changes(self, options: Namespace) -> dict[str, Any]:
        """Arguments that differ from the job's: fewer steps, no output, and no feature that reads values."""
        changes: dict[str, Any] = dict.fromkeys(_UNSET)
        changes |= {"train_iters": self._task.steps, "lr_warmup_samples": 0, "lr_warmup_iters": 0, "eval_iters": 0}
        changes |= {"vocab_size": self._task.vocab_size, "rerun_mode": "disabled", "data_cache_path": self._task.folder}
        if options.sft and not self._task.mock_data:
            del changes["tokenizer_model"]
        else:
            changes |= {"tokenizer_type": "NullTokenizer", "sft": False}
        changes |= dict.fromkeys(_OFF, False) | {"config_logger_dir": ""}
        if options.transformer_impl == "local":
            changes["apply_rope_fusion"] = False  # TransformerEngine's
        if self._task.wlb:
            changes |= {"wlb_log": None} | ({"wlb_sft_skip": None} if self._task.mock_data else {})
        if self._task.mock_data:
            changes |= {"mock_data": True, "num_workers": 0} | dict.fromkeys(_DATA)
        return changes

    def _begin(self, original: Any, plans: Any, split: str, step: int, *args: Any) -> Any:
        from megatron.core import parallel_state

        found = original(plans, split, step, *args)
        plan, job = found[0], plans.job(split, step)
        self._experts.begin(plan, job)
        stage, rank = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        tokens = [m.padded_tokens for m in plan.micro_batches]
        rows = np.array(tokens) / job.parallel.cp
        exchanged = (moved_rows(m.shards, job.model.widest)[rank] for m in plan.micro_batches)
        moved = [(received / n, sent / n) for n, (received, sent) in zip(rows, exchanged, strict=True)]
        # Upstream keeps some more between steps where experts overlap.
        weights = self._kept if job.overlaps_experts else memory.weight_bytes(job, stage)
        self._planned = {"tokens": tokens, "predicted": weights + memory.step_peak_bytes(job, stage, rows, moved)}
        return found

    def _pass(self, way: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        step = len(self.result["steps"])
        self._watch.at = f"step {step}, {way} {next(self._passes[way])}"
        self._experts.backward = way == "backward"
        done = original(*args, **kwargs)
        self.result["passes"].append([step, *self._peak()])
        return done

    def _peak(self) -> list[int]:
        """Return the peak of allocated and reserved bytes since the last call."""
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()  # of torch's allocator: user buffers
        peak = [torch.cuda.max_memory_allocated() + outside, torch.cuda.max_memory_reserved() + outside]
        self._most = [*map(max, self._most, peak)]
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        steps = self.result["steps"]
        self._peak()
        before, self._most = torch.cuda.memory_stats(), [0, 0]
        self._kept = before["allocated_bytes.all.current"]
        self._passes.clear()
        tensors = (each for chunk in args[2] for w in chunk.parameters() for each in (w, getattr(w, "main_grad", None)))
        storages = (each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor))
        self.result["weights"] = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        self._watch.at = f"step {len(steps)}"
        self._watch.native.rehearsal_mark()
        try:
            return original(*args, **kwargs)
        finally:
            self._watch.native.rehearsal_mark()
            self._peak()
            retries = torch.cuda.memory_stats()["num_alloc_retries"] - before["num_alloc_retries"]
            seen = {"retries": retries, "kept": self._kept, "allocated": self._most[0], "reserved": self._most[1]}
            steps.append(seen | self._planned)
            self._watch.at = f"after step {len(steps) - 1}"


def _replaced(module: Any, name: str, instead: Any, *parameters: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `instead` is called for `module.name`, with the original before its arguments."""
    from megatron_wlb.adapter.upstream.replaced import replaced

    def make(original: Any) -> Any:
        return functools.wraps(original)(lambda *args, **kwargs: instead(original, *args, **kwargs))

    return replaced(module, name, make, parameters)


def _build(original: Any, builder: Any) -> Any:
    """Build the index of the data as rank 0 does, in a folder that goes with this rank."""

    def first(get_rank: Any, group: Any = None) -> int:
        return 0 if group is None else get_rank(group)

    builder.config.fast_cache_load = builder.config.defer_npy_index_mmap = False
    with tempfile.TemporaryDirectory() as builder.config.path_to_cache, _replaced(torch.distributed, "get_rank", first):
        return original(builder)


def _norm(original: Any, *args: Any, **kwargs: Any) -> float:
    """Return a fixed gradient norm: upstream takes a root of values, which the stand-in's memory does not hold."""
    original(*args, **kwargs)
    return 2.0


if __name__ == "__main__":
    main()
