"""Attention of context-parallel ranks on the CPU: our `cpu` backend against torch alone, forward and backward.

    python -m benchmarks.cp_attention_cpu [--quick] [--check]

The ranks of a micro-batch run one after the other, all of K and V at hand. Torch alone is what one would write without
our backend: scaled_dot_product_attention segment by segment, causal where a segment begins its document and with a mask
aligned to the bottom right where it does not; or once under one mask for all queries and keys of a rank. Masks are made
before. Results are compared with float64 first. Writes benchmarks/results/cp_attention_cpu.json in about 12 minutes;
threads that have to share cores with others wait for each other.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks import results
from benchmarks.gpu.ranks import CopyFree, Rank, Rows, both, random_rows, ranks
from benchmarks.results import Row
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.backends.cpu import SegmentRows
from megatron_wlb.sharding import per_document
from tests.runtime.oracle import TOLERANCE, relative_error

TOKENS, HEAD_SIZE = 4096, 64
CPU = torch.device("cpu")
GOAL = 1.3
LEAST_ROUNDS = 5
OURS = "ours"
Gradients = tuple[Tensor, ...]  # out and dq [s, Hq, D], dk and dv [P, Hkv, D]
Call = Callable[[], Gradients]


class Case(NamedTuple):
    name: str
    lengths: np.ndarray
    cp: int
    heads: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float32


def documents(count: int) -> np.ndarray:
    """Log-normal lengths, TOKENS in all."""
    drawn = np.random.default_rng(0).lognormal(0, 1, count)
    ends = np.rint(np.cumsum(drawn) / drawn.sum() * TOKENS).astype(np.int64)
    return np.diff(ends, prepend=0)


MAIN = "20 documents, CP=4"
CASES = (
    Case(MAIN, documents(20), 4),
    *(Case(f"20 documents, CP={cp}", documents(20), cp) for cp in (1, 2, 8)),
    Case("3 long documents, CP=4", np.array([2500, 1500, 96], np.int64), 4),
    Case(f"{MAIN}, GQA", documents(20), 4, heads=(8, 2)),
    Case(f"{MAIN}, bf16", documents(20), 4, dtype=torch.bfloat16),
)


def ours(rank: Rank, local: Rows, backend: str = "cpu") -> Call:
    method = CopyFree(rank, AttentionOptions(backend=get_backend(backend, CPU)))

    def call() -> Gradients:
        out, dq, dkv = both(method, local)
        return out, dq, *dkv.unbind(1)

    return call


def by_segment(rank: Rank, local: Rows) -> Call:
    """One call for each segment. Keys are split by document, so that autograd adds up no more than a document."""
    found = rank.segments
    ends: dict[int, int] = {}
    for s in found:
        ends[s.k_start] = max(s.k_stop, ends.get(s.k_start, 0))
    begins = sorted(ends)
    documents, queries = [ends[begin] - begin for begin in begins], [s.q_stop - s.q_start for s in found]
    which, keys = [begins.index(s.k_start) for s in found], [s.k_stop - s.k_start for s in found]
    masks = [None if s.k_split == s.k_start else _hidden(s, local.q.dtype) for s in found]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ks, vs = k.split(documents, dim=2), v.split(documents, dim=2)
        outs = [
            _sdpa(part, ks[d][:, :, :n], vs[d][:, :, :n], attn_mask=mask, is_causal=mask is None)
            for part, d, n, mask in zip(q.split(queries, dim=2), which, keys, masks, strict=True)
        ]
        return torch.cat(outs, dim=2)

    return partial(_by_autograd, attend, local)


def by_mask(rank: Rank, local: Rows) -> Call:
    """One call for everything."""
    mask = torch.full((rank.metadata.num_rows, len(rank.keys)), -torch.inf, dtype=local.q.dtype)
    for s in rank.segments:
        mask[s.q_start : s.q_stop, s.k_start : s.k_stop] = _hidden(s, mask.dtype)
    return partial(_by_autograd, lambda q, k, v: _sdpa(q, k, v, attn_mask=mask), local)


def _hidden(s: SegmentRows, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a segment: -inf for the keys behind a query."""
    scores = torch.full((s.q_stop - s.q_start, s.k_stop - s.k_start), -torch.inf, dtype=dtype)
    return scores.triu(1 + s.k_split - s.k_start)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


