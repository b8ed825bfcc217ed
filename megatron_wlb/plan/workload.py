"""What things cost: the work of a document (packing) and the time of an attention launch (sharding).

Work is an integer, so that C++ and Python compare equal sums on every rank: W(d) = d * Lc + d * d, in units of one
token attending to one token pair; Lc, the crossover length, is the document length at which attention costs as much as
everything else (paper, equation 2 with W_a ~ d^2 and W_l ~ d).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np


def document_work(lengths: np.ndarray, crossover_tokens: int) -> np.ndarray:
    """Work of documents of `lengths` (int64 [n]), int64 [n]."""
    lengths = lengths.astype(np.int64)
    return lengths * (lengths + crossover_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only model with untied embeddings, by Megatron's names for its sizes."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Of the experts that a token goes to, together."""
    num_attention_heads: int
    num_query_groups: int
    padded_vocab_size: int
    """0 leaves the embedding and the output layer out."""
    kv_channels: int = 128
    gated_linear_unit: bool = True

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        return self.num_query_groups * self.kv_channels

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices."""
        mlp = self.ffn_hidden_size * (3 if self.gated_linear_unit else 2)
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size + mlp)

    @property
    def vocabulary_weights(self) -> int:
        """Weights of the embedding, and of the output layer."""
        return self.padded_vocab_size * self.hidden_size

    @property
    def token_weights(self) -> int:
        """Weights that a token is multiplied with in a layer, the output layer's spread over all as pipelines do."""
        return self.layer_weights + self.vocabulary_weights // self.num_layers

    @property
    def crossover_tokens(self) -> int:
        """Crossover length Lc in tokens from matrix-multiply FLOPs alone.

        Per token and layer: 2 FLOPs per weight, and 2 * heads * kv_channels per token attended to (causal attention:
        QK^T and PV over half of the document).
        """
        return max(1, self.token_weights // self.query_size)

    def heads_per_rank(self, tp_size: int) -> tuple[int, int]:
        """Query and key heads of a tensor-parallel rank."""
        return max(1, self.num_attention_heads // tp_size), max(1, self.num_query_groups // tp_size)


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
    exchange: float = 0.0

    def count(self, segments: np.ndarray) -> tuple[int, int]:
        """(N_t, N_q) of SEGMENT [n]: query rows [start, stop) against keys [0, stop)."""
        t, starts, stops = self.tile_rows, segments["start"], segments["stop"]
        q = stops - starts
        full = q // t
        # Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * t and sees ceil(that / t) key tiles.
        first = -(-(starts + t) // t)
        tiles = full * first + full * (full - 1) // 2 + (q % t > 0) * -(-stops // t)
        return int(tiles.sum()), int((-(-q // t)).sum())

    def count_shard(self, colours: Sequence[np.ndarray]) -> tuple[int, int, int]:
        """Launches, one per colour with rows, N_t and N_q of a shard."""
        counts = [self.count(colour) for colour in colours if len(colour)]
        return len(counts), sum(tiles for tiles, _ in counts), sum(query_tiles for _, query_tiles in counts)

    def time(self, launches: Any, tiles: Any, query_tiles: Any) -> Any:
        """Predicted time of counts, which may be arrays; in the order of operations of csrc/sharding.cpp."""
        return launches * self.launch + self.heads * (self.tile * tiles + self.query_tile * query_tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Constants of one direction of `KernelModel`, in the unit of the profile (us, but for `flops`)."""

    launch: float
    tile: float
    query_tile: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Calibration of a device: kernels for sharding, collectives, and the crossover if it was measured."""

    name: str
    tile_rows: int
    forward: KernelTimes
    backward: KernelTimes | None = None
    """None if not measured: sharding then goes by the forward pass alone."""
    gather_us_per_mib: float = 0.0
    """Of K and V as they arrive from all ranks (all-gather, large messages)."""
    scatter_us_per_mib: float = 0.0
    """Of dK and dV as they leave for all ranks (reduce-scatter)."""
    linear_tflops: tuple[float, float] | None = None
    """Of a layer without attention, forward and backward: TFLOP/s of its matrix multiplies over all of its time."""
    crossover_tokens: int | None = None
    """Of the model that was measured, without its output projection."""
    head_size: int | None = None
    dtype: str | None = None
    """bf16 or fp32."""
    backend: str | None = None
    """What the kernel times were measured for; None if not stated."""

    def kernel(self, *, heads: int, row_bytes: int = 0, head_groups: int = 1) -> KernelModel:
        """Attention of one layer on one rank, forward and backward.

        Args:
            heads: query heads per tensor-parallel rank.
            row_bytes: of K and V of one row.
            head_groups: in which K and V are gathered; all but the first gather hide behind attention, and all but
                the last reduce-scatter (fp32, so of twice the bytes of bf16).
        """
        parts = [self.forward] if self.backward is None else [self.forward, self.backward]
        exposed = row_bytes / head_groups / 2**20
        moved = self.gather_us_per_mib * len(parts) + (self.scatter_us_per_mib * 2 if self.backward else 0.0)
        return KernelModel(
            tile_rows=self.tile_rows,
            launch=head_groups * sum(p.launch for p in parts),
            tile=sum(p.tile for p in parts),
            query_tile=sum(p.query_tile for p in parts),
            heads=heads,
            exchange=exposed * moved,
        )

    def layer_kernel(
        self, model: ModelShape, *, tp_size: int, bytes_per_value: int, head_groups: int = 1
    ) -> KernelModel:
        """`kernel` for a model and how K and V are stored."""
        heads, key_heads = model.heads_per_rank(tp_size)
        row_bytes = 2 * key_heads * model.kv_channels * bytes_per_value
        return self.kernel(heads=heads, row_bytes=row_bytes, head_groups=head_groups)

    def crossover_for(self, model: ModelShape) -> int:
        """Crossover length Lc in tokens of a model on this device.

        From times where `linear_tflops` is known: a document of d tokens, whole tiles of them, takes
        d * per_token + d * d * per_pair, so with Lc = per_token / per_pair its work is proportional to its time. Tiles
        of another head size than the measured one are taken to cost in proportion. Launches, which are one per
        micro-batch, don't count. Else `crossover_tokens` if stated, else from FLOPs.
        """
        if self.linear_tflops is None:
            return self.crossover_tokens or model.crossover_tokens
        kernel, t = self.kernel(heads=model.num_attention_heads), self.tile_rows
        heads = kernel.heads * model.kv_channels / (self.head_size or model.kv_channels)
        forward, backward = self.linear_tflops
        flops = model.token_weights * (2 / forward + (4 / backward if self.backward else 0)) / 1e6
        # n tiles of rows have n * (n + 1) / 2 visible tiles: d * d / (2 * t * t) + d / (2 * t).
        per_token = flops + heads * (kernel.tile / 2 + kernel.query_tile) / t
        per_pair = heads * kernel.tile / (2 * t * t)
        return max(1, round(per_token / per_pair))

    def differences(self, *, head_size: int, dtype: str, backend: str) -> str:
        """What the kernel times were measured for and the run does not have, as "head size 128, not 64"; else ""."""
        pairs = {
            "head size": (self.head_size, head_size),
            "dtype": (self.dtype, dtype),
            "backend": (self.backend, backend),
        }
        return ", ".join(f"{name} {ours}, not {run}" for name, (ours, run) in pairs.items() if ours not in (None, run))


FLOPS_PROFILE = Profile(name="flops", tile_rows=1, forward=KernelTimes(launch=0.0, tile=1.0, query_tile=0.0))
"""Counts attended pairs and nothing else: no launch cost, no tile waste."""


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("megatron_wlb.plan") / "profiles"
    return ["flops", *sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))]


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or one from a JSON file (what `megatron-wlb profile` writes).

    Raises ValueError if there is neither, or the file does not hold a profile.
    """
    if name_or_path == "flops":
        return FLOPS_PROFILE
    path: Any = Path(name_or_path)
    if name_or_path in shipped_profiles():
        path = resources.files("megatron_wlb.plan") / "profiles" / f"{name_or_path}.json"
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
    kernel, linear, collectives = data["kernel"], data.get("linear_tflops"), data.get("us_per_mib", {})
    directions = {d: KernelTimes(**kernel[d]) for d in ("forward", "backward") if kernel.get(d)}
    stated: dict[str, Any] = {name: kernel.get(name) for name in ("head_size", "dtype", "backend")}
    stated |= directions | {f"{name}_us_per_mib": us for name, us in collectives.items()}
    if linear:
        stated["linear_tflops"] = linear["forward"], linear["backward"]
    profile = Profile(
        name=data["name"], tile_rows=kernel["tile_rows"], crossover_tokens=data.get("crossover_tokens"), **stated
    )
    for times in directions.values():
        values = (times.launch, times.tile, times.query_tile)
        if not all(np.isfinite(t) and t >= 0 for t in values) or not any(values):
            raise ValueError(f"its kernel times are {values}; they must be finite, at least 0, and not all 0")
    if not all(np.isfinite(us) and us >= 0 for us in collectives.values()):
        raise ValueError(f"us_per_mib is {collectives}; it must be finite and at least 0")
    if linear and not all(np.isfinite(x) and x > 0 for x in (*linear.values(), profile.kernel(heads=1).tile)):
        raise ValueError(f"linear_tflops is {linear}; it must be finite and over 0, and go with a tile over 0")
    for name in ("crossover_tokens", "head_size"):
        value = getattr(profile, name)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    tile = profile.tile_rows
    if not isinstance(tile, int) or tile < 1 or tile & (tile - 1) or tile > 1 << 16:
        raise ValueError(f"tile_rows is {tile!r}; it must be a power of two up to 65536")
    return profile
