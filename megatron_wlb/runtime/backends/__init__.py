"""Attention backends: forward and backward of one call, and the one place that chooses between them."""

import functools
from dataclasses import dataclass

import torch

from megatron_wlb.runtime.backends.aten import AtenBackend
from megatron_wlb.runtime.backends.checks import check_value_size
from megatron_wlb.runtime.backends.cpu import CpuBackend
from megatron_wlb.runtime.backends.flash_attn import FlashAttn3Backend, FlashAttnBackend
from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, owned, side_by_side
from megatron_wlb.runtime.backends.reference import ReferenceBackend
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.backends.trial import HEAD_SIZES, try_backend
from megatron_wlb.runtime.backends.triton import TritonBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "Choice",
    "KernelArgs",
    "check_value_size",
    "choose_backend",
    "get_backend",
    "keys_and_values",
    "owned",
    "side_by_side",
]

BACKENDS: dict[str, type[Backend]] = {
    "aten": AtenBackend,
    "flash_attn": FlashAttnBackend,
    "flash_attn_3": FlashAttn3Backend,
    "te": TeBackend,
    "triton": TritonBackend,
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}
_HOPPER = (9, 0)
_PREFERENCE = {"cuda": ("aten", "flash_attn", "te", "triton"), "cpu": ("cpu",)}
_PREFERENCE_ON_HOPPER = ("flash_attn_3", "te", "aten", "flash_attn", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The backend that "auto" chose."""

    name: str
    refused: tuple[tuple[str, str], ...]
    """Backends that would have come first, each with why it did not."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.refused)
        return f"{self.name} ({reasons})" if reasons else self.name


@functools.cache
def choose_backend(device_type: str, head_sizes: tuple[int, int]) -> Choice:
    """The backend of "auto": the first in order of preference that computes the right thing on a small call here, with
    keys and values of these head sizes.

    Tried once per process, without a word between ranks: on the same machine image all come to the same. On Hopper and
    later (compute capability 9.0) the kernels written for it come first:

    1. flash_attn_3; te (cuDNN), but last where deterministic gradients are asked for, which take much memory there;
    2. aten, flash_attn: FlashAttention-2, from torch and from its package;
    3. triton: needs no package, and nobody has tuned it.

    Other GPUs have the same without FlashAttention-3, and those before Hopper te after 2. The order is reasoned, not
    measured: none of it has run on a GPU. Raises ValueError where nothing works.
    """
    refused: list[tuple[str, str]] = []
    for name in _preference(device_type):
        try:
            check_value_size(BACKENDS[name], head_sizes)
            try_backend(BACKENDS[name](), torch.device(device_type), head_sizes)
        except Exception as error:  # what a broken installation raises is anyone's guess
            refused.append((name, str(error).strip().split("\n")[0] or type(error).__name__))
        else:
            return Choice(name=name, refused=tuple(refused))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused) or "none is made for it"
    raise ValueError(
        f"no attention backend works on device {device_type!r} ({reasons}); install what one of them needs, or use "
        "another device"
    )


def _preference(device_type: str) -> tuple[str, ...]:
    if device_type != "cuda" or torch.cuda.get_device_capability() < _HOPPER:
        return _PREFERENCE.get(device_type, ())
    if torch.are_deterministic_algorithms_enabled():
        return (*(name for name in _PREFERENCE_ON_HOPPER if name != "te"), "te")
    return _PREFERENCE_ON_HOPPER


def get_backend(name: str, device: torch.device | str, head_sizes: tuple[int, int] = HEAD_SIZES) -> Backend:
    """The backend `name`, or for "auto" that of `choose_backend`. `head_sizes` are of keys and values.

    Raises ValueError for an unknown name and for a backend that cannot run on `device`, with what is installed, or with
    values of another size than keys.
    """
    device = torch.device(device)
    choices = ", ".join(("auto", *BACKENDS))
    if name == "auto":
        name = choose_backend(device.type, head_sizes).name
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; choose one of {choices}")
    backend = BACKENDS[name]
    if device.type not in backend.device_types:
        runs_on = " and ".join(backend.device_types)
        raise ValueError(
            f"attention backend {name!r} is not available on device {str(device)!r}: it runs on {runs_on}; "
            f"choose one of {choices}"
        )
    check_value_size(backend, head_sizes)
    return backend()
