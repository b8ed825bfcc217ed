"""Runs upstream Megatron on gloo without a GPU, for development, demo and tests.

`install()` redirects Megatron's "cuda" calls to the CPU. Call it before megatron is imported.
`torch.cuda.is_available()` stays False, so such a run is not mistaken for a GPU run.
"""

import functools
import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from megatron_wlb.adapter.cpu import linear
from megatron_wlb.adapter.upstream.versions import upstream

FLAGS = (
    "--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-rope-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion"
).split()
"""Upstream flags that a run without a GPU needs."""

_FACTORIES = "empty zeros ones full tensor as_tensor arange linspace eye rand randn randint empty_like zeros_like"
_NOTHING = "set_device synchronize set_stream _lazy_init"


class _Stream:
    """A stream or event that does nothing: everything on the CPU runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __exit__(self, *args: Any) -> None: ...
    def __enter__(self, *args: Any) -> "_Stream":
        return self

    wait_stream = wait_event = wait = record = record_event = synchronize = __enter__


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or (isinstance(device, str | torch.device) and str(device).startswith("cuda"))


def _on_cpu(function: Any, place: int | None = None) -> Any:
    """Wrap a function that takes `device`, or a device as its argument at `place`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if i == place and _is_cuda(x) else x for i, x in enumerate(args))
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Megatron's optimizer groups parameters by names such as "torch.cuda.FloatTensor".
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype, *args, **kwargs)

    return call


def install() -> None:
    """Redirect Megatron's CUDA calls to the CPU. Raises RuntimeError if it is too late."""
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU; run Megatron on it")
    if any(name.split(".")[0] == "megatron" for name in sys.modules):
        raise RuntimeError("megatron was imported before adapter.cpu.install(); import it afterwards")
    # Upstream's fusions use torch.compile, which would trace the stand-ins below. Import dynamo before they are set: it
    # reads the torch functions at import.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    importlib.import_module("torch._dynamo")

    sys.modules.update(dict.fromkeys(linear.STANDS_FOR, linear))
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to, place=1)  # type: ignore[method-assign]
    torch.Tensor.new_empty = _on_cpu(torch.Tensor.new_empty)  # type: ignore[method-assign]
    torch.Tensor.type = _tensor_type(torch.Tensor.type)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment]

    stream = _Stream()
    properties = SimpleNamespace(major=9, minor=0, total_memory=1 << 36, multi_processor_count=1, name="cpu")
    # A separate function for each name: torch.compile finds its rule through the function's name.
    replacements: dict[str, Any] = {name: lambda *args, **kwargs: None for name in _NOTHING.split()}
    replacements |= {
        "device_count": lambda: 1,  # upstream builds no parallel groups at 0
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: _Stream(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,),
        "is_initialized": lambda: True,
        "_lazy_call": lambda function, **kwargs: function(),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]


def install_megatron() -> None:
    """Patch upstream where it requires CUDA, between `install` and `pretrain`."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.training import initialize, training

    initialize._initialize_tp_communicators = lambda: None  # user buffers of TransformerEngine
    # Upstream converts the split sizes of an all-to-all to numbers while it copies them from the GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **rest: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )
    # From 0.20 on, MTP layers check for a class that is missing without TransformerEngine.
    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False
    # Fork the checkpoint writer: a process of upstream's fork server would lack the changes of `install`.
    worker = PersistentAsyncCaller._get_process.__func__
    PersistentAsyncCaller._get_process = classmethod(
        lambda cls, rank, mp_mode="", *rest, **options: worker(cls, rank, "fork", *rest, **options)
    )
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    if not upstream().passes_functions:  # linear layers train from 0.19 on
        linear.install()
