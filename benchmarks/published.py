"""Speeds that the cost model predicts, over speeds that others measured and published.

    python -m benchmarks.published [FILE] [--json FILE] [--check]

FILE has a row for every publication. Without one, benchmarks/data/published.json is predicted, and
benchmarks/results/published.json written. Nothing is fitted to a row that is scored: bars of attention kernels are
predicted by profiles of other bars. What a row leaves open is what its software does (`RUNS`), or else: a layer a
virtual stage as in most of NVIDIA's recipes, micro-batches of one window, windows of one document, 4 M tokens a step.
Rows that cannot be predicted are listed with the reason.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import attention, cp_peers, results
from benchmarks.lengths import DATA, padded
from benchmarks.results import Row
from megatron_wlb.cli.profile import predict as predict_times
from megatron_wlb.cost.linear import memory_bound, products
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.megatron import tp_overlap
from megatron_wlb.hardware.profile import Profile, load_profile
from megatron_wlb.job import Job, Parallel, Recompute
from megatron_wlb.model import MODELS, ModelShape
from megatron_wlb.pipeline.split import Split, laid_out
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import Passes, pass_times
from megatron_wlb.simulate.step import step_of

STEP_TOKENS = 4 << 20
"""Of a step whose size is not published, as NVIDIA's other table of long sequences has it."""
NUMBERS = ("predicted", "measured", "attention", "kernels", "ratio")
PEAK_TFLOPS = 989
PACKS = 20
"""Packs of documents that MagiAttention draws for a bar, which is the mean of their rates."""
FP8 = 1402.6 / 794.5
"""Best rates of FP8 and bf16 products on an H100 (stas00/ml-engineering, compute/accelerator/README.md)."""
POWER = 500 / 700
"""Of Meta's H100s. At the limit, power goes with the cube of the clock."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a row's software does and the row does not say."""

    kernels: str = "h100-cudnn"
    tp_comm_overlap: bool = False
    recompute: str = ""
    """full; op: half of the products, and all that is memory-bound; "": what the row says."""
    lora: bool = False
    layer_a_stage: bool = False
    """The published table has no virtual stages."""
    deepep: bool = False
    """A row of tokens is sent once to a node, not once to every expert there."""


RUNS = (
    (r"torchtitan.*asyncTP", Run(kernels="h100-fa2")),
    (r"torchtitan.*table [13]", Run(kernels="h100-fa2", recompute="op")),
    (r"torchtitan.*h200", Run(kernels="h100-fa2", recompute="op")),
    (r"torchtitan.*async TP", Run(kernels="h100-fa2", tp_comm_overlap=True)),
    (r"torchtitan", Run(kernels="h100-fa2")),
    (r"llama-3\.1", Run(kernels="h100-fa2", layer_a_stage=True)),
    (r"NeMo 24\.03", Run(kernels="h100-fa2", tp_comm_overlap=True)),
    (r"Automodel.*LoRA.*(llama3-70b|qwen2\.5-32b)", Run(lora=True, recompute="full")),
    (r"Automodel.*LoRA", Run(lora=True)),
    (r"Automodel.*-1024", Run(deepep=True)),
    (r"Automodel.*(deepseek|kimi|qwen3)", Run(deepep=True, recompute="full")),
    (r"Automodel.*70b", Run(recompute="full")),
    (r"tp-comm-overlap|NVIDIA/NeMo|Megatron-Bridge", Run(tp_comm_overlap=True)),
    (r"", Run()),
)
"""By source, notes and id. torchtitan takes the attention of PyTorch, which preferred FlashAttention-2 at the time, and
its selective recomputation "op" repeats every second product; context parallelism of TransformerEngine 1.5 (NeMo 24.03)
had FlashAttention-2 alone; Llama 3's authors had nothing newer. Automodel's configurations say what it recomputes
(examples/llm_benchmark). TransformerEngine prefers cuDNN on Hopper."""

_MOE = {"gated_linear_unit": True, "padded_vocab_size": 151936, "num_query_groups": 4, "kv_channels": 128}
SHAPES = {
    r"Qwen3.*30B.?A3B|Qwen3.MoE.30B": ModelShape(
        num_layers=48, hidden_size=2048, ffn_hidden_size=8 * 768, num_attention_heads=32, moe_router_topk=8, **_MOE
    ),
    r"Qwen3.*235B": ModelShape(
        num_layers=94, hidden_size=4096, ffn_hidden_size=8 * 1536, num_attention_heads=64, moe_router_topk=8, **_MOE
    ),
    r"DeepSeek.?V3(?!.*proxy)": MODELS["deepseek-v3"],
    r"Kimi K2": replace(MODELS["deepseek-v3"], num_attention_heads=64, num_query_groups=64, padded_vocab_size=163840),
}
"""Published configurations of models that rows only name, with experts in all layers."""
UNSIMULATED = {
    r"GPT.OSS": "sliding windows are not simulated",
    r"Nemotron.*(V3|3|Ultra)": "layers that are no transformer layers are not simulated",
    r"proxy|DSv4": "its layers differ",
}


