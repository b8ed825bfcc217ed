"""Triton's kernels in a rehearsal: launched, not compiled."""

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch


def install(launch: Callable[..., Any]) -> None:
    """Make Triton call `launch` with the arguments of the driver's cuLaunchKernel, the stream among them.

    The kernels of fla have grids by numbers that the device computes; these are computed on the host.
    """
    from triton.runtime import autotuner, jit  # type: ignore[import-untyped]

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(kernel, autotuner.Autotuner):
            kernel.best_config = kernel.configs[0]  # which callers read
        launch(None, *6 * [1], 0, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), None, None)

    jit.JITFunction.run = autotuner.Autotuner.run = run
    with contextlib.suppress(ImportError):
        # What upstream's gated delta nets import; where they have it from each has a name of its own for it.
        cached = importlib.import_module("fla.utils").tensor_cache
        importlib.import_module("fla.modules.convolution")
        importlib.import_module("fla.ops.gated_delta_rule")
        given: Any = importlib.import_module("fla.ops.utils.index").prepare_chunk_indices

        @cached
        def prepare_chunk_indices(cu_seqlens: Any, chunk_size: int, cu_seqlens_cpu: Any = None) -> Any:
            return given(cu_seqlens.cpu(), chunk_size).to(cu_seqlens.device, non_blocking=True)

        for name, module in [*sys.modules.items()]:
            if name.startswith("fla.") and vars(module).get("prepare_chunk_indices") is given:
                vars(module)["prepare_chunk_indices"] = prepare_chunk_indices
