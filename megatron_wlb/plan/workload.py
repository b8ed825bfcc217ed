"""What things cost: the work of a document (packing) and the time of an attention launch (sharding).

Work is an integer, so that C++ and Python compare equal sums on every rank: W(d) = d * Lc + d * d, in units of one
token attending to one token pair; Lc, the crossover length, is the document length at which attention costs as much as
everything else (paper, equation 2 with W_a ~ d^2 and W_l ~ d).
"""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np


def document_work(lengths: np.ndarray, crossover_tokens: int) -> np.ndarray:
    """Work of documents of `lengths` (int64 [n]), int64 [n]."""
    lengths = lengths.astype(np.int64)
    return lengths * (lengths + crossover_tokens)


def crossover_from_flops(
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    gated_linear_unit: bool,
    padded_vocab_size: int,
    active_experts: int = 1,
) -> int:
    """Crossover length Lc in tokens of a decoder-only model, from matrix-multiply FLOPs alone.

    Per token and layer: 2 FLOPs per weight, and 2 * heads * kv_channels per token attended to (causal attention: QK^T
    and PV over half of the document). The output projection is spread over the layers, as the pipeline does.
    """
    query = num_attention_heads * kv_channels
    attention_weights = hidden_size * (2 * query + 2 * num_query_groups * kv_channels)
    mlp_weights = hidden_size * ffn_hidden_size * (3 if gated_linear_unit else 2) * active_experts
    weights = attention_weights + mlp_weights + hidden_size * padded_vocab_size // num_layers
    return max(1, weights // query)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """Time of one varlen attention launch: t = launch + tile * N_tile + query_tile * N_qtile.

    N_qtile counts query tiles of `tile_rows` rows, N_tile the tiles of `tile_rows` x `tile_rows` that the causal mask
    leaves visible, both times query heads.
    """

    name: str
    tile_rows: int
    launch: float
    tile: float
    query_tile: float
    heads: int = 1

    def launch_time(self, starts: np.ndarray, stops: np.ndarray) -> float:
        """Predicted time of query rows [start, stop) against keys [0, stop), summed over segments (int64 [n])."""
        if len(starts) == 0:
            return 0.0
        t, q = self.tile_rows, stops - starts
        full = q // t
        # Query tile j (j = 0, 1, ...) ends at row start + (j + 1) * t and sees ceil(that / t) key tiles.
        first = -(-(starts + t) // t)
        tiles = int((full * first + full * (full - 1) // 2 + (q % t > 0) * -(-stops // t)).sum())
        query_tiles = int((-(-q // t)).sum())
        return self.launch + self.heads * (self.tile * tiles + self.query_tile * query_tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Calibration of a device: the kernel model for sharding, and the crossover if it was measured."""

    name: str
    kernel: KernelModel
    crossover_tokens: int | None = None


FLOPS_PROFILE = Profile(
    name="flops", kernel=KernelModel(name="flops", tile_rows=1, launch=0.0, tile=1.0, query_tile=0.0)
)
"""Counts attended pairs and nothing else: no launch cost, no tile waste."""


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("megatron_wlb.plan") / "profiles"
    return ["flops", *sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))]


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or one from a JSON file.

    Raises ValueError if there is neither, or the file does not hold a profile.
    """
    if name_or_path == "flops":
        return FLOPS_PROFILE
    path: object = Path(name_or_path)
    if name_or_path in shipped_profiles():
        path = resources.files("megatron_wlb.plan") / "profiles" / f"{name_or_path}.json"
    elif not Path(name_or_path).is_file():
        raise ValueError(
            f"no profile {name_or_path!r}: give a JSON file or one of the shipped profiles "
            f"{', '.join(shipped_profiles())}"
        )
    try:
        data = json.loads(path.read_text())  # type: ignore[attr-defined]
        kernel = KernelModel(name=data["name"], **data["kernel"])
        crossover = data.get("crossover_tokens")
        counts = (kernel.tile_rows, kernel.heads, *([] if crossover is None else [crossover]))
        if not all(isinstance(n, int) and n >= 1 for n in counts):
            raise ValueError("tile_rows, heads and crossover_tokens must be integers of at least 1")
        times = (kernel.launch, kernel.tile, kernel.query_tile)
        if not all(np.isfinite(t) and t >= 0 for t in times) or not any(times):
            raise ValueError("its constants must be finite, at least 0, and not all 0")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name_or_path} is not a megatron_wlb profile: {error}") from error
    return Profile(name=data["name"], kernel=kernel, crossover_tokens=crossover)
