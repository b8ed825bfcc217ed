from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.packing.delay import Limits
from megatron_wlb.packing.place import Sizes
from megatron_wlb.sharding.select import RoundCosts

MAX_TOKENS: int
FORCED_STEPS: int
FILLER_SHARE: int
TOKEN_BAND: float
TOKEN_REPAY: float

def place_documents(
    length: np.ndarray, work: np.ndarray, sizes: Sizes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def release_documents(
    length: np.ndarray,
    work: np.ndarray,
    arrival: np.ndarray,
    step: int,
    credit: int,
    sizes: Sizes,
    limits: Limits,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def choose_sharding(
    length: np.ndarray,
    cp_size: int,
    strategies: Sequence[str],
    most_shares: Sequence[float],
    kernel: KernelModel,
    costs: RoundCosts | None,
) -> tuple[str, float, NDArray[np.int64], list[int], list[float]]: ...
def attention_times(
    segments: NDArray[np.int64],
    bounds: Sequence[int],
    cp_size: int,
    key_bounds: Sequence[float],
    costs: RoundCosts,
    moved: int | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], float, float]: ...
def makespans[Time: (np.float64, np.int64)](
    first: NDArray[np.int32],
    second: NDArray[np.int32],
    end: NDArray[np.int32],
    time: NDArray[np.int32],
    num_slots: int,
    work: NDArray[Time],
) -> NDArray[Time]: ...
def place(work: np.ndarray, dp: int, total_weight: int, largest_weight: int) -> NDArray[np.int64]: ...
def node_ends(
    first: NDArray[np.int64], second: NDArray[np.int64], times: NDArray[np.float64]
) -> NDArray[np.float64]: ...
