"""The triton backend without a GPU: its kernels under triton's interpreter, and compiled for GPUs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_wlb.runtime.backends.triton import TritonBackend, _sizes
from tests.runtime.calls import CALLS, WINDOWS, check

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: torch's Linux builds bring it, elsewhere pip install triton where there is one",
)


def in_another_process(arguments, tmp_path, **environment):
    """stdout of python with these arguments; fails where it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_kernels_under_the_interpreter(tmp_path):
    tests = str(Path(__file__).with_name("interpreted_triton.py"))
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", tests]
    output = in_another_process(command, tmp_path, TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", output)[1]) >= 2 * len(CALLS) + len(WINDOWS)


@needs_triton
def test_kernels_compile_for_gpus(tmp_path):
    """Their PTX assembles, and the shared memory that they need is there: 163 KiB on A100, 227 KiB on H100."""
    output = in_another_process(["-c", COMPILE], tmp_path, TRITON_INTERPRET="0")
    sizes = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert len(sizes) == 6
    assert all(size <= {80: 163, 90: 227}[capability] << 10 for capability, size in sizes)


COMPILE = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_wlb.runtime.backends import triton_kernels
from megatron_wlb.runtime.backends.triton import _sizes

for capability, *head_sizes in ((80, 128, 128), (90, 192, 128)):
    shapes = zip((8, 2, 2), (head_sizes[0], *head_sizes))
    sizes = _sizes(*(torch.empty(1, *shape, dtype=torch.bfloat16) for shape in shapes))
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dq"), "*bf16") | {"scale": "fp32"}
    types |= dict.fromkeys(("lse", "delta", "dk", "dv"), "*fp32") | dict.fromkeys(("cu_q", "cu_k"), "*i32")
    types |= dict.fromkeys(sizes, "constexpr")
    for kernel in (triton_kernels.forward_kernel, triton_kernels.dq_kernel, triton_kernels.dkv_kernel):
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        constants = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert not re.search(r"muli .*tensor<\\d+x1xi32>", compiled.asm["ttir"]), "offsets in 32 bits"
        print(capability, compiled.metadata.shared)
"""


@needs_triton
def test_no_kernel_is_compiled_again_for_another_micro_batch():
    """What differs between micro-batches: sizes, and where cu_q and cu_k begin in the buffer of the metadata."""
    from megatron_wlb.runtime.backends import triton_kernels

    for kernel in (triton_kernels.forward_kernel, triton_kernels.dq_kernel, triton_kernels.dkv_kernel):
        parameters = {p.name: p for p in kernel.params}
        assert all(parameters[name].do_not_specialize for name in ("entries", "num_queries", "window", "causal"))
        assert all(parameters[name].do_not_specialize_on_alignment for name in ("cu_q", "cu_k"))


@pytest.mark.parametrize("head_size", range(8, 257, 8))
def test_blocks_of_every_head_size(head_size):
    for dtype in TritonBackend.dtypes:
        sizes = _sizes(*(torch.empty(1, heads, head_size, dtype=dtype) for heads in (6, 2, 2)))
        assert sizes["D"] == head_size <= sizes["D_PAD"] and sizes["D_PAD"] & (sizes["D_PAD"] - 1) == 0
        assert sizes["GROUP"] == 3 and sizes["BLOCK_Q"] >= 16 and sizes["BLOCK_K"] >= 16


@needs_triton
@pytest.mark.parametrize("head_size", [12, 264])
def test_head_sizes_that_are_refused(head_size):
    with pytest.raises(ValueError, match=f"'triton' cannot run head size {head_size}: it must be a multiple of 8"):
        check(TritonBackend(), CALLS["square"], head_size=head_size, dtype=torch.float16)


def test_triton_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megatron_wlb.runtime.backends.triton_kernels", raising=False)
    with pytest.raises(ValueError, match="attention backend 'triton' needs triton, which cannot be imported"):
        TritonBackend()
