"""Speeds that the cost model predicts, over speeds that others measured and published.

    python -m benchmarks.published [FILE] [--json FILE] [--check]

FILE has a row for every publication. Without one, benchmarks/data/published.json is predicted, and
benchmarks/results/published.json written, with ratios of steps for `analyze`. Bars of attention kernels are predicted
by profiles of other bars, but for those of B200, which have one publication alone: MagiAttention's bars give the
profile, and its packs of documents are scored. Steps of mixtures of experts are those that launches, copies of rows and
overlap (`Part.modules`, `layers.experts`) are fitted to, and dense ones of GB200 and GB300 the rates of their products
(`benchmarks.attention`). The fit of the first is repeated without a
model, a release or a GPU in turn (`benchmarks.experts`). What a row leaves open is what its software does (`SOFTWARE`,
or the row's field `software`), or else: a layer a virtual stage as in most of NVIDIA's recipes, micro-batches of one
window, windows of one document, 4 M tokens a step. Rows that cannot be predicted are listed with the reason.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import attention, cp_peers, experts, results
from benchmarks.lengths import DATA, attention_job, padded
from benchmarks.results import Row
from megatron_wlb.cost.linear import memory_bound, output_matrix, products
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.tiles import overlap
from megatron_wlb.hardware.profile import GPUS, Profile, generations, gpu_of, load_profile
from megatron_wlb.job import Job, Parallel, Recompute
from megatron_wlb.model import FULL, MODELS, ModelShape, shape
from megatron_wlb.pipeline.split import Split, laid_out
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate import published as shipped
from megatron_wlb.simulate.passes import Passes, pass_times
from megatron_wlb.simulate.published import LONG
from megatron_wlb.simulate.step import simulate_step, step_of

STEP_TOKENS = 4 << 20
"""Of a step whose size is not published, as NVIDIA's other table of long sequences has it."""
LIMITS = {
    "bf16 dense": (0.05, 0.15),
    "FP8 dense": (0.05, 0.15),
    "Blackwell dense": (0.08, 0.18),
    "long": (0.06, 0.15),
    "MoE": (0.09, 0.2),
}
"""Goals for errors of training steps, median and 90th percentile; a row of Hopper may be long, too."""
NUMBERS = ("predicted", "measured", "attention", "profile", "ratio")
KERNELS = {f"h100 {name.removeprefix('h100-')}": name for name in attention.HOPPER}
KERNELS |= {"b200 cudnn": "b200-cudnn-2025", "b200 fa4": "b200-fa4"}
"""Profiles of bars, by GPU and kernel."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a row's software does and the row's other fields do not say; a row's `software` may have these fields."""

    generations: Sequence[str] = ()
    """Of a GPU's profile, behind its name: the first that is shipped; (): the GPU's default."""
    fp8: str = "delayed"
    """The recipe of plain FP8."""
    tp_comm_overlap: bool = False
    dispatcher: str = "alltoall"
    cuda_graphs: Sequence[str] = ()
    overlaps_experts: bool = False
    fused_experts: bool = False
    fp8_attention: bool = False
    mtp: int = 0
    """Layers for multi-token prediction."""
    recompute_modules: Sequence[str] = ()
    recompute: str = ""
    """full; "": what the row says, where selective is half of the products, and all that is memory-bound."""
    lora: bool = False
    layer_a_stage: bool = False
    """The published table has no virtual stages."""
    layers_a_stage: int = 0
    """Of virtual stages, rounded down to as many on every rank; the first have what is left. 0: as the row says."""
    per_drain: int = 0
    """Micro-batches after which a pipeline drains; 0: all of a step."""
    dealt: bool = False
    """Experts are dealt to tokens in turn: those of a token are neighbours, to whom it is sent once."""
    fsdp: bool = False
    """FSDP2: copies parameters that were gathered, twice, and gradients to be reduced, and leaves tensor-parallel
    communication exposed."""
    unsimulated: str = ""
    """Why its steps cannot be predicted."""


