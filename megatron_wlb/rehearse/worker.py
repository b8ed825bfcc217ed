"""Ranks of a rehearsal, with the stand-in loaded: `python -m megatron_wlb.rehearse.worker TASK.json`.

Standard input names a rank a line. Each runs what the job's script runs, at once and in a fork, since imports take
longer than most ranks. Standard output has lines "RANK steps N" after every step, and "RANK ended STATUS".
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_wlb.rehearse.build import transformer_engine
from megatron_wlb.rehearse.task import Gpu, Task
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.simulate import memory

_OWN = ("rank", "local_rank", "world_size")
"""Arguments of a log that are of the rank that wrote it."""
_DATA = ("data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path").split()
_UNSET = (
    "save load pretrained_checkpoint save_interval tensorboard_dir wandb_project tokenizer_model train_samples "
    "lr_decay_samples lr_decay_iters lr_warmup_fraction exit_duration_in_mins exit_interval"
).split()
NORM = 2.0
"""The gradient norm: values are those of memory that nothing wrote to, and upstream takes a root of them."""


class _Device(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("bytes", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("major", "minor", "processors", "shared_bytes", "l2_bytes")),
    )


class Watch:
    """Knows where the job is: the source line and the pass that ask the stand-in for something."""

    def __init__(self, gpu: Gpu) -> None:
        self._lines: dict[tuple[str, str], int] = {}
        self.at = "start"
        library = ("contextlib.py", "functools.py", "typing_extensions.py")
        here = (str(Path(__file__).parent), os.sep + "torch" + os.sep, "<", *library)
        self._passes_on = functools.cache(lambda name: any(part in name for part in here))
        self._native = ctypes.CDLL(None)
        self._asked = ctypes.CFUNCTYPE(ctypes.c_int)(self._where)  # kept: the stand-in calls it
        device = _Device(
            f"rehearsed {gpu.name}".encode(),
            int(gpu.gib * 2**30),
            *gpu.capability,
            gpu.processors,
            gpu.shared_bytes,
            gpu.l2_bytes,
        )
        self._native.rehearsal_configure(ctypes.byref(device))

    def begin(self, log: Path) -> None:
        """Begin to write down what is asked for."""
        if self._native.rehearsal_begin(os.fsencode(log), self._asked):
            raise OSError(f"{log} cannot be written")

    def mark(self, value: int) -> None:
        """Write a mark into the log."""
        self._native.rehearsal_mark(ctypes.c_uint64(value))

    def lines(self) -> list[tuple[str, str]]:
        """End the log. Returns source lines and passes, by the index that records have."""
        self._native.rehearsal_end()
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
    """Import what a job needs, then run each rank that is named in a fork."""
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    os.environ |= {"WORLD_SIZE": str(task.world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHDYNAMO_DISABLE": "1"}
    watch = Watch(task.gpu)

    from megatron_wlb.rehearse import te, world

    store = world.install(task.world_size)
    te.install()
    # Imported once for all ranks.
    from megatron.core.tokenizers.text import text_tokenizer  # noqa: F401
    from megatron.training import training  # noqa: F401

    from megatron_wlb.adapter import training as ours  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if child := os.fork():
            _tell(1, int(line), "ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            os._exit(0)
        _run(msgspec.structs.replace(task, rank=int(line)), watch, store)


def _tell(file: int, rank: int, word: str, number: int) -> None:
    """Write a line at once: all ranks write to one pipe."""
    os.write(file, f"{rank} {word} {number}\n".encode())


def _run(task: Task, watch: Watch, store: Any) -> None:
    """Run a rank, write its results, and end at once: nothing of the stand-in is worth an orderly exit."""
    progress = os.dup(1)
    said = os.open(Path(task.folder, f"{task.rank}.txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 2)
    os.dup2(said, 1)  # losses and other values mean nothing
    os.environ["RANK"] = str(task.rank)
    watch.begin(Path(task.folder, f"{task.rank}.log"))
    run = Run(task, watch, store, progress)
    status = 0
    try:
        run.run()
    except BaseException as error:
        run.result["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        status = 1
    run.result |= {"lines": watch.lines(), **run.groups()}
    Path(task.folder, f"{task.rank}.json").write_text(json.dumps(run.result))
    sys.stderr.flush()
    os._exit(status)


class Run:
    """A rank of the job, and what is seen of it."""

    def __init__(self, task: Task, watch: Watch, store: Any, progress: int) -> None:
        self._task, self._watch, self._store, self._progress = task, watch, store, progress
        self._training: Any = None
        self._plan: Any = None
        self._passes = [0, 0]
        self._order = [np.empty((0, 2), int)] * 2
        self._most = [0, 0]
        self._sent: list[Any] = []
        self._exchanging = 0
        self._experts: Any = None
        self.result: dict[str, Any] = {"rank": task.rank, "steps": [], "passes": [], "weights": 0}

    def groups(self) -> dict[str, Any]:
        """Return process groups, and the keys of communicators."""
        from megatron_wlb.rehearse import world

        return {"groups": world.members(), "communicators": self._store.communicators}

    def run(self) -> None:
        """Run the job's script with few steps and without what leaves traces."""
        from megatron.core.optimizer import clip_grads, optimizer
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.training import arguments, checkpointing, training

        from megatron_wlb.adapter import compat, datasets, script
        from megatron_wlb.adapter import training as ours
        from megatron_wlb.adapter.plans import Plans
        from megatron_wlb.rehearse import experts
        from megatron_wlb.runtime import all_to_all, backends

        self._experts = experts.Experts()
        with contextlib.ExitStack() as stack:
            preprocess = self._experts.preprocess
            stack.enter_context(compat.replaced(MoEAlltoAllTokenDispatcher, "preprocess", preprocess, ("routing_map",)))
            for module in (clip_grads, optimizer):
                stack.enter_context(compat.replaced(module, "get_grad_norm_fp32", _norm, ()))
            stack.enter_context(compat.replaced(arguments, "parse_args", self._parsing, ()))
            stack.enter_context(compat.replaced(training, "train_step", self._step, ("data_iterator",)))
            stack.enter_context(compat.replaced(training, "save_checkpoint_and_time", _refused, ()))
            stack.enter_context(compat.replaced(checkpointing, "save_checkpoint", _refused, ()))
            stack.enter_context(compat.replaced(backends, "try_backend", _untried, ("backend",)))
            stack.enter_context(compat.replaced(all_to_all, "_all_to_all", self._exchange, ()))
            stack.enter_context(compat.replaced(schedules, "forward_step", self._passing(0), ()))
            stack.enter_context(compat.replaced(schedules, "backward_step", self._passing(1), ()))
            stack.enter_context(compat.replaced(datasets, "build", _built, ("args",)))
            stack.enter_context(compat.replaced(Plans, "begin", self._planned, ("step",)))
            stack.enter_context(compat.replaced(ours.Training, "__init__", self._made, ("args",)))
            sys.argv = [*self._task.script, *self._task.flags]
            if len(self._task.script) > 1:
                runpy.run_module(self._task.script[0], run_name="__main__")
            else:
                script.main()

    def _parsing(self, original: Any) -> Any:
        def parse_args(*args: Any, **kwargs: Any) -> Namespace:
            options: Namespace = original(*args, **kwargs)
            for name, value in self._task.stated.items():
                if name not in _OWN and hasattr(options, name) and str(value) != str(getattr(options, name)):
                    setattr(options, name, value)
            for name, value in self._changes(options).items():
                if not hasattr(options, name):
                    raise RuntimeError(f"this megatron-core has no argument {name}; adapt megatron_wlb.rehearse")
                setattr(options, name, value)
            return options

        return parse_args

    def _changes(self, options: Namespace) -> dict[str, Any]:
        """Arguments that differ from the job's: fewer steps, nothing written, nothing that reads values."""
        changes: dict[str, Any] = dict.fromkeys(_UNSET)
        changes |= {"train_iters": self._task.steps, "lr_warmup_samples": 0, "lr_warmup_iters": 0, "eval_iters": 0}
        changes |= {
            "exit_signal_handler": False,
            "tokenizer_type": "NullTokenizer",
            "vocab_size": self._task.vocab_size,
        }
        changes |= {"check_for_nan_in_loss_and_grad": False, "rerun_mode": "disabled", "log_throughput": False}
        if self._task.mock_data:
            changes |= {"mock_data": True, "num_workers": 0} | dict.fromkeys(_DATA)
        return changes

    def _made(self, original: Any) -> Any:
        def init(training: Any, *args: Any, **kwargs: Any) -> None:
            original(training, *args, **kwargs)
            self._training = training

        return init

    def _planned(self, original: Any) -> Any:
        def begin(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._plan = found[0]
            self._experts.begin(self._plan, self._training._job)
            ops = self._training._job.schedule(len(self._plan.micro_batches)).ops(self._stage())
            order = np.stack([ops["micro_batch"], ops["chunk"]], axis=1)
            self._order = [order[ops["backward"] == backward] for backward in (False, True)]
            return found

        return begin

    def _stage(self) -> int:
        pp: int = self._training._job.parallel.pp
        return self._task.rank // (self._task.world_size // pp)

    def _passing(self, backward: int) -> Any:
        return lambda original: functools.partial(self._pass, backward, original)

    def _pass(self, backward: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        number, self._passes[backward] = self._passes[backward], self._passes[backward] + 1
        of = self._order[backward][number : number + 1].tolist()
        said = f"of micro-batch {of[0][0]}, chunk {of[0][1]}" if of else number
        self._watch.at = f"step {len(self.result['steps'])}, {('forward', 'backward')[backward]} {said}"
        self._experts.backward, self._exchanging = bool(backward), 0
        done = original(*args, **kwargs)
        self.result["passes"].append([len(self.result["steps"]), *self._peak(), self._exchanging])
        return done

    def _peak(self) -> list[int]:
        """Return the peak of allocated and reserved bytes since the last call."""
        import torch

        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()  # of torch's allocator: user buffers
        peak = [torch.cuda.max_memory_allocated() + outside, torch.cuda.max_memory_reserved() + outside]
        self._most = [*map(max, self._most, peak)]
        torch.cuda.reset_peak_memory_stats()
        return peak

    def _exchange(self, original: Any) -> Any:
        def all_to_all(into: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.multiprocessing.reductions import StorageWeakRef

            storage = into.untyped_storage()
            self._sent = [(ref, size) for ref, size in self._sent if not ref.expired()]
            self._sent.append((StorageWeakRef(storage), storage.nbytes()))
            self._exchanging = max(self._exchanging, sum(size for _, size in self._sent))
            return original(into, *args, **kwargs)

        return all_to_all

    def _step(self, original: Any) -> Any:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            steps = self.result["steps"]
            self._peak()
            before, self._passes, self._most = _stats(), [0, 0], [0, 0]
            weights = [weight for chunk in args[2] for weight in chunk.parameters()]
            self.result["weights"] = _bytes([each for w in weights for each in (w, getattr(w, "main_grad", None))])
            self._watch.at = f"step {len(steps)}"
            self._watch.mark(len(steps))
            try:
                return original(*args, **kwargs)
            finally:
                self._watch.mark(len(steps))
                steps.append(self._seen(before))
                self._watch.at = f"after step {len(steps) - 1}"
                _tell(self._progress, self._task.rank, "steps", len(steps))

        return train_step

    def _seen(self, before: dict[str, int]) -> dict[str, Any]:
        after = _stats()
        seen: dict[str, Any] = {name: after[name] - before[name] for name in after} | {"kept": before["kept"]}
        self._peak()
        seen |= {"allocated": self._most[0], "reserved": self._most[1]}
        seen["tokens"] = [m.padded_tokens for m in self._plan.micro_batches] if self._plan else []
        seen["predicted"] = self._predicted()
        return seen

    def _predicted(self) -> float:
        """What the memory model says of the step that has run."""
        from megatron.core import parallel_state

        job, plan, stage = self._training._job, self._plan, self._stage()
        rank = parallel_state.get_context_parallel_rank()
        rows = np.array([m.padded_tokens for m in plan.micro_batches]) / job.parallel.cp
        exchanged = (moved_rows(m.shards)[rank] for m in plan.micro_batches)
        moved = [(received / n, sent / n) for n, (received, sent) in zip(rows, exchanged, strict=True)]
        peak = memory.step_peak_bytes(job, stage, rows, moved)
        return memory.weight_bytes(job, stage) + peak


def _stats() -> dict[str, int]:
    import torch

    stats = torch.cuda.memory_stats()
    names = {
        "kept": "allocated_bytes.all.current",
        "retries": "num_alloc_retries",
        "out_of_memory": "num_ooms",
        "allocator_syncs": "num_sync_all_streams",
    }
    return {ours: stats[theirs] for ours, theirs in names.items()}


def _bytes(values: list[Any]) -> int:
    """Return the bytes of tensors' storages, each once."""
    storages = [value.untyped_storage() for value in values if hasattr(value, "untyped_storage")]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _built(original: Any) -> Any:
    def build(args: Namespace, *rest: Any) -> Any:
        """Build the index of the data as rank 0 does, in a folder that goes with this rank."""
        from megatron_wlb.adapter import compat

        args.dataloader_fast_cache_load = args.dataloader_defer_npy_index_mmap = False
        alone = compat.replaced(importlib.import_module("torch.distributed"), "get_rank", lambda _: lambda *_: 0, ())
        with tempfile.TemporaryDirectory() as args.data_cache_path, alone:
            return original(args, *rest)

    return build


def _norm(original: Any) -> Any:
    def get_grad_norm_fp32(*args: Any, **kwargs: Any) -> float:
        original(*args, **kwargs)
        return NORM

    return get_grad_norm_fp32


def _untried(original: Any) -> Any:
    def try_backend(backend: Any, *args: Any) -> None:  # a package that is here is taken to compute correctly
        if backend.name == "te" and not transformer_engine():
            raise ValueError("TransformerEngine's compiled part is not installed")

    return try_backend


def _refused(original: Any) -> Any:
    def save(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a rehearsal writes no checkpoints: nothing was computed")

    return save


if __name__ == "__main__":
    main()
