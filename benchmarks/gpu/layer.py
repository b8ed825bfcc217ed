"""A LLaMA2-7B layer on one GPU: what attention and all else cost, and how evenly each packing spreads both.

    python -m benchmarks.gpu.layer [--sections 72] [--tensor-parallel 8] [--quick] [--check]

Needs torch and numpy. The layer is a tensor-parallel rank's share of it, without collectives. Sections:

7  Figure 7 of the paper: attention and linear time, forward and backward, over the length of one document; and the
   crossover, the length at which both take equally long.
2  Table 2 by the paper's protocol: forward latency of each micro-batch of a step, packed by each policy; imbalance is
   the largest times N over the sum. Policies balance by the crossover of section 7. Steps and policies take turns.

Documents are F2 of a window of 131,072 tokens, cut by the loader at every window. Times are of the device with cold
caches, medians of samples. Packing is timed on the host. A case that fails is a row of the results, which are written
every few steps; the exit status is then 1. Build the native core before, or packing takes seconds.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench, Row, command_line
from benchmarks.gpu.cases import whole
from benchmarks.gpu.ranks import CopyFree, Rank, Rows, random_rows, ranks
from benchmarks.lengths import CROSSOVER, WINDOW, f2, packer, padded
from benchmarks.paper.setups import S_MAX, pieces
from benchmarks.results import spread
from megatron_wlb.plan.metrics import imbalance
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.runtime.attention import AttentionOptions

SKIPPED = 10
"""Steps before queues are filled."""
UNIT = 8
"""Micro-batches are padded to a multiple of it, for the matrix products."""
QUEUES = ((1 / 2,), (1 / 4, 1 / 2), (1 / 8, 1 / 4, 1 / 2))
"""Thresholds of Algorithm 1 in windows, for 1, 2 and 3 queues."""
PAPER = {"original": 1.44, "WLB-LLM, 2 queues": 1.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the layer and of what is measured."""

    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    head_size: int
    window: int
    shortest: int
    """Document of section 7."""
    samples: int
    steps: int
    """Of section 2, if there is time."""


FULL = Sizes(
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_heads=32,
    head_size=128,
    window=WINDOW,
    shortest=1024,
    samples=5,
    steps=100,
)
QUICK = Sizes(
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=8,
    head_size=16,
    window=512,
    shortest=64,
    samples=1,
    steps=2,
)