def asked(row: Row, path: str) -> Any:
    """A field of a row. Raises ValueError if it is missing."""
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise ValueError(f"no {path}")
    return value


def run_of(row: Row) -> Run:
    text = " ".join(str(row.get(name)) for name in ("source", "notes", "id"))
    return next(run for pattern, run in RUNS if re.search(pattern, text))


def model_of(row: Row) -> ModelShape:
    given, name = asked(row, "model"), str(asked(row, "model").get("name"))
    if "layers" not in given:
        for pattern, why in UNSIMULATED.items():
            if re.search(pattern, name, re.IGNORECASE):
                raise ValueError(why)
        for pattern, shape in SHAPES.items():
            if re.search(pattern, name, re.IGNORECASE):
                return shape
        raise ValueError(f"the shape of {name} is not known")
    moe, latents = given.get("moe"), given.get("mla")
    if latents:
        raise ValueError("latents of a shape that is not known")
    width = moe["topk"] * moe.get("moe_ffn", given["ffn"]) + moe.get("shared", 0) if moe else given["ffn"]
    return ModelShape(
        num_layers=given["layers"],
        hidden_size=given["hidden"],
        ffn_hidden_size=width,
        num_attention_heads=given["heads"],
        num_query_groups=given["kv_heads"],
        padded_vocab_size=given["vocab"],
        kv_channels=given.get("head") or given["hidden"] // given["heads"],
        gated_linear_unit=given["gated"],
        moe_router_topk=moe["topk"] if moe else 0,
    )


def profile_of(row: Row, run: Run) -> Profile:
    """The profile of a row's hardware and software."""
    hardware = asked(row, "hardware")
    if not re.search(r"H[18]00", hardware):
        raise ValueError(f"no profile of {hardware}")
    profile = load_profile(run.kernels)
    tflops, memory = profile.assumed_tflops, profile.memory_gb_per_s
    if "500 W" in hardware:
        tflops *= POWER ** (1 / 3)
    if found := re.search(r"([\d.]+) TB/s", hardware):
        memory *= float(found.group(1)) / 3.35
    if str(row.get("precision")).startswith("fp8"):
        tflops *= FP8
    return replace(profile, assumed_tflops=tflops, memory_gb_per_s=memory)


