"""Performance of a device with a generation of software: attention kernels, other rates, memory, network."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from megatron_wlb import files
from megatron_wlb.hardware.network import H100_NETWORK, Network, of_file
from megatron_wlb.settings import Count, Name, Rate, Share, Time, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """Time of varlen attention: launch + heads * (tile * N_t + query_tile * N_q + hidden * N_h).

    N_q counts query tiles of `tile_rows` rows, N_t the tiles of `tile_rows` x `tile_rows` that the causal mask leaves,
    N_h those that it hides where it is aligned to the bottom right.
    """

    tile_rows: int
    """A power of two."""
    launch: float
    tile: float
    query_tile: float
    hidden: float = 0.0
    heads: int = 1
    kv_chunks: int = 1
    """Chunks of K and V: one computes while the next is transferred."""
    exchange: float = 0.0
    """Exposed time per row of K and V gathered from all ranks."""
    window: int | None = None
    """Keys that a query sees before its own, for counts; None: all of its document."""

    def count(self, segments: np.ndarray) -> tuple[int, int]:
        """Return (N_t, N_q), summed over SEGMENT [n]."""
        tiles, query_tiles = self.tiles(segments)
        return int(tiles.sum()), int(query_tiles.sum())

    def tiles(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (N_t, N_q) per SEGMENT [n] against its keys [0, stop): int64 [n] each."""
        t, starts, stops = self.tile_rows, segments["start"], segments["stop"]
        q = stops - starts
        full = q // t
        # Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * t and sees ceil(that / t) key tiles.
        first = -(-(starts + t) // t)
        tiles, query_tiles = full * first + full * (full - 1) // 2 + (q % t > 0) * -(-stops // t), -(-q // t)
        if self.window is None:
            return tiles, query_tiles
        # It does not see the tiles before the first key of its first query: skipped + j of them, where that is over 0.
        skipped = (starts - self.window) // t
        rows = np.clip(query_tiles + np.minimum(skipped, 0), 0, None)
        return tiles - rows * np.maximum(skipped, 0) - rows * (rows - 1) // 2, query_tiles

    def hidden_tiles(self, segments: np.ndarray) -> np.ndarray:
        """Return the tiles that the mask hides per SEGMENT [n] against its keys [0, stop): int64 [n]."""
        t, (tiles, query_tiles) = self.tile_rows, self.tiles(segments)
        return query_tiles * -(-segments["stop"] // t) - tiles

    def count_shard(self, calls: Sequence[np.ndarray]) -> tuple[int, int, int, int]:
        """Return non-empty calls, N_t, N_q and N_h of a shard, all keys of a call at once.

        The mask of a call of whole documents is aligned to the top left. Windows are not measured.
        """
        late = [call for call in calls if self.window is None and call["start"].any()]
        hidden = sum(int(self.hidden_tiles(call).sum()) for call in late)
        return sum(len(call) > 0 for call in calls), *(self.count(np.concatenate(calls)) if calls else (0, 0)), hidden

    def time(self, launches: Any, tiles: Any, query_tiles: Any, hidden: Any = 0) -> Any:
        """Return the time of counts or arrays, with the operations of csrc/pieces.h."""
        tile_times = self.tile * tiles + self.query_tile * query_tiles + self.hidden * hidden
        return launches * self.launch + self.heads * tile_times

    def __add__(self, other: "KernelModel") -> "KernelModel":
        """The sum of both directions."""
        summed = {name: getattr(self, name) + getattr(other, name) for name in _TIMES}
        return replace(self, **summed)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Constants of one direction of `KernelModel`, in the profile's unit."""

    launch: Time
    tile: Time
    query_tile: Time
    hidden: Time = 0.0
    """Of a tile that a mask aligned to the bottom right hides, as with queries at the end of their keys."""

    def __post_init__(self) -> None:
        checked(self)

    def scaled(self, factor: float) -> "KernelTimes":
        """Return all times multiplied by `factor`."""
        return KernelTimes(**{name: factor * time for name, time in asdict(self).items()})


_TIMES = tuple(each.name for each in fields(KernelTimes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Of the software that runs kernels; None if it is not known, or there is none."""

    python: Name | None = None
    torch: Name | None = None
    cuda: Name | None = None
    cudnn: Name | None = None
    transformer_engine: Name | None = None
    flash_attn_3: Name | None = None

    def __post_init__(self) -> None:
        checked(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The inputs of predicted times, and a JSON file. Raises ValueError."""

    name: Name
    tile_rows: Annotated[int, Meta(ge=1, le=1 << 16)]
    """A power of two."""
    forward: KernelTimes
    backward: KernelTimes | None = None
    """None if not measured: `attention_backward` times forward."""
    fp8: tuple[KernelTimes, KernelTimes] | None = None
    """Forward and backward of attention in FP8, inputs already quantized; None if not measured."""
    linear_tflops: tuple[Rate, Rate] | None = None
    """TFLOP/s of a layer's matrix products, over all of its time without attention; forward and backward. None:
    `assumed_tflops`, and `memory_gb_per_s` for the rest."""
    head_size: Count | None = None
    dtype: Name | None = None
    """bf16 or fp32."""
    backend: Name | None = None
    """Of the kernel times; None if not stated."""
    device: Name | None = None
    """As torch names it, or the beginning of that."""
    versions: Versions = Versions()
    """With which it was measured."""
    attention_backward: Rate = 2.5
    """Backward over forward time of attention if not measured: 5 matrix products against 2."""
    assumed_tflops: Rate = 576.0
    """Rate of bf16 matrix products of any size: power limits it. Mean of four products of 16,384 rows on an H100, of
    70B at TP 8, less half a wave and a launch each (PyTorch, float8_experimental pull request 100)."""
    gains: tuple[tuple[Name, Rate, Time], ...] = ()
    """By `--fp8-recipe`, and nvfp4: the rate of products over that in bf16, and bytes to quantize a value."""
    wave_outputs: Time = 132 * 128 * 128
    """Outputs that a device computes at once: 132 multiprocessors, a tile of 128 x 128 each. The last wave is half
    empty."""
    kernel_us: Time = 3.0
    """Time between the ends of two kernels in which the second does not run. Assumed."""
    memory_gb_per_s: Rate = 2700.0
    """Rate of memory-bound operations: 80 % of an H100's 3350 GB/s. PyTorch measured 79 to 87 % for casts (ao,
    benchmarks/prototype/blockwise_fp8_training)."""
    memory_gib: Rate = 80.0
    """Of the device."""
    dp_overlap: Share = 0.9
    """Share of gradient and parameter communication that overlaps passes. Assumed."""
    network: Network = H100_NETWORK

    def __post_init__(self) -> None:
        checked(self)
        for times in filter(None, (self.forward, self.backward, *(self.fp8 or ()))):
            if not any(asdict(times).values()) and not self.counts_pairs:
                raise ValueError("its kernel times are all 0; give at least one")
        if self.linear_tflops and not self.forward.tile + (self.backward.tile if self.backward else 0):
            raise ValueError("its linear_tflops go with kernel times whose tile is over 0; give both or neither")
        if self.tile_rows & (self.tile_rows - 1):
            raise ValueError(f"tile_rows is {self.tile_rows}; it must be a power of two up to 65536")

    @property
    def counts_pairs(self) -> bool:
        """Whether this is the `flops` profile, which has no unit of time."""
        return self.name == "flops"

    @property
    def rates(self) -> tuple[float, float]:
        """TFLOP/s of matrix products, forward and backward."""
        return self.linear_tflops or (self.assumed_tflops, self.assumed_tflops)

    def gain(self, precision: str, part: str) -> tuple[float, float]:
        """Return the rate of a part's products over that in bf16, and bytes to quantize a value of their operands.

        The output layer stays in bf16, and all else if the precision is not known. Grouped products of experts gain by
        MXFP8 as others do (`benchmarks.attention`), and by NVFP4 hardly more (NVIDIA/TransformerEngine#2281). Assumed:
        so they do by other FP8, as no such product is published.
        """
        if part == "experts" and precision == "nvfp4":
            precision = "mxfp8"
        known = {recipe: (gain, quantized) for recipe, gain, quantized in self.gains}
        if part == "output" or precision not in known:
            return 1.0, 0.0
        return known[precision]

    def product(self, rows: Any, columns: Any, inner: Any, gain: float = 1.0, quantized: float = 0.0) -> Any:
        """Time in us of a product of matrices [rows, inner] and [inner, columns]; see `gain`."""
        time = self.kernel_us + 2e-6 * (rows * columns + self.wave_outputs / 2) * inner / (self.assumed_tflops * gain)
        return time + quantized * (rows + columns) * inner / self.memory_gb_per_s / 1e3

    def kernels(
        self, *, heads: int = 1, head_size: int | None = None, kv_chunks: int = 1, fp8: bool = False
    ) -> tuple[KernelModel, KernelModel]:
        """Return the kernels of one layer on one rank, forward and backward; in `fp8` if measured.

        Tile times are in proportion to the head size, if one was measured. K and V arrive in `kv_chunks`.
        """
        size = 1.0 if head_size is None or self.head_size is None else head_size / self.head_size

        def kernel(times: KernelTimes) -> KernelModel:
            sized = asdict(times.scaled(size)) | {"launch": times.launch}
            return KernelModel(tile_rows=self.tile_rows, heads=heads, kv_chunks=kv_chunks, **sized)

        own = self.forward, self.backward or self.forward.scaled(self.attention_backward)
        forward, backward = self.fp8 if fp8 and self.fp8 else own
        return kernel(forward), kernel(backward)

    def with_attention(self, factor: float) -> "Profile":
        """Return the profile with `factor` times the time of attention."""
        fp8 = self.fp8 and (self.fp8[0].scaled(factor), self.fp8[1].scaled(factor))
        backward = self.backward and self.backward.scaled(factor)
        return replace(self, forward=self.forward.scaled(factor), backward=backward, fp8=fp8)

    def misfit(self, device: str | None, precision: str) -> str:
        """Return how a run's device or precision is not of this profile, with the remedy; "" if it is."""
        if self.counts_pairs:
            return ""
        if not same_device(self.device, device):
            run = gpu_of(device or "")
            remedy = f"take {GPUS[run]}" if run else "measure it by megatron-wlb profile"
            return f"Profile {self.name} is of {self.device}, and the run's device is {device}: {remedy}."
        if precision not in ("bf16", *(recipe for recipe, *_ in self.gains)):
            having = [gpu for gpu, name in GPUS.items() if precision in (each for each, *_ in load_profile(name).gains)]
            others = (
                f", unlike the profiles of {', '.join(having)}; take the profile of the run's device" if having else ""
            )
            of_device = f" ({self.device})" if self.device else ""
            return f"Profile {self.name}{of_device} has no rate of {precision}, which counts as bf16{others}."
        return ""

    def differences(self, *, head_size: int, dtype: str, backend: str, versions: Versions) -> str:
        """Return how kernels differ from a run: "head size 128, not 64", or ""; a missing value is no difference."""
        ours, runs = asdict(self.versions), asdict(versions)
        measured = {"head size": self.head_size, "dtype": self.dtype, "backend": self.backend, **ours}
        run = {"head size": head_size, "dtype": dtype, "backend": backend, **runs}
        differ = [name for name, value in measured.items() if None not in (value, run[name]) and value != run[name]]
        return ", ".join(f"{name} {measured[name]}, not {run[name]}" for name in differ)


FLOPS_PROFILE = Profile(
    name="flops",
    tile_rows=1,
    forward=KernelTimes(launch=0.0, tile=1.0, query_tile=0.0),
    backward=KernelTimes(launch=0.0, tile=0.0, query_tile=0.0),
)
"""Counts attended pairs alone, once for both directions."""
DEFAULT_PROFILE = "h100-cudnn"
GPUS = {
    "a100": "a100-fa2",
    "h100": DEFAULT_PROFILE,
    "h200": "h200-cudnn-9.19",
    "b200": "b200-cudnn-2025",
    "gb200": "gb200-cudnn-9.22",
    "gb300": "gb300-cudnn-9.22",
}
"""Profiles of GPUs by default: TransformerEngine prefers cuDNN from Hopper on, and FlashAttention-2 before."""
_SHIPPED = resources.files("megatron_wlb.hardware") / "profiles"


def gpu_of(device: str) -> str | None:
    """Return the key of `GPUS` in a name such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    found = re.search(rf"(?<![a-z0-9])({'|'.join(GPUS)})(?![a-z0-9])", device.lower())
    return found[1] if found else None


def same_device(one: str | None, other: str | None) -> bool:
    """Whether two names, as torch has them, may be of one kind of device; None is unknown."""
    kinds = {name and (gpu_of(name) or name) for name in (one, other)}
    return None in kinds or len(kinds) == 1


def generations(gpu: str | None) -> list[str]:
    """Return the shipped profiles of a GPU, of all its software."""
    return [name for name in shipped_profiles() if gpu and name.startswith(f"{gpu}-")]


def shipped_profiles() -> list[str]:
    return ["flops", *sorted(p.name.removesuffix(".json") for p in _SHIPPED.iterdir() if p.name.endswith(".json"))]


def profile_file(name_or_path: str) -> Any:
    """Return a profile's file, by name or path. Raises ValueError if there is none."""
    if name_or_path in shipped_profiles():
        return _SHIPPED / f"{name_or_path}.json"
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"no profile {name_or_path!r}: give a JSON file or one of the shipped profiles "
            f"{', '.join(shipped_profiles())}"
        )
    return path


def load_profile(name_or_path: str) -> Profile:
    """Load a profile by its name or file. Raises ValueError if there is none."""
    if name_or_path == FLOPS_PROFILE.name:
        return FLOPS_PROFILE
    try:
        text = files.read(profile_file(name_or_path), 1 << 20, "give the output of `megatron-wlb profile`")
        found = of_file(text, Profile)
        # The name of `FLOPS_PROFILE` is its alone.
        return replace(found, name=name_or_path) if found.counts_pairs else found
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"{name_or_path} is not a megatron_wlb profile: {error}; give the output of `megatron-wlb profile`"
        ) from error
