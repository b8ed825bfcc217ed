from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.sharding.select import RoundCosts

MAX_TOKENS: int
FORCED_STEPS: int
FLUID_SHARE: int
EVEN: float
WAIT_PRICE: float
TOKEN_BAND: float
TOKEN_REPAY: float
FULL: float
EXCHANGES: int
LIGHTEST: int

def choose_adaptive(
    length: np.ndarray,
    work: np.ndarray,
    arrival: np.ndarray,
    step: int,
    credit: int,
    num_micro_batches: int,
    ranks: int,
    total_weight: int,
    largest_weight: int,
    unit_weight: int,
    max_tokens: int,
    batch_tokens: int,
    crossover_tokens: int,
    max_delay_steps: int,
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
    shares: Sequence[float],
    costs: RoundCosts,
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