def job_of(row: Row, run: Run) -> Job:
    model, layout, length, gpus = model_of(row), asked(row, "layout"), asked(row, "sequence"), asked(row, "layout.gpus")
    if not isinstance(length, int):
        raise ValueError(f"sequences of {length} tokens")
    tp, cp, pp = (asked(row, f"layout.{name}") for name in ("tp", "cp", "pp"))
    dp, size = gpus // (tp * cp * pp), layout.get("micro_batch") or 1
    batch = row.get("global_batch")
    if isinstance(batch, str):
        stated = re.match(r"(\d+)M tokens", batch)
        if not stated:
            raise ValueError(f"a global batch of {batch}")
        batch = (int(stated.group(1)) << 20) // length
    batch = batch or max(dp, STEP_TOKENS // length)
    vpp = None if run.layer_a_stage else layout.get("vpp")
    if layout.get("schedule") == "1F1B":
        vpp = 1
    layers = model.num_layers
    vpp = vpp or (-(-layers // pp) if pp > 1 else 1)
    split = Split()
    if layers % (pp * vpp):
        dealt = np.full(pp * vpp, -(-layers // (pp * vpp)))
        fewer = int(dealt.sum()) - layers
        dealt[[0, *range(-1, -fewer, -1)][:fewer]] -= 1
        split = laid_out(dealt.reshape(vpp, pp).T)
    profile = profile_of(row, run)
    ep = layout.get("ep") or 1
    if run.deepep and ep > 1:
        nodes, sent = max(1, ep // profile.network.gpus_per_node), model.moe_router_topk
        once = nodes * (1 - (1 - 1 / nodes) ** sent) / sent
        link = profile.network.link_gb_per_s / once
        profile = replace(profile, network=replace(profile.network, link_gb_per_s=link))
    recompute = run.recompute or str(row.get("recompute"))
    return make_job(
        model=model,
        parallel=Parallel(
            tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=1, split=split, group_size=pp if vpp > 1 else None
        ),
        context_length=length,
        global_batch_size=batch,
        num_micro_batches=batch // size,
        max_tokens=size * length,
        crossover_tokens=1,
        profile=profile,
        recompute=Recompute(granularity="full" if recompute.startswith("full") else None),
        tp_overlap=tp_overlap(tp) if run.tp_comm_overlap else 0.0,
        cp_exchange="ring",
        defer_weight_gradients=False,
        hidden_transfers=False,
    ).sharded(cp_sharding="per-document")


def changed(job: Job, passes: Passes, run: Run) -> Passes:
    """The passes with recomputation of half of the products, or without gradients of weights."""
    layers, backward = job.layers()[:, :, None], passes.backward.copy()
    if run.recompute == "op":
        of_products, bound = products(job, job.model.matrices, passes.rows), memory_bound(job, passes.rows)
        backward += layers * (of_products.forward / 2 + bound[0])
    if run.lora:
        backward -= layers * products(job, job.model.matrices, passes.rows).weights
        backward[-1, -1] -= passes.weights[1]
    return replace(passes, backward=backward)


def flops_of(row: Row) -> str:
    """Which FLOPs of attention a row's TFLOP/s count: in full, as Megatron and NeMo did, or the causal half."""
    return row.get("attention_flops") or ("causal" if "llama-3.1" in row["source"] else "full")


def model_flops(model: ModelShape, length: int, causal: bool) -> float:
    """FLOPs of a token in windows of `length`, forward and backward."""
    weights = model.num_layers * model.layer_weights + model.vocabulary_weights
    pairs = length / 2 if causal else length
    return 6 * (weights + model.num_layers * (model.query_size + model.output_size) * pairs)


def training(row: Row) -> Iterator[Row]:
    """Speed of a training step: by tokens where they are published, or else by time or by FLOPs."""
    if "RL" in str(row.get("source")) or "RL" in str(row.get("notes")):
        raise ValueError("the step of reinforcement learning is more than training")
    if str(row.get("notes")) == "eager":
        raise ValueError("operations of eager PyTorch are not those of Megatron's layers")
    run = run_of(row)
    job = job_of(row, run)
    _, plan = shard(np.full(job.max_tokens // job.context_length, job.context_length), job)
    count = job.micro_batches_per_rank
    step = step_of(job, [[plan] * count], [changed(job, pass_times(job, [plan] * count), run)])
    seconds, tokens, gpus = step.time / 1e6, job.batch_tokens, job.parallel.num_gpus
    flops = flops_of(row)
    tflops = model_flops(job.model, job.context_length, flops == "causal") * tokens / gpus / seconds / 1e12
    predicted = {"tokens_per_s_per_gpu": tokens / seconds / gpus, "step_time": seconds, "iteration_time": seconds}
    predicted |= {"tflops_per_gpu": tflops, "mfu": 100 * tflops / PEAK_TFLOPS}
    for name, value in predicted.items():
        for quantity, measured in asked(row, "measured").items():
            if quantity.startswith(name):
                each = {"quantity": quantity, "predicted": value, "measured": measured["value"], "attention": flops}
                yield each | {"kernels": job.profile.name}
                return
    raise ValueError("no speed of a training step")


def kernels(row: Row) -> Iterator[Row]:
    """Kernels of attention alone, by profiles that are not fitted to their publication; forward, backward or both."""
    group = next((name for name in attention.PUBLICATIONS if str(row["source"]).startswith(name)), "")
    length = asked(row, "sequence")
    magi, heads = group == "SandAI-org", attention.PUBLICATIONS[group]["heads"]
    packs = attention.packed_documents(length, PACKS) if magi else [np.full(16384 // length, length)]
    for quantity, measured in asked(row, "measured").items():
        name, _, direction = ("fa2", "", "fwd_bwd") if quantity == "fwd_bwd" else quantity.partition("_")
        directions = {"bwd": ("backward",), "fwd_bwd": ("forward", "backward")}.get(direction, ("forward",))
        if f"h100-{name}" not in attention.HOPPER:
            continue
        fits = [attention.fitted(f"h100-{name}", each, "" if magi else group) for each in directions]
        counts = np.array([attention.counts(lengths, heads) for lengths in packs])
        times = sum(predict_times(each, counts) for each in fits)
        of = [sum(attention.flops(lengths, heads, each) for each in directions) for lengths in packs]
        yield {"quantity": quantity, "predicted": float(np.mean(of / times) / 1e6), "measured": measured["value"]}


def distributed(row: Row) -> Iterator[Row]:
    """A layer's attention under context parallelism, in packs of documents; the ring in two readings, not scored."""
    if not str(row["source"]).startswith("SandAI-org"):
        raise ValueError("its documents are not known")
    cp, length, heads = asked(row, "layout.cp"), asked(row, "sequence"), attention.PUBLICATIONS["SandAI-org"]["heads"]
    model = ModelShape(
        num_layers=1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_attention_heads=heads,
        num_query_groups=8,
        padded_vocab_size=0,
    )
    sizes = {"parallel": Parallel(cp=cp), "context_length": length, "global_batch_size": 1, "crossover_tokens": 1}
    job = make_job(model=model, profile=load_profile("h100-fa3"), **sizes).sharded(cp_sharding="per-document")
    packs = [padded(lengths, 2 * cp) for lengths in attention.packed_documents(length, PACKS)]
    of = np.array([[attention.flops(n, heads, each) / cp for n in packs] for each in ("forward", "backward")])
    timed = [cp_peers.magi_times(cp_peers.magi(lengths, cp), job) for lengths in packs]
    took = {"magi_native": np.array([busy.max(axis=1) + added[:, 0] for busy, added in timed]).T}
    for exchange in ("ring", "thd_ring"):
        ring = replace(job, cp_exchange=exchange)
        layers = pass_times(ring, [shard(lengths, ring)[1] for lengths in packs]).layers
        took[exchange] = np.array([each.attention.max(axis=1) + each.exchange for each in layers])
    for name, times in took.items():
        for direction, rate in zip(("fwd", "bwd"), (of / times).mean(axis=1) / 1e6, strict=True):
            quantity = f"{name.replace('thd_ring', 'ring')}_{direction}".replace("ring_", "ring_p2p_")
            measured = asked(row, f"measured.{quantity}.value")
            each = {"quantity": quantity, "predicted": float(rate), "measured": measured}
            yield each | ({"reading": name} if "ring" in name else {})


def predictions(row: Row) -> Iterator[Row]:
    name = str(asked(row, "model").get("name"))
    of = {"attention,": kernels, "distributed": distributed}.get(name.split(" ")[0], training)
    return of(row)


def predict(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows with the ratio of predicted and measured speed, and rows that cannot be predicted, with the reason."""
    found, left = [], []
    for row in rows:
        same = {"id": row.get("id"), "precision": row.get("precision"), "group": group_of(row)}
        try:
            for each in list(predictions(row)):
                ratio = each["predicted"] / each["measured"]
                found.append(same | each | {"ratio": 1 / ratio if "time" in each["quantity"] else ratio})
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"a field is not as expected: {error!r}"
            left.append({"id": row.get("id"), "reason": reason})
    return found, left


def group_of(row: Row) -> str:
    """The publication, by the repository or site that its source begins with."""
    return re.split(r"[@ ]", str(row.get("source")))[0]


def summary(found: list[Row]) -> list[Row]:
    """Errors by precision and publication, and of all rows of bf16."""
    groups: dict[str, list[float]] = {}
    for row in found:
        is_bf16 = "bf16" in str(row["precision"])
        for name in ["all, bf16"] * is_bf16 + [f"{row['group']}, {'bf16' if is_bf16 else row['precision']}"]:
            groups.setdefault(name, []).append(row["ratio"])
    lines = []
    for name, ratios in groups.items():
        errors = np.abs(np.log(ratios))
        line = {"group": name, "numbers": len(ratios), "ratio": float(np.exp(np.median(np.log(ratios))))}
        line |= {"median_error": float(np.median(errors)), "p90_error": float(np.quantile(errors, 0.9))}
        lines.append(line | {"within_15_percent": float((errors < math.log(1.15)).mean())})
    return lines


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DATA / "published.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="numbers to write")
    args = parser.parse_args()
    every, left = predict(json.loads(args.file.read_text()))
    found, readings = ([row for row in every if ("reading" in row) == is_reading] for is_reading in (False, True))
    groups = summary(found)
    results.show(sorted(found, key=lambda row: row["group"]), ("id", "precision", "quantity", *NUMBERS))
    results.show(readings, ("id", "reading", "quantity", *NUMBERS), title="the ring, not scored")
    results.show(left, title="not predicted")
    results.show(groups, title="|log(predicted / measured)|")
    if args.json:
        results.write_whole(args.json, json.dumps({"rows": found, "readings": readings, "left": left}, indent=1) + "\n")
    of_all = groups[0]
    goals = [
        results.at_most("bf16: median error", of_all["median_error"], 0.06),
        results.at_least("bf16: share within 15 %", of_all["within_15_percent"], 0.9),
    ]
    if args.file == DATA / "published.json":
        settings = {"groups": groups, "readings": readings, "not_predicted": left}
        results.finish(args, "published", settings=settings, rows=found, goals=goals)
    else:
        results.conclude(goals, args.check)


if __name__ == "__main__":
    main()