def _by_autograd(attend: Callable[[Tensor, Tensor, Tensor], Tensor], local: Rows) -> Gradients:
    """`attend` takes and gives [1, heads, rows, D]."""
    leaves = [x.detach().requires_grad_() for x in (local.q, *local.kv.unbind(1))]
    out = attend(*(x.transpose(0, 1)[None] for x in leaves))[0].transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, local.dout)


METHODS = {OURS: ours, "by segment": by_segment, "one mask": by_mask}


def check(case: Case, rank: Rank, local: Rows, calls: dict[str, Call]) -> None:
    """Raise ValueError where a method is not float64, one key head after the other, as norms."""
    group = case.heads[0] // case.heads[1]
    found = {method: call() for method, call in calls.items()}
    for head in range(case.heads[1]):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        q, kv, dout = (x.double() for x in local)
        part = Rows(q[:, queries], kv[:, :, keys], dout[:, queries])
        want = ours(rank, part, "reference")()
        for method, tensors in found.items():
            for x, y, heads in zip(tensors, want, (queries, queries, keys, keys), strict=True):
                error = relative_error(x[:, heads], y)
                if not error <= TOLERANCE[case.dtype]:
                    raise ValueError(f"{case.name}, rank {rank.metadata.cp_rank}: {method} is off by {error:.1e}")


def prepare(case: Case) -> list[dict[str, Call]]:
    """What is measured, for every rank; checked."""
    micro_batch = random_rows(int(case.lengths.sum()), case.heads, HEAD_SIZE, case.dtype, CPU)
    plan = per_document(case.lengths, case.cp)
    calls = []
    for rank, exact in zip(*(ranks(plan, get_backend(name, CPU), CPU) for name in ("cpu", "reference")), strict=True):
        local = rank.local(micro_batch)
        calls.append({method: make(rank, local) for method, make in METHODS.items()})
        check(case, exact, local, calls[-1])
    return calls


def measure(case: Case, calls: list[dict[str, Call]], threads: int, seconds: float) -> list[Row]:
    """One row a method, methods by turns for `seconds`: sum over ranks and slowest rank, medians over rounds."""
    torch.set_num_threads(threads)
    rounds: list[list[list[float]]] = []
    begin = time.perf_counter()
    while len(rounds) < LEAST_ROUNDS or time.perf_counter() - begin < seconds:
        rounds.append([[_ms(of_rank[method]) for of_rank in calls] for method in METHODS])
    ms = np.array(rounds)  # [rounds, methods, ranks]
    rows = []
    for i, method in enumerate(METHODS):
        row: Row = {"case": case.name, "threads": threads, "method": method, "rounds": len(rounds)}
        for what, reduced in (("total", ms.sum(axis=2)), ("slowest", ms.max(axis=2))):
            row |= results.spread(f"{what}_ms", reduced[:, i])
            row |= results.spread(f"{what}_over_ours", reduced[:, i] / reduced[:, 0])
        rows.append(row)
    return rows


def _ms(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def goals(rows: list[Row]) -> list[results.Goal]:
    return [
        results.at_least(
            f"{row['case']}, {row['threads']} threads: {row['method']} over ours, {what}",
            row[f"{what}_over_ours"],
            GOAL,
        )
        for row in rows
        if row["case"] == MAIN and row["method"] != OURS
        for what in ("total", "slowest")
    ]


def show(rows: list[Row]) -> None:
    columns = ("case", "threads", "method", "total_ms", "total_ms_min", "total_ms_max", "slowest_ms")
    columns += ("total_over_ours", "slowest_over_ours")
    results.show(rows, columns)


def main() -> None:
    args = results.parser(__doc__, "seconds: one case, one thread, nothing written").parse_args()
    rows = []
    for case in track(CASES[:1] if args.quick else CASES, "attending"):
        calls = prepare(case)
        for threads in (1,) if args.quick else sorted({1, os.cpu_count() or 1}):
            rows += measure(case, calls, threads, 5 if args.quick else 25)
    show(rows)
    settings: Row = {"tokens": TOKENS, "head_size": HEAD_SIZE, "sharding": "per-document"}
    settings["cases"] = [c._asdict() | {"lengths": c.lengths.tolist(), "dtype": str(c.dtype)} for c in CASES]
    results.finish(args, "cp_attention_cpu", settings=settings, rows=rows, goals=goals(rows))


if __name__ == "__main__":
    main()
