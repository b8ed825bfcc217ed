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

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
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
from benchmarks.paper.setups import pieces
from benchmarks.results import spread
from megatron_wlb.describe.make import make_job
from megatron_wlb.job import Job, Packing, Parallel
from megatron_wlb.model import MODELS, ModelShape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.fixed import FixedPacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.metrics import imbalance
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.types import ShardPlan

SKIPPED = 10
"""Steps before queues are filled."""
QUEUES = ((1 / 2,), (1 / 4, 1 / 2), (1 / 8, 1 / 4, 1 / 2))
"""Thresholds of Algorithm 1 in windows, for 1, 2 and 3 queues."""
PAPER = {"original": 1.44, "WLB-LLM, 2 queues": 1.05}
SMALL = ModelShape(
    num_layers=1,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=8,
    padded_vocab_size=0,
    kv_channels=16,
)


class Layer:
    """A LLaMA layer: norm, Q K V, rotary embedding, attention, projection; norm, gated feed-forward. Random weights.

    T tokens of width H; a rank has n heads of size D and f rows of the feed-forward. All else but attention is *linear*
    here: matrix products, norms, rotary embedding, activation, sums.
    """

    def __init__(self, model: ModelShape, tp: int, dtype: torch.dtype, device: torch.device) -> None:
        if model.num_attention_heads % tp or model.ffn_hidden_size % tp:
            raise ValueError(f"{model.num_attention_heads} heads do not divide over {tp} ranks; give a divisor")
        self.heads, self.head_size = model.num_attention_heads // tp, model.kv_channels
        hidden, width, ffn = model.hidden_size, self.heads * self.head_size, model.ffn_hidden_size // tp
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
    """One run of this benchmark."""

    def __init__(self, args: Namespace) -> None:
        super().__init__("layer", args)
        quick, tp = args.quick, args.tensor_parallel
        self.job: Job = make_job(
            model=SMALL if quick else replace(MODELS["llama2-7b"], num_layers=1),
            context_length=512 if quick else WINDOW,
            global_batch_size=4,
            parallel=Parallel(tp=tp),
            crossover_tokens=CROSSOVER,  # until section 7 has measured it
        )
        self.shortest, self.samples, self.steps = (64, 1, 2) if quick else (1024, 5, 100)
        """The shortest document of section 7; samples of a measurement; steps of section 2, if there is time."""
        self.layer = Layer(self.job.model, tp, self.dtype, self.device)
        self.settings |= {"tensor_parallel": tp, "model": asdict(self.job.model), "window": self.job.context_length}
        self.settings |= {"samples": self.samples, "paper": PAPER}

    def inputs(self, plan: ShardPlan) -> tuple[Tensor, Tensor, Rank]:
        """x, rotation and the only rank of a micro-batch in one piece."""
        tokens, hidden = int(plan.lengths.sum()), self.job.model.hidden_size
        generator = torch.Generator(self.device).manual_seed(tokens)
        x = torch.randn(tokens, hidden, generator=generator, device=self.device, dtype=self.dtype)
        rotation = rotation_of(plan.lengths, self.layer.head_size, self.dtype, self.device)
        return x, rotation, ranks(plan, self.backend, self.device)[0]

    def median_ms(self, call: Callable[[], Any]) -> Row:
        """Device time after a first call that does not count: median, least and largest."""
        call()
        return spread("ms", [self.clock.ms(call) for _ in range(self.samples)])


def main() -> None:
    parser = command_line(__doc__, "72", last="section 2 begins no step that would end later")
    parser.add_argument("--tensor-parallel", type=int, default=8, help="ranks that share the layer; 8 as in 7B-128K")
    bench = LayerBench(parser.parse_args())
    for section, run in {"7": figure_7, "2": table_2}.items():
        if section in bench.args.sections:
            with bench.case(section=section):
                bench.clock.reserve()
                run(bench)
    bench.conclude()


def figure_7(bench: LayerBench) -> None:
    """Section 7."""
    lengths, both, length = [], [], bench.shortest
    while length <= bench.job.context_length:
        row: Row = {"section": "7", "document_length": length}
        with bench.case(**row):
            for name, call in layer_calls(bench, whole(np.array([length]))).items():
                row |= {f"{name}_{key}": value for key, value in bench.median_ms(call).items()}
            bench.add(row)
            lengths.append(length)
            both.append([sum(row[f"{p}_{d}_ms"] for d in ("forward", "backward")) for p in ("attention", "linear")])
        length *= 2
    tokens = bench.settings["crossover_tokens"] = crossover(np.array(lengths), np.array(both))
    bench.job = replace(bench.job, crossover_tokens=tokens)
    bench.say(f"attention takes as long as all else at {tokens} tokens")


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
    documents = pieces(scaled, bench.job.context_length, 0)
    packers = {name: packer(documents, replace(bench.job, packing=p)) for name, p in policies(bench.job).items()}
    for by_policy in packers.values():
        for _ in range(SKIPPED):
            by_policy.next()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in packers}
    longest, before = 0.0, list(bench.rows)
    for step in range(1, bench.steps + 1):
        begin = bench.seconds
        for name, by_policy in packers.items():
            packing_begin = time.perf_counter()
            packing = by_policy.next().packing
            packing_ms = (time.perf_counter() - packing_begin) * 1e3
            ms = np.array([forward_ms(bench, lengths) for lengths in packing.lengths])
            found[name].append((imbalance(ms), float(ms.sum()), packing_ms))
        bench.rows = before + [policy_row(name, steps) for name, steps in found.items()]
        if step % 10 == 0:
            bench.write()
        longest = max(longest, bench.seconds - begin)
        if longest > bench.seconds_left:
            break
    for row in bench.rows[len(before) :]:
        bench.say(f"{row['policy']}: imbalance {row['imbalance']:.4g} in {row['steps']} steps")
        if row["policy"] == "ours":
            bench.goal("2: imbalance of forward latency, ours", row["imbalance"], "<=", PAPER["WLB-LLM, 2 queues"])


def policy_row(policy: str, steps: list[tuple[float, float, float]]) -> Row:
    """The row of a policy from (imbalance, forward ms, packing ms) of every step."""
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


def policies(job: Job) -> dict[str, Packing]:
    """Those of Table 2 but the solver, and ours, by name."""
    queues = [tuple(round(share * job.context_length) for share in shares) for shares in QUEUES]
    return {
        "original": OriginalPacking(),
        **{f"fixed, {k} global batches": FixedPacking(global_batches=k) for k in (1, 2, 4, 8)},
        **{f"WLB-LLM, {len(each)} queues": WlbPacking(outlier_thresholds=each) for each in queues},
        "ours": AdaptivePacking(),
    }


def forward_ms(bench: LayerBench, lengths: np.ndarray) -> float:
    """Time of the layer's forward pass over a micro-batch of documents, in ms."""
    x, rotation, rank = bench.inputs(whole(padded(lengths, bench.job.unit_tokens)))
    call = partial(bench.layer.forward, x, rotation, rank, bench.options)
    return float(bench.median_ms(call)["ms"])


if __name__ == "__main__":
    main()
