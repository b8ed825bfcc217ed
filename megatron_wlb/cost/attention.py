"""How long attention takes: kernel times of a device, and what a job's sharding goes by."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_wlb.cost.exchange import exchange_model, exchange_parts
from megatron_wlb.cost.network import load_network

if TYPE_CHECKING:
    from megatron_wlb.job import Job

ATTENTION_BACKWARD = 2.5
"""Backward time of attention per forward time where it was not measured: 5 matrix products against 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """Time of varlen attention launches of a rank and layer: t = launch + heads * (tile * N_t + query_tile * N_q).

    N_q counts query tiles of `tile_rows` rows, N_t the tiles of `tile_rows` x `tile_rows` that the causal mask leaves
    visible. `exchange` is the exposed time per row of K and V that is gathered from all ranks.
    """

    tile_rows: int
    """A power of two."""
    launch: float
    tile: float
    query_tile: float
    heads: int = 1
    parts: int = 1
    """Parts of K and V of which one is computed with while the next travels."""
    exchange: float = 0.0

    def count(self, segments: np.ndarray) -> tuple[int, int]:
        """(N_t, N_q) of all of SEGMENT [n]."""
        tiles, query_tiles = self.tiles(segments)
        return int(tiles.sum()), int(query_tiles.sum())

    def tiles(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(N_t, N_q) of each of SEGMENT [n], query rows [start, stop) against keys [0, stop): int64 [n] each."""
        t, starts, stops = self.tile_rows, segments["start"], segments["stop"]
        q = stops - starts
        full = q // t
        # Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * t and sees ceil(that / t) key tiles.
        first = -(-(starts + t) // t)
        return full * first + full * (full - 1) // 2 + (q % t > 0) * -(-stops // t), -(-q // t)

    def count_shard(self, calls: Sequence[np.ndarray]) -> tuple[int, int, int]:
        """Calls with rows, N_t and N_q of a shard."""
        counts = [self.count(call) for call in calls if len(call)]
        return len(counts), sum(tiles for tiles, _ in counts), sum(query_tiles for _, query_tiles in counts)

    def launches(self, calls: Any, exchanged_rows: Any) -> Any:
        """Launches of so many calls: each has one for every part, or one for all where nothing is exchanged."""
        return calls * np.where(exchanged_rows > 0, self.parts, 1)

    def time(self, launches: Any, tiles: Any, query_tiles: Any) -> Any:
        """Predicted time of counts, which may be arrays; in the order of operations of csrc/pieces.h."""
        return launches * self.launch + self.heads * (self.tile * tiles + self.query_tile * query_tiles)

    def __add__(self, other: "KernelModel") -> "KernelModel":
        """Both directions together."""
        summed = {name: getattr(self, name) + getattr(other, name) for name in ("launch", "tile", "query_tile")}
        return replace(self, **summed)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Constants of one direction of `KernelModel`, in the unit of the profile (us, but for `flops`)."""

    launch: float
    tile: float
    query_tile: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Calibration of a device: attention kernels, and the rest of a layer if it was measured."""

    name: str
    tile_rows: int
    forward: KernelTimes
    backward: KernelTimes | None = None
    """None if not measured: `ATTENTION_BACKWARD` times forward."""
    linear_tflops: tuple[float, float] | None = None
    """TFLOP/s of a layer without attention, forward and backward: its matrix products over all of its time."""
    head_size: int | None = None
    dtype: str | None = None
    """bf16 or fp32."""
    backend: str | None = None
    """What the kernel times were measured for; None if not stated."""
    two_streams: bool = False
    """The two calls of a rank run beside each other, on two streams; the kernel times are of that."""

    @property
    def counts_pairs(self) -> bool:
        """Whether this is the `flops` profile, which has no unit of time."""
        return self.name == FLOPS_PROFILE.name

    def kernels(
        self,
        *,
        heads: int = 1,
        head_size: int | None = None,
        parts: int = 1,
        backward_ratio: float = ATTENTION_BACKWARD,
    ) -> tuple[KernelModel, KernelModel]:
        """Forward and backward of one layer on one rank.

        Args:
            heads: query heads of a tensor-parallel rank.
            head_size: tiles of another one than was measured are taken to cost in proportion; None: the same.
            parts: in which K and V arrive.
            backward_ratio: backward time per forward time where backward was not measured.
        """

        size = 1.0 if head_size is None or self.head_size is None else head_size / self.head_size

        def kernel(times: KernelTimes, ratio: float) -> KernelModel:
            return KernelModel(
                tile_rows=self.tile_rows,
                launch=times.launch * ratio,
                tile=times.tile * ratio * size,
                query_tile=times.query_tile * ratio * size,
                heads=heads,
                parts=parts,
            )

        backward = kernel(self.backward, 1.0) if self.backward else kernel(self.forward, backward_ratio)
        return kernel(self.forward, 1.0), backward

    def differences(self, *, head_size: int, dtype: str, backend: str) -> str:
        """What the kernel times were measured for and the run does not have, as "head size 128, not 64"; else ""."""
        pairs = {
            "head size": (self.head_size, head_size),
            "dtype": (self.dtype, dtype),
            "backend": (self.backend, backend),
        }
        return ", ".join(f"{name} {ours}, not {run}" for name, (ours, run) in pairs.items() if ours not in (None, run))


FLOPS_PROFILE = Profile(
    name="flops",
    tile_rows=1,
    forward=KernelTimes(launch=0.0, tile=1.0, query_tile=0.0),
    backward=KernelTimes(launch=0.0, tile=0.0, query_tile=0.0),
)
"""Counts attended pairs, once for both directions, and nothing else: no launch cost, no tile waste, no exchange."""


def attention_kernels(job: "Job", backward_ratio: float = ATTENTION_BACKWARD) -> tuple[KernelModel, KernelModel]:
    """Attention of one layer on one rank, forward and backward, communication aside."""
    heads, size, parts = job.model.heads_per_rank(job.parallel.tp)[0], job.model.head_size, exchange_parts(job)
    return job.profile.kernels(heads=heads, head_size=size, parts=parts, backward_ratio=backward_ratio)


@lru_cache(maxsize=16)
def attention_kernel(job: "Job") -> KernelModel:
    """Attention of one layer on one rank, forward and backward, with an exchange that nothing hides."""
    forward, backward = attention_kernels(job)
    # Where all rows travel, whatever the sharding, the exchange decides nothing.
    if job.cp_exchange not in ("shared", "latents"):
        return forward + backward
    arrive, leave = exchange_model(job, load_network()).times(np.array(job.context_length))
    times = 1 if job.save_gathered_kv or job.cp_exchange == "latents" else 2
    return replace(forward + backward, exchange=float(times * arrive + leave) / job.context_length)


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("megatron_wlb.cost") / "profiles"
    return ["flops", *sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))]


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or one from a JSON file (what `megatron-wlb profile` writes).

    Raises ValueError if there is neither, or the file does not hold a profile.
    """
    if name_or_path == "flops":
        return FLOPS_PROFILE
    path: Any = Path(name_or_path)
    if name_or_path in shipped_profiles():
        path = resources.files("megatron_wlb.cost") / "profiles" / f"{name_or_path}.json"
    elif not path.is_file():
        raise ValueError(
            f"no profile {name_or_path!r}: give a JSON file or one of the shipped profiles "
            f"{', '.join(shipped_profiles())}"
        )
    try:
        return _profile(json.loads(path.read_text()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name_or_path} is not a megatron_wlb profile: {error!r}; give what `megatron-wlb profile` wrote"
        ) from error


def _profile(data: dict[str, Any]) -> Profile:
    kernel, linear = data["kernel"], data.get("linear_tflops")
    directions = {d: KernelTimes(**kernel[d]) for d in ("forward", "backward") if kernel.get(d)}
    stated: dict[str, Any] = {name: kernel.get(name) for name in ("head_size", "dtype", "backend")} | directions
    stated["two_streams"] = bool(kernel.get("two_streams", False))
    if linear:
        stated["linear_tflops"] = linear["forward"], linear["backward"]
    profile = Profile(name=data["name"], tile_rows=kernel["tile_rows"], **stated)
    for times in directions.values():
        values = (times.launch, times.tile, times.query_tile)
        if not all(np.isfinite(t) and t >= 0 for t in values) or not any(values):
            raise ValueError(f"its kernel times are {values}; they must be finite, at least 0, and not all 0")
    if linear and not all(np.isfinite(x) and x > 0 for x in (*linear.values(), sum(k.tile for k in profile.kernels()))):
        raise ValueError(f"linear_tflops is {linear}; it must be finite and over 0, and go with a tile over 0")
    if profile.head_size is not None and not (isinstance(profile.head_size, int) and profile.head_size >= 1):
        raise ValueError(f"head_size is {profile.head_size!r}; it must be an integer of at least 1")
    tile = profile.tile_rows
    if not isinstance(tile, int) or tile < 1 or tile & (tile - 1) or tile > 1 << 16:
        raise ValueError(f"tile_rows is {tile!r}; it must be a power of two up to 65536")
    return profile
