"""Documents of `--mock-data`: lengths drawn from a distribution, tokens made from their place; no files."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

DOCUMENTS = 1 << 17
"""Documents of an epoch."""
GOLDEN = 0x9E3779B97F4A7C15
"""By which SplitMix64's states (Steele, Lea, Flood 2014) are apart."""


FINALIZER = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def finalized(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer of uint64 states, whose arithmetic wraps around, as it should."""
    for shift, factor in FINALIZER:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class MockLengths:
    """A log-normal body, and with probability `share` a Pareto tail; the defaults are F2.

    F2 is fitted to Table 2 of the WLB-LLM paper, for windows of 128K, at a crossover of 51,200 tokens. There, original
    packing has an imbalance of 1.39 at N=4 (paper: 1.44).
    """

    mu: float = 7.6934
    sigma: float = 0.8193
    share: float = 0.022642
    minimum: float = 24880
    alpha: float = 0.8627
    shortest: int = 16
    longest: int = 131_072

    def draw(self, count: int, seed: int, longest: int | None = None) -> np.ndarray:
        """Draw the trained tokens of `count` documents, int64 [count]; `longest` replaces the field."""
        rng = np.random.default_rng(seed)
        body = rng.lognormal(self.mu, self.sigma, count)
        tail = self.minimum * (1 + rng.pareto(self.alpha, count))
        drawn = np.where(rng.random(count) < self.share, tail, body)
        return np.clip(drawn, self.shortest, longest or self.longest).astype(np.int64)


F2 = MockLengths()


class Profile(NamedTuple):
    """Lengths fitted to figures that others published."""

    lengths: MockLengths
    documents: str
    figures: str
    """In tokens."""
    sources: tuple[str, ...]


PROFILES = {
    "F2": Profile(
        F2,
        "pre-training, mixed",
        "Table 2 of WLB-LLM at 128K",
        ("https://www.usenix.org/conference/osdi25/presentation/wang-zheng",),
    ),
    "agents": Profile(
        MockLengths(10.7016, 0.3347, 0.498, 28958, 4.352, longest=184_000),
        "trajectories of coding agents (CoderForge)",
        "30, 76, 92.5, 99.3, 99.9 % up to 32K, 48K, 64K, 96K, 128K; median 38,000, p95 71,000, longest 184,000",
        ("https://github.com/NVIDIA-NeMo/Automodel/tree/main/examples/long_context_validation/qwen3_32b",),
    ),
    "books": Profile(
        MockLengths(10.67158, 0.62813, 0.39407, 102673, 2.40746, longest=8_687_685),
        "books (RedPajama's, English)",
        "quartiles 37,528, 77,580, 129,413; mean 100,973; longest 8,687,685",
        ("https://huggingface.co/datasets/BEE-spoke-data/rp_books-en",),
    ),
    "code": Profile(
        MockLengths(6.6025, 1.2122, 0),
        "source files (Python of The Stack, StarCoderData)",
        "mean 1,536; 2 % of the files have 20 % of the tokens",
        ("https://huggingface.co/datasets/manu/code_5p_data", "https://arxiv.org/abs/2407.00434"),
    ),
    "conversations": Profile(
        MockLengths(5.7371, 1.1, 0),
        "chats (LMSYS-Chat-1M)",
        "2.0 turns of 69.5 and 214.5 in the mean; over 99 % shorter than 4K",
        ("https://arxiv.org/abs/2309.11998", "https://arxiv.org/abs/2503.02356"),
    ),
}
"""By the name that --wlb-mock-lengths takes."""


def mock_lengths(text: str) -> MockLengths:
    """Parse a profile's name, or MU,SIGMA,SHARE,MINIMUM,ALPHA; raises ValueError for anything else."""
    if text in PROFILES:
        return PROFILES[text].lengths
    try:
        mu, sigma, share, minimum, alpha = (float(part) for part in text.split(","))
        if abs(mu) <= 20 and 0 <= sigma <= 20 and 0 <= share <= 1 and 1 <= minimum <= 1 << 30 and 0 < alpha <= 100:
            return MockLengths(mu, sigma, share, minimum, alpha)
    except ValueError:
        pass
    raise ValueError(
        f"--wlb-mock-lengths {text[:40]} must be {', '.join(PROFILES)}, or MU,SIGMA,SHARE,MINIMUM,ALPHA: mean and "
        "deviation of the logarithm in the log-normal body, the share of documents in the Pareto tail, its least "
        "length, its exponent"
    )


@dataclass(frozen=True, kw_only=True)
class MockDocuments:
    """Documents in place of a `.bin/.idx` dataset; each ends with its only EOD token."""

    distribution: MockLengths
    seed: int
    vocabulary: int
    """Tokens are below it."""
    eod: int = 0

    def __len__(self) -> int:
        return DOCUMENTS

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each document, int32 [documents]."""
        return self.distribution.draw(DOCUMENTS, self.seed).astype(np.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens of a document from token `offset` on, int64 [length], whoever reads how much of it."""
        last = int(self.sequence_lengths[idx]) - 1
        count = last + 1 - offset if length is None else length
        # SplitMix64 of (seed, document, place).
        place = np.arange(offset, offset + count, dtype=np.uint64)
        state = place + np.uint64((self.seed * GOLDEN + idx * 0xD1B54A32D192ED03) % (1 << 64))
        tokens = (finalized(state * np.uint64(GOLDEN)) % np.uint64(self.vocabulary - 1)).astype(np.int64)
        tokens += tokens >= self.eod
        tokens[place == last] = self.eod
        return tokens