FLAGS = ("tp_comm_overlap", "dispatcher", "cuda_graphs", "overlaps_experts", "fused_experts", "fp8_attention")
UNSTATED = {name: getattr(Run(), name) for name in (*FLAGS, "recompute_modules", "generations")}
"""Fields of a run of which no flags and no release are known."""
SOFTWARE = json.loads((DATA / "software.json").read_text())
"""How a row's source begins, a release, patterns of fields of a row, and fields of `Run` that such rows have from the
release on, unless a later entry changes them. torchtitan takes PyTorch's attention, which
preferred FlashAttention-2 at the time, and its selective recomputation repeats every second product. Context
parallelism of TransformerEngine 1.5 (NeMo 24.03) had FlashAttention-2 alone; Llama 3's authors had nothing newer.
NVIDIA's containers of 2025 have products of TransformerEngine's measurement. Automodel's configurations of the time of
its table (examples/benchmark) recompute all models but small ones with LoRA, drain pipelines every 8 sequences and have
a fake router, which deals experts in turn. Bridge's tables are of recipes (scripts/performance/configs at the release's
tag, v0.2.0 for 25.11 to v0.5.1; src/megatron/bridge/perf_recipes since), which state graphs, overlap, dispatcher, fused
experts, FP8 attention, recomputed modules and MTP; they route by force to equally many tokens an expert."""

SHAPES = {
    r"Qwen3.*30B.?A3B|Qwen3.MoE.30B": MODELS["qwen3-30b-a3b"],
    r"Qwen3.*235B": MODELS["qwen3-235b-a22b"],
    r"DeepSeek.?V3(?!.*proxy)": MODELS["deepseek-v3"],
    r"Kimi K2": replace(
        MODELS["deepseek-v3"],
        num_attention_heads=64,
        num_query_groups=64,
        padded_vocab_size=163840,
        num_experts=384,
        moe_router_num_groups=1,
        moe_router_group_topk=1,
        pattern="*-" + "*" * 60,
    ),
}
"""Published configurations of models that rows only name."""
UNSIMULATED = {
    r"GPT.?OSS": "biased and clamped experts and learned sinks are not simulated",
    r"Nemotron.*(V3|3|Ultra)": "the rates of scans are assumed, and not scored",
    r"proxy|DSv4": "its layers differ",
}


def stated(row: Row, path: str) -> Any:
    """A field of a row, or None."""
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def asked(row: Row, path: str) -> Any:
    """A field of a row. Raises ValueError if it is missing."""
    if (value := stated(row, path)) is None:
        raise ValueError(f"no {path}")
    return value


def length_of(row: Row) -> int:
    length = asked(row, "sequence")
    if not isinstance(length, int):
        raise ValueError(f"sequences of {length} tokens")
    return length


def run_of(row: Row) -> Run:
    """What a row's software does, by its field `software`, and else by the repository and release of its source."""
    source, found = str(row.get("source")), Run()
    released = re.search(r"\((?:NeMo )?(\d\d\.\d\d(?:\.\d\d)?)", source)
    for begins, since, where, fields in SOFTWARE:
        if not re.match(begins, source) or (released and since > released[1]):
            continue
        if all(re.search(pattern, str(stated(row, path))) for path, pattern in where.items()):
            found = replace(found, **fields)
    if row.get("notes") == "eager":
        raise ValueError("operations of eager PyTorch are not those of Megatron's layers")
    run = replace(found, **row.get("software", {}))
    if "sft" in str(row.get("id")).split("-") and "documents" not in row:
        raise ValueError("packs of documents whose lengths are not published")
    if run.unsimulated:
        raise ValueError(run.unsimulated)
    return replace(run, lora=run.lora or "lora" in f"{row.get('id')} {row.get('source')}".lower())


def model_of(row: Row) -> ModelShape:
    given, name = asked(row, "model"), str(asked(row, "model").get("name"))
    if "layers" not in given:
        for pattern, why in UNSIMULATED.items():
            if re.search(pattern, name, re.IGNORECASE):
                raise ValueError(why)
        for pattern, known in SHAPES.items():
            if re.search(pattern, name, re.IGNORECASE):
                return known
        raise ValueError(f"the shape of {name} is not known")
    moe, latents = given.get("moe"), given.get("mla")
    if latents:
        raise ValueError("latents of a shape that is not known")
    width = moe["topk"] * moe.get("moe_ffn", given["ffn"]) + moe.get("shared", 0) if moe else given["ffn"]
    return shape(
        *(given["layers"], given["hidden"], width, given["heads"], given["kv_heads"], given["vocab"]),
        kv_channels=given.get("head") or given["hidden"] // given["heads"],
        gated_linear_unit=given["gated"],
        moe_router_topk=moe["topk"] if moe else 0,
        num_experts=moe["experts"] if moe else 0,
    )