class Layer:
    """Of LLaMA: RMSNorm, Q K V, rotary embedding, attention, projection; RMSNorm, gated feed-forward. Random weights.

    T tokens of width H; a rank has n heads of size D and f rows of the feed-forward. All else but attention is *linear*
    here: matrix products, norms, rotary embedding, activation, sums.
    """

    def __init__(self, sizes: Sizes, tp_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if sizes.num_heads % tp_size or sizes.ffn_hidden_size % tp_size:
            raise ValueError(f"{sizes.num_heads} heads do not divide over {tp_size} ranks; give a divisor")
        self.heads, self.head_size = sizes.num_heads // tp_size, sizes.head_size
        hidden, width, ffn = sizes.hidden_size, self.heads * self.head_size, sizes.ffn_hidden_size // tp_size
        generator = torch.Generator(device).manual_seed(0)

        def weight(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator, device=device, dtype=dtype) / shape[-1] ** 0.5
            return values.requires_grad_()

        self.norms = [torch.ones(hidden, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
        self.qkv, self.projection = weight(3 * width, hidden), weight(hidden, width)
        self.gate_up, self.down = weight(2 * ffn, hidden), weight(hidden, ffn)

    @property
    def weights(self) -> list[Tensor]:
        return [*self.norms, self.qkv, self.projection, self.gate_up, self.down]

    def before(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, n, D] and k and v [T, 2, n, D] of x [T, H]; rotation [2, T, 1, D] is of `rotation_of`."""
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[0]), self.qkv)
        q, k, v = qkv.view(len(x), 3, self.heads, self.head_size).unbind(1)
        return rotated(q, rotation), torch.stack((rotated(k, rotation), v), dim=1)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [T, H] of its input and what attention gave [T, n, D]."""
        x = x + F.linear(attended.flatten(1), self.projection)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[1]), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def forward(self, x: Tensor, rotation: Tensor, rank: Rank, options: AttentionOptions) -> Tensor:
        """All of it for a whole micro-batch, without gradients."""
        with torch.no_grad():
            q, kv = self.before(x, rotation)
            attended, *_ = CopyFree(rank, options).forward(Rows(q, kv, q))
            return self.after(x, attended)


def rotation_of(lengths: np.ndarray, head_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines of in-document positions, [2, T, 1, D]."""
    positions = torch.cat([torch.arange(n, device=device) for n in lengths.tolist()])
    rates = 10_000.0 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angles = torch.outer(positions, rates).repeat(1, 2)[:, None]
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x [T, n, D], with halves of D as pairs."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LayerBench(Bench):
    """One run. The arguments are those of this benchmark, and what `Bench` asks for beyond."""

    name = "layer"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.sizes = QUICK if args.quick else FULL
        self.layer = Layer(self.sizes, args.tensor_parallel, self.dtype, self.device)
        self.crossover_tokens = CROSSOVER
        """Until section 7 has measured it."""
        self.settings = {
            "command": self.settings["command"],
            "backend": self.backend.name,
            "cuda": torch.version.cuda,
            "tensor_parallel": args.tensor_parallel,
            "sizes": asdict(self.sizes),
            "paper": PAPER,
        }

    def inputs(self, plan: ShardPlan) -> tuple[Tensor, Tensor, Rank]:  # type: ignore[override]
        """x, rotation and the only rank of a micro-batch in one piece."""
        tokens = int(plan.lengths.sum())
        generator = torch.Generator(self.device).manual_seed(tokens)
        x = torch.randn(tokens, self.sizes.hidden_size, generator=generator, device=self.device, dtype=self.dtype)
        rotation = rotation_of(plan.lengths, self.sizes.head_size, self.dtype, self.device)
        return x, rotation, ranks(plan, self.device)[0]

    def median_ms(self, call: Callable[[], Any]) -> Row:
        """Device time after a first call that does not count: median, least and largest."""
        call()
        return spread("ms", [self.clock.ms(call) for _ in range(self.sizes.samples)])


def main() -> None:
    parser = command_line(__doc__, "72", last="section 2 begins no step that would end later")
    parser.add_argument("--tensor-parallel", type=int, default=8, help="ranks that share the layer; 8 as in 7B-128K")
    parser.set_defaults(models=[], profile="h100-fa2", packing=None)  # of `Bench`, for sections that are not here
    bench = LayerBench(parser.parse_args())
    for section, run in {"7": figure_7, "2": table_2}.items():
        if section in bench.args.sections:
            with bench.case(section=section):
                bench.clock.reserve()
                run(bench)
    bench.conclude()


def figure_7(bench: LayerBench) -> None:
    """Section 7."""
    sizes = bench.sizes
    lengths, both = [], []
    length = sizes.shortest
    while length <= sizes.window:
        row: Row = {"section": "7", "document_length": length}
        with bench.case(**row):
            for name, call in layer_calls(bench, whole(np.array([length]))).items():
                row |= {f"{name}_{key}": value for key, value in bench.median_ms(call).items()}
            bench.add(row)
            lengths.append(length)
            both.append([sum(row[f"{p}_{d}_ms"] for d in ("forward", "backward")) for p in ("attention", "linear")])
        length *= 2
    bench.crossover_tokens = bench.settings["crossover_tokens"] = crossover(np.array(lengths), np.array(both))
    bench.say(f"attention takes as long as all else at {bench.crossover_tokens} tokens")


def layer_calls(bench: LayerBench, plan: ShardPlan) -> dict[str, Callable[[], Any]]:
    """Forward and backward of attention and of all else, for a micro-batch in one piece."""
    layer = bench.layer
    x, rotation, rank = bench.inputs(plan)
    heads = (layer.heads, layer.heads)
    rows = random_rows(len(x), heads, layer.head_size, bench.dtype, bench.device)
    method = CopyFree(rank, bench.options)
    saved = method.forward(rows)
    x.requires_grad_()
    attended = saved[0].detach().requires_grad_()

    def linear() -> tuple[Tensor, ...]:
        return *layer.before(x, rotation), layer.after(x, attended)

    out = linear()
    given = [torch.ones_like(o) for o in out]
    return {
        "attention_forward": partial(method.forward, rows),
        "attention_backward": partial(method.backward, rows, saved),
        "linear_forward": linear,
        "linear_backward": partial(torch.autograd.grad, out, [x, attended, *layer.weights], given, retain_graph=True),
    }


def crossover(lengths: np.ndarray, ms: np.ndarray) -> int:
    """Length at which attention takes as long as all else: where the logarithm of their ratio crosses 0.

    Beyond the `lengths` (ascending) that were measured, as it goes on at the end. `ms` is [n, 2], attention first.
    """
    x, y = np.log(lengths), np.log(ms[:, 0] / ms[:, 1])
    above = np.flatnonzero(y >= 0)
    i = min(max(1, int(above[0]) if len(above) else len(x) - 1), len(x) - 1)
    slope = max((y[i] - y[i - 1]) / (x[i] - x[i - 1]), 0.1)  # noise on small sizes, which never cross
    return round(float(np.clip(np.exp(x[i] - y[i] / slope), 1, 1 << 30)))


def table_2(bench: LayerBench) -> None:
    """Section 2."""
    sizes = bench.sizes
    packers = packers_of(bench, pieces(scaled, sizes.window, 0))
    for by_policy in packers.values():
        for _ in range(SKIPPED):
            by_policy.next()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in packers}
    longest, before = 0.0, list(bench.rows)
    for step in range(1, sizes.steps + 1):
        begin = bench.seconds
        for name, by_policy in packers.items():
            packing_begin = time.perf_counter()
            packing = by_policy.next().packing
            packing_ms = (time.perf_counter() - packing_begin) * 1e3
            ms = np.array([forward_ms(bench, packing.micro_batch(i)["length"]) for i in range(len(packing))])
            found[name].append((imbalance(ms), float(ms.sum()), packing_ms))
        bench.rows = before + [policy_row(name, steps) for name, steps in found.items()]
        if step % 10 == 0:
            bench.write()
        longest = max(longest, bench.seconds - begin)
        if bench.seconds + longest > 60 * bench.args.minutes:
            break
    bench.rows = before
    for name, steps in found.items():
        bench.add(row := policy_row(name, steps))
        if name == "ours":
            bench.goal("2: imbalance of forward latency, ours", row["imbalance"], "<=", PAPER["WLB-LLM, 2 queues"])


def policy_row(policy: str, steps: list[tuple[float, float, float]]) -> Row:
    """Of (imbalance, forward ms, packing ms) of every step."""
    degree, total, packing_ms = np.array(steps).T
    return {
        "section": "2",
        "policy": policy,
        "paper": PAPER.get(policy),
        "steps": len(degree),
        "imbalance": float(degree.mean()),
        "imbalance_p95": float(np.quantile(degree, 0.95)),
        "standard_error": float(degree.std() / len(degree) ** 0.5),
        "step_forward_ms": float(total.mean()),
        "packing_ms": float(np.median(packing_ms)),
        "packing_max_ms": float(packing_ms.max()),
    }


def scaled(window: int, seed: int) -> np.ndarray:
    """F2 for its own window, and for a smaller one in proportion."""
    return np.maximum(1, f2(100_000, seed) * window // WINDOW)


def packers_of(bench: LayerBench, documents: np.ndarray) -> dict[str, Packer]:
    """By the policies of Table 2 but the solver, and ours, by name."""
    window = bench.sizes.window

    by = partial(packer, documents, window, crossover_tokens=bench.crossover_tokens, max_tokens=round(S_MAX * window))
    return {
        "original": by("original"),
        **{f"fixed, {k} global batches": by("fixed", num_global_batches=k) for k in (1, 2, 4, 8)},
        **{
            f"WLB-LLM, {len(shares)} queues": by("wlb", outlier_thresholds=[round(s * window) for s in shares])
            for shares in QUEUES
        },
        "ours": by("adaptive"),
    }


def forward_ms(bench: LayerBench, lengths: np.ndarray) -> float:
    """Of a micro-batch of documents."""
    x, rotation, rank = bench.inputs(whole(padded(lengths, UNIT)))
    call = partial(bench.layer.forward, x, rotation, rank, bench.options)
    return float(bench.median_ms(call)["ms"])


if __name__ == "__main__":
    main()
