"""Attention backends, which run forward and backward of a call, and their choice."""

import functools
from dataclasses import dataclass

import torch

from megatron_wlb.runtime.backends.cpu import CpuBackend
from megatron_wlb.runtime.backends.flash import AtenBackend, FlashAttn3Backend
from megatron_wlb.runtime.backends.protocol import Backend, check_value_size
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.reference import HEAD_SIZES, try_backend

BACKENDS: dict[str, type[Backend]] = {
    "aten": AtenBackend,
    "flash_attn_3": FlashAttn3Backend,
    "te": TeBackend,
    "cpu": CpuBackend,
}
OF_MEGATRON = {"flash": ("flash_attn_3", "aten"), "fused": ("te",)}
"""Backends by Megatron's `--attention-backend`: FlashAttention, or cuDNN as TransformerEngine calls it; auto: any."""
_PREFERENCE = {"cuda": ("aten", "te"), "cpu": ("cpu",)}
_PREFERENCE_ON_HOPPER = ("flash_attn_3", "te", "aten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    name: str
    refused: tuple[tuple[str, str], ...]
    """Preferred backends that do not work here, each with the reason."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.refused)
        return f"{self.name} ({reasons})" if reasons else self.name


@functools.cache
def choose_backend(device_type: str, head_sizes: tuple[int, int], asked: str = "auto") -> Choice:
    """Return the first preferred backend that computes a small call correctly here.

    `asked` is Megatron's `--attention-backend`, which chooses between kernels of GPUs. Keys and values have
    `head_sizes`. Every rank tries for itself: the same machine image gives the same choice. From compute capability 9.0
    on, kernels written for it come first, te last with deterministic gradients, which take much memory there. The order
    is reasoned, not measured. Raises ValueError if no backend works.
    """
    refused: list[tuple[str, str]] = []
    among = OF_MEGATRON.get(asked, ()) if device_type == "cuda" else ()
    for name in (each for each in _preference(device_type) if not among or each in among):
        try:
            check_value_size(BACKENDS[name], head_sizes)
            try_backend(BACKENDS[name](), torch.device(device_type), head_sizes)
        except Exception as error:  # what a broken installation raises is anyone's guess
            refused.append((name, str(error).strip().split("\n")[0] or type(error).__name__))
        else:
            return Choice(name=name, refused=tuple(refused))
    reasons = "; ".join(f"{name}: {why}" for name, why in refused) or "none is made for it"
    raise ValueError(
        f"no attention backend works on device {device_type!r} ({reasons}); install the package of one of them, or use "
        "another device"
    )


def _preference(device_type: str) -> tuple[str, ...]:
    if device_type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        return _PREFERENCE.get(device_type, ())
    if torch.are_deterministic_algorithms_enabled():
        return (*(name for name in _PREFERENCE_ON_HOPPER if name != "te"), "te")
    return _PREFERENCE_ON_HOPPER


def get_backend(name: str, device: torch.device | str, head_sizes: tuple[int, int] = HEAD_SIZES) -> Backend:
    """Return the backend `name`, or for "auto" the one of `choose_backend`.

    Key and value heads have `head_sizes`. Raises ValueError for an unknown name, a missing package, and a device or
    head sizes that the backend lacks.
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