def profile_of(row: Row, run: Run) -> tuple[Profile, str]:
    """The profile of a row's hardware and software, and the precision of its products."""
    hardware, named = asked(row, "hardware"), str(row.get("precision"))
    gpu = gpu_of(re.sub(r"\d+x", "", hardware))
    if gpu is None:
        raise ValueError(f"no profile of {hardware}")
    names = [f"{gpu}-{each}" for each in run.generations] or [GPUS[gpu]]
    chosen = next((name for name in names if name in generations(gpu)), None)
    if chosen is None:
        raise ValueError(f"no profile of {hardware} with {' or '.join(run.generations)}")
    profile, others = load_profile(chosen), {"fp16": "bf16", "fp8": run.fp8, "fp8 linears": run.fp8}
    precision = others.get(named, named.removeprefix("fp8-").replace("current", "tensorwise"))
    if precision not in ("bf16", *(recipe for recipe, *_ in profile.gains)):
        raise ValueError(f"no rate of products in {named} on {hardware}")
    if found := re.search(r"([\d.]+) TB/s", hardware):
        profile = replace(profile, memory_gb_per_s=profile.memory_gb_per_s * float(found[1]) / 3.35)
    if "power-limited" in hardware:
        raise ValueError("its power is limited, to how many watts is not published")
    if "500 W" in hardware:  # as Meta's H100s; at the limit, power goes with the cube of the clock
        profile = replace(profile, assumed_tflops=profile.assumed_tflops * (500 / 700) ** (1 / 3))
    return profile, precision


def job_of(row: Row, run: Run) -> Job:
    """The job of a row; of a step whose pipeline drains more than once, what runs until it first does."""
    model = replace(model_of(row), mtp_num_layers=run.mtp)
    layout, length, gpus = asked(row, "layout"), length_of(row), asked(row, "layout.gpus")
    tp, cp, pp = (asked(row, f"layout.{name}") for name in ("tp", "cp", "pp"))
    dp, size = gpus // (tp * cp * pp), layout.get("micro_batch")
    if not dp:
        raise ValueError(f"{gpus} GPUs for TP {tp}, CP {cp} and PP {pp}")
    batch = row.get("global_batch")
    if isinstance(batch, str):
        batch = (int(batch.removesuffix("M tokens")) << 20) // length
    batch = batch or max(dp, STEP_TOKENS // length)
    if run.per_drain and pp > 1:
        size = size or max(1, batch // (dp * run.per_drain))
        batch = min(batch, dp * size * run.per_drain)
    size = size or 1
    if group_of(row) == "pytorch/torchtitan" and tp * cp > 1:
        raise ValueError("neither async TP nor the ring of PyTorch is simulated")
    layers, vpp = model.num_layers, layout.get("vpp")
    if pp == 1:
        vpp = 1
    elif run.layer_a_stage:
        vpp = None
    elif run.layers_a_stage:
        vpp = max(1, -(-layers // run.layers_a_stage) // pp)
    vpp = vpp or -(-layers // pp)
    if pp * vpp > layers + pp:
        raise ValueError(f"{layers} layers for {pp * vpp} virtual stages")
    split, stages = Split(), pp * vpp
    if ends := layout.get("end_layers"):
        split = Split(decoder_first_pipeline_num_layers=ends[0], decoder_last_pipeline_num_layers=ends[1])
    elif run.mtp and stages > 1:
        # As in DeepSeek-V3's layouts: MTP and the loss take the place of layers of the last virtual stage.
        dealt = np.full(stages, -(-(layers + 2 * run.mtp) // stages))
        fewer = dealt.sum() - layers
        dealt[-1] -= min(fewer, dealt[-1])
        dealt[0] -= dealt.sum() - layers
        split = laid_out(dealt.reshape(vpp, pp).T)
    elif more := layers % stages:
        dealt, fewer = np.full(stages, layers // stages + 1), stages - more
        dealt[range(more, stages) if run.layers_a_stage else [0, *range(-1, -fewer, -1)][:fewer]] -= 1
        split = laid_out(dealt.reshape(vpp, pp).T)
    profile, precision = profile_of(row, run)
    if run.dealt and model.moe_router_topk:
        network = profile.network
        faster = [rate * model.moe_router_topk for rate in (network.link_gb_per_s, *network.all_gather.gb_per_s)]
        gather = network.all_gather._replace(gb_per_s=tuple(faster[1:]))
        profile = replace(profile, network=replace(network, link_gb_per_s=faster[0], all_gather=gather))
    # Small models with LoRA are not recomputed.
    recompute = str(row.get("recompute")) if run.lora and tp == 1 else run.recompute or str(row.get("recompute"))
    again = Recompute(granularity="selective" if run.recompute_modules else None, modules=tuple(run.recompute_modules))
    if recompute.startswith("full"):
        again = Recompute(granularity="full")
    return make_job(
        model=model,
        parallel=Parallel(
            **{"tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "ep": layout.get("ep") or 1},
            **{"etp": layout.get("etp") or 1, "split": split, "group_size": pp if vpp > 1 else None},
        ),
        context_length=length,
        global_batch_size=batch,
        num_micro_batches=batch // size,
        max_tokens=size * length,
        crossover_tokens=1,
        profile=profile,
        precision=precision,
        moe_dispatcher=run.dispatcher,
        cuda_graphs=tuple(run.cuda_graphs),
        overlaps_experts=run.overlaps_experts,
        fused_experts=run.fused_experts,
        fp8_attention=run.fp8_attention,
        recompute=again,
        tp_overlap=overlap(tp) if run.tp_comm_overlap else 0.0,
        cp_exchange="ring",
        overlap_transfers=False,
    ).sharded(cp_sharding="per-document")


def changed(row: Row, job: Job, passes: Passes, run: Run) -> Passes:
    """The passes with what a row's software does otherwise than Megatron."""
    layers, forward, backward = job.layers()[:, :, None], passes.forward.copy(), passes.backward.copy()
    model, (first, last), is_full = job.model, passes.layers, job.recompute.granularity == "full"
    if run.fsdp and str(row.get("recompute")).startswith("selective"):
        backward += layers * (products(job, model.matrices, passes.rows).forward / 2)
        backward += layers * memory_bound(job, FULL, passes.rows)[0]
    if run.lora:
        backward -= layers * products(job, model.matrices, passes.rows).weights
        backward[-1, -1] -= products(job, [output_matrix(job)], passes.rows).weights
    if run.fsdp and not run.tp_comm_overlap:
        backward += layers * ((1.5 + is_full) * first.tensor - last.tensor)
    if run.fsdp and job.parallel.pp == 1 and job.parallel.num_gpus > job.parallel.tp:
        # Reads and writes of what is gathered, in bf16, and of gradients, which become fp32.
        weights = model.num_layers * (model.layer_weights - model.expert_weights) + 2 * model.vocabulary_weights
        for_byte = weights / job.parallel.tp / job.profile.memory_gb_per_s / 1e3
        forward, backward = forward + 4 * for_byte, backward + (4 if run.lora else 10) * for_byte
    return replace(passes, forward=forward, backward=backward)


def timed(row: Row, run: Run) -> tuple[Job, float]:
    """The job of a row, and the predicted seconds of its step."""
    job = job_of(row, run)
    plan = shard(np.full(job.max_tokens // job.context_length, job.context_length), job)
    count = job.micro_batches_per_rank
    step = step_of(job, [[plan] * count], [changed(row, job, pass_times(job, [plan] * count), run)])
    return job, step.time / 1e6


def training(row: Row) -> Iterator[Row]:
    """Speed of a training step: by tokens where they are published, or else by time or by FLOPs."""
    named = ("tokens_per_s_per_gpu", "step_time", "iteration_time", "tflops_per_gpu", "mfu")
    quantity = next((each for name in named for each in asked(row, "measured") if each.startswith(name)), None)
    if quantity is None:
        raise ValueError("no speed of a training step")
    run = run_of(row)
    job, seconds = timed(row, run)
    tokens, gpus = job.batch_tokens, job.parallel.num_gpus
    # A row's TFLOP/s count attention in full, as Megatron and NeMo did, or the causal half.
    flops = row.get("attention_flops") or ("causal" if "llama-3.1" in row["source"] else "full")
    model, pairs = job.model, job.context_length / (2 if flops == "causal" else 1)
    layers, ahead = model.num_layers + model.mtp_num_layers, model.mtp_num_layers
    weights = layers * model.layer_weights + (1 + ahead) * model.vocabulary_weights + ahead * model.joining.weights
    of_token = 6 * (weights + layers * (model.query_size + model.output_size) * pairs)
    tflops = of_token * tokens / gpus / seconds / 1e12
    value = 100 * tflops / 989 if quantity.startswith("mfu") else tflops
    if "time" in quantity:
        value = seconds
    elif quantity.startswith("tokens"):
        value = tokens / seconds / gpus
    measured = asked(row, f"measured.{quantity}.value")
    each = {"quantity": quantity, "predicted": value, "measured": measured, "attention": flops}
    kind = "MoE" if job.model.moe_router_topk else "FP8 dense" if job.precision != "bf16" else "bf16 dense"
    if kind != "MoE" and re.match("g?b[23]00", job.profile.name):
        kind = "Blackwell dense"
    kinds = [kind, *["long"] * (job.context_length >= LONG and kind != "MoE")]
    each |= {"profile": job.profile.name, "kinds": kinds, "like": like(job)}
    if kind == "MoE":
        each["unstated"] = timed(row, replace(run, **UNSTATED))[1] / seconds
    yield each


def like(job: Job) -> list[Any]:
    """The fields of `shipped.Row` by which a run finds a row."""
    long, gpu = job.context_length >= LONG, gpu_of(job.profile.device or "")
    return [bool(job.model.moe_router_topk), gpu, shipped.precision_of(job.precision), long]


def ratios_of(row: Row) -> list[float | None]:
    """The last fields of `shipped.Row`."""
    unstated = row["ratio"] / row["unstated"] if "unstated" in row else None
    return [each and round(each, 3) for each in (row["ratio"], unstated)]


def ship(found: list[Row]) -> None:
    """Write the ratios of steps, which `analyze` shows of those that are like a run's."""
    rows = [json.dumps([*row["like"], *ratios_of(row)]) for row in found if "like" in row]
    path = Path(shipped.__file__).parents[1] / "hardware" / "published.json"
    results.write_whole(path, "[\n" + ",\n".join(sorted(rows)) + "\n]\n")


def documents_of(row: Row, group: str) -> list[np.ndarray]:
    """The packs of documents of a row of kernels, or its one batch of equal documents. Raises ValueError."""
    length, name = length_of(row), str(row["model"]["name"])
    if re.search("head", name) and not re.search(r"head 128|heads of 128", name):
        raise ValueError("no kernels for heads of its size")
    if "packed documents" in name:
        return attention.packed_documents(length, attention.PACKS)
    if "causal" not in name:
        raise ValueError("a mask that is not causal")
    return [np.full(max(1, attention.PUBLICATIONS[group].get("tokens", 0) // length), length)]


def kernels(row: Row) -> Iterator[Row]:
    """Kernels of attention alone, by profiles that are not fitted to their publication; forward, backward or both."""
    group, hardware = group_of(row).split("/")[0], asked(row, "hardware")
    if group not in ("Dao-AILab", "SandAI-org"):
        raise ValueError("profiles are fitted to its bars, or its heads are not known")
    packs, heads = documents_of(row, group), attention.PUBLICATIONS[group]["heads"]
    gpu = gpu_of(hardware.replace("H800", "H100"))  # which compute alike
    # Packs are no bars of a fit. Bars of H100 are of two publications, others of the one that they are fitted to.
    without = "" if len(packs) > 1 else group
    if not re.match("bf16|fp16", str(row.get("precision"))) or (gpu != "h100" and not (gpu == "b200" and not without)):
        raise ValueError(f"no kernels of {row.get('precision')} on {hardware} that are not fitted to its bars")
    for quantity, measured in asked(row, "measured").items():
        name, _, direction = ("fa2", "", "fwd_bwd") if quantity == "fwd_bwd" else quantity.partition("_")
        directions = {"bwd": ("backward",), "fwd_bwd": ("forward", "backward")}.get(direction, ("forward",))
        if (kernel := KERNELS.get(f"{gpu} {name}")) is None:
            continue
        fits = [attention.fitted(kernel, each, without) for each in directions]
        predicted = attention.rate(packs, heads, directions, fits)
        yield {"quantity": quantity, "predicted": predicted, "measured": measured["value"]}


def distributed(row: Row) -> Iterator[Row]:
    """A layer's attention under context parallelism, in packs of documents; the ring is a reading, not scored."""
    if group_of(row) != "SandAI-org/MagiAttention" or gpu_of(asked(row, "hardware")) != "h100":
        raise ValueError("its documents or its kernels are not known")
    cp, length, heads = asked(row, "layout.cp"), length_of(row), attention.PUBLICATIONS["SandAI-org"]["heads"]
    sizes = {"parallel": Parallel(cp=cp), "global_batch_size": 1, "crossover_tokens": 1, "cp_exchange": "shared"}
    job = attention_job(length, (heads, 8), cp, profile=load_profile("h100-fa3"), **sizes)
    job = job.sharded(cp_sharding="per-document")
    packs = [padded(lengths, 2 * cp) for lengths in documents_of(row, "SandAI-org")]
    of = np.array([[attention.flops(n, heads, each) / cp for n in packs] for each in ("forward", "backward")])
    timed = [cp_peers.magi_times(cp_peers.magi(lengths, cp), job) for lengths in packs]
    took = {"magi_native": np.array([busy.max(axis=1) + added[:, 0] for busy, added in timed]).T}
    ring = replace(job, cp_exchange="ring")
    layers = pass_times(ring, [shard(lengths, ring) for lengths in packs]).layers
    took["ring"] = np.array([each.attention.max(axis=1) + each.exchange for each in layers])
    for name, times in took.items():
        for direction, rate in zip(("fwd", "bwd"), (of / times).mean(axis=1) / 1e6, strict=True):
            quantity = f"{name}_{direction}".replace("ring_", "ring_p2p_")
            if quantity in asked(row, "measured"):
                each = {"quantity": quantity, "predicted": float(rate), "measured": row["measured"][quantity]["value"]}
                yield each | ({"reading": name} if name == "ring" else {})


def predict(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Rows with the ratio of predicted and measured speed, and rows that cannot be predicted, with the reason."""
    found, left = [], []
    for row in rows:
        same = {"id": row.get("id"), "precision": row.get("precision"), "group": group_of(row)}
        try:
            kind = str(asked(row, "model").get("name")).split(" ")[0]
            of_row = list({"attention,": kernels, "distributed": distributed}.get(kind, training)(row))
            ratios = [each["predicted"] / each["measured"] for each in of_row]
            if not all(0 < ratio < math.inf for ratio in ratios or [0]):
                raise ValueError(f"no speed over 0 of anything that is predicted: {ratios}")
            for each, ratio in zip(of_row, ratios, strict=True):
                found.append(same | each | {"ratio": 1 / ratio if "time" in each["quantity"] else ratio})
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"a field is not as expected: {error!r}"
            left.append({"id": row.get("id"), "reason": reason})
    return found, left


def errors_of(rows: list[Row]) -> np.ndarray:
    """log(predicted / measured) of training steps."""
    found, _ = predict(rows)
    return np.log([row["ratio"] for row in found])


def group_of(row: Row) -> str:
    """The publication, by the repository or site that its source begins with."""
    return re.split(r"[@ ]", str(row.get("source")))[0]


def summary(found: list[Row]) -> list[Row]:
    """Errors of training steps by the kinds of `LIMITS`, and of all by publication and precision."""
    groups: dict[str, list[float]] = {kind: [] for kind in LIMITS}
    for row in found:
        precision = "bf16" if "bf16" in str(row["precision"]) else row["precision"]
        for name in (*row.get("kinds", ()), f"{row['group']}, {precision}"):
            groups.setdefault(name, []).append(row["ratio"])
    lines = []
    for name, ratios in groups.items():
        if not ratios:
            continue
        errors = np.abs(np.log(ratios))
        line = {"group": name, "numbers": len(ratios), "ratio": float(np.exp(np.median(np.log(ratios))))}
        line |= {"median_error": float(np.median(errors)), "p90_error": float(np.quantile(errors, 0.9))}
        lines.append(line | {"within_15_percent": float((errors < math.log(1.15)).mean())})
    return lines


RECOMPUTED = {
    "Llama 3 70B": replace(MODELS["llama2-70b"], padded_vocab_size=128256),
    "Moonlight 16B": replace(MODELS["deepseek-v2-lite"], padded_vocab_size=163840, dense_ffn_hidden_size=11264),
}
RECOMPUTED_LIMIT = 0.03
"""Goal for the error of steps that recompute modules, over a step that does not, in a step that the GPU bounds."""


def recomputed() -> Iterator[Row]:
    """Times of steps that recompute modules over those of a step that recomputes others, or none.

    `bound` says whether the base step itself is predicted within half: Moonlight's takes much longer than predicted,
    launches included, and its source gives no reason.
    """
    for row in json.loads((DATA / "recompute.json").read_text()):
        job = make_job(
            model=RECOMPUTED[row["model"]],
            parallel=Parallel(**row["layout"]),
            context_length=row["sequence"],
            global_batch_size=row["global_batch"],
            max_tokens=row["sequence"],
            crossover_tokens=1,
            profile=load_profile("h100-cudnn-2025"),
            precision=row["precision"],
            cp_exchange="ring",
            overlap_transfers=False,
        )
        plans = [[shard(np.array([row["sequence"]]), job)] * job.micro_batches_per_rank] * job.parallel.dp

        def time(modules: list[str], job: Job = job, plans: Any = plans) -> float:
            way = Recompute(granularity="selective", modules=tuple(modules))
            return simulate_step(replace(job, recompute=way), plans).time

        base, is_time = time(row["base"]), row["quantity"] == "step_ms"
        for other in row["others"]:
            measured = other["measured"] / row["measured"]
            found = {
                "model": row["model"],
                "modules": " ".join(other["modules"]),
                "over": " ".join(row["base"]) or "none",
            }
            found |= {"predicted": time(other["modules"]) / base, "measured": measured if is_time else 1 / measured}
            yield found | {"bound": "host" if is_time and row["measured"] > 2 * base / 1e3 else "GPU"}


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
    repeated = list(recomputed())
    results.show(repeated, title="steps that recompute modules, over one that does not")
    if args.json:
        results.write_whole(args.json, json.dumps({"rows": found, "readings": readings, "left": left}, indent=1) + "\n")
    goals = []
    for each in (group for group in groups if group["group"] in LIMITS):
        median, p90 = LIMITS[each["group"]]
        goals.append(results.at_most(f"{each['group']}: median error", each["median_error"], median))
        if p90 < math.inf:
            goals.append(results.at_most(f"{each['group']}: p90 error", each["p90_error"], p90))
    if args.file == DATA / "published.json":
        ship(found)
        of_experts = {row["id"]: row for row in found if "MoE" in row.get("kinds", ())}
        rows = [row for row in json.loads(args.file.read_text()) if row["id"] in of_experts]
        left_out = experts.left_out(rows, errors_of)
        results.show(
            left_out, ("left_out", "groups", "numbers", "median_error", "p90_error"), title="left out of the fit"
        )
        for each in left_out[1:]:
            limits = zip(("median", "p90"), LIMITS["MoE"], strict=True)
            goals += [
                results.at_most(f"MoE, {each['left_out']} left out: {n}", each[f"{n}_error"], m) for n, m in limits
            ]
        within = experts.within(rows, np.array([ratios_of(of_experts[row["id"]])[1] for row in rows]))
        goals.append(results.at_least("MoE, flags not known: steps within the range of other models'", within, 0.8))
        settings = {"groups": groups, "readings": readings, "not_predicted": left, "recomputed": repeated}
        settings["left_out"] = left_out
        for each in (row for row in repeated if row["bound"] == "GPU"):
            error = abs(math.log(each["predicted"] / each["measured"]))
            goals.append(results.at_most(f"recomputed {each['modules']} over {each['over']}", error, RECOMPUTED_LIMIT))
        results.finish(args, "published", settings=settings, rows=found, goals=goals)
    else:
        results.conclude(goals, args.check)


if __name__ == "__main__":
    main()
