"""Fits shipped profiles to kernels, products and links that others measured: python -m benchmarks.attention

benchmarks/data/attention.json has the measurements; none is of a training step but for the rates of products of GB200
and GB300 (`of_steps`), whose products nobody has published: fitted to dense steps of Llama 3 (8B, 70B, 405B), over what
B300's products say. With a model left out of the fit, p90 errors are .14 and .12, and .18 and .14 without it. A
backward that is only published with its forward is what the measured or fitted forward leaves. Writes
megatron_wlb/hardware/profiles/NAME.json, with the errors on what was fitted, and on what was left out of the fit:
publications in turn, or lengths in turn where there is one, and packs of documents. The forward of h100-fa2 stays as
scripts/fit_h100_fa2.py fits it.
"""

import argparse
import itertools
import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.lengths import DATA
from megatron_wlb.cli.profile import fit, predict, relative_error, rounded
from megatron_wlb.hardware.network import H100_NETWORK
from megatron_wlb.hardware.profile import KernelTimes, Profile, load_profile, profile_file

TILE_ROWS, HEAD_SIZE, DIRECTIONS = 128, 128, ("forward", "backward")
FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Of a direction, over two products of attended pairs."""
_FILE = json.loads((DATA / "attention.json").read_text())
PUBLICATIONS = _FILE["publications"]
HOPPER = ("h100-fa2", "h100-fa3", "h100-cudnn")
NEWER = {
    "h100-cudnn-2025": "h100-cudnn",
    **{name: name for name in ("h200-cudnn-9.19", "b200-cudnn-2025", "b200-cudnn-frontend-1.16", "b200-fa4")},
    **{name: name for name in ("gb200-cudnn-9.22", "gb300-cudnn-9.22")},
    "b200-cudnn-9.22": "gb200-cudnn-9.22",
}
"""Profiles whose products are of TransformerEngine in 2025, and whose bars their attention is fitted to; B200 and GB200
have one chip."""
HIDING = ("h100-cudnn", "h100-cudnn-2025", "h200-cudnn-9.19")
"""Whose backward takes all tiles that a mask aligned to the bottom right hides, as cuDNN 9.19 did on an H100.

All calls of `cp_attention_h100.json` had such a mask. Fitted to them, beside the forward of `profile_h100.json`, a
hidden tile takes 1.08 times as long as another with 8 query heads and one key head (errors of 0.6 %, rms; of 12 % if it
took no time). With four of each, errors are 3 % if it takes as long and 9 % if it takes no time. No other version was
measured.
"""
PACKS = 20
"""Packs of documents that MagiAttention draws for a bar, which is the mean of their rates."""


def counts(lengths: np.ndarray, heads: int) -> np.ndarray:
    """Factors of launch, tile and query tile for whole documents of `lengths` in a call, int64 [3]."""
    tiles = -(-lengths // TILE_ROWS)
    return np.array([1, heads * (tiles * (tiles + 1) // 2).sum(), heads * tiles.sum()])


def flops(lengths: np.ndarray, heads: int, direction: str) -> float:
    """Causal attention's FLOPs."""
    return 2 * FLOPS[direction] * HEAD_SIZE * heads * float((lengths.astype(float) ** 2).sum())


def bars(name: str, direction: str, without: str | int = "") -> tuple[np.ndarray, np.ndarray]:
    """Counts, [n, 3], and times in us, [n], of a profile's bars; without a publication, or documents of a length."""
    rows, times = [], []
    for publication, each in PUBLICATIONS.items():
        measured = each.get(name, {}) if publication != without else {}
        for i, length in enumerate(each["lengths"]):
            lengths = np.full(each.get("documents") or each["tokens"] // length, length)
            tflops = {d: tf[i] for d, tf in measured.items() if d in FLOPS and tf[i] and length != without}
            us = {d: flops(lengths, each["heads"], d) / tf / 1e6 for d, tf in tflops.items()}
            if "both" in us and "forward" in us:
                us["backward"] = us["both"] - us["forward"]
            if direction in us:
                rows.append(counts(lengths, each["heads"]))
                times.append(us[direction])
    return np.array(rows), np.array(times)


@cache
def fitted(name: str, direction: str, without: str | int = "") -> KernelTimes:
    return fit(*bars(name, direction, without))


def stated_times(times: KernelTimes, hides: bool = False) -> dict[str, float]:
    """As JSON; `hides`: with hidden tiles, which bars of whole documents do not have."""
    stated = asdict(replace(times, hidden=times.tile))
    return stated if hides else {name: us for name, us in stated.items() if name != "hidden"}


def errors(predicted: np.ndarray, measured: np.ndarray, kind: str = "held_out") -> dict[str, Any]:
    return dict(zip((f"{kind}_median", f"{kind}_p90"), relative_error(predicted, measured), strict=True))


def error(name: str, direction: str) -> dict[str, Any]:
    """Errors on bars that were fitted, and on what was not: publications, or else lengths, and packs of documents."""
    measured, us = bars(name, direction)
    stated = errors(predict(fitted(name, direction), measured), us, "fitted")
    having = [title for title, each in PUBLICATIONS.items() if name in each]
    for publication, others in itertools.permutations(having, 2):
        left, of_left = bars(name, direction, others)
        if 0 < len(left) < len(measured):
            held_out = errors(predict(fitted(name, direction, publication), left), of_left)
            stated[f"without {publication}"] = held_out | {"bars": len(left)}
    if len(stated) > 2:
        return stated
    (each,) = (each for each in PUBLICATIONS.values() if direction in each.get(name, {}))
    left = [n for n in each["lengths"] if len(bars(name, direction, n)[1]) < len(us)]
    predicted = [predict(fitted(name, direction, n), bar) for n, bar in zip(left, measured, strict=True)]
    stated |= {"held_out": "each length left out in turn", **errors(np.array(predicted), us)}
    if tflops := each[name].get("packs", {}).get(direction):
        of = (each["heads"], (direction,), [fitted(name, direction)])
        got = np.array([rate(packed_documents(n, PACKS), *of) for n in left])
        stated["packed documents"] = errors(got, np.array(tflops[-len(left) :])) | {"bars": len(left)}
    return stated


def rate(packs: list[np.ndarray], heads: int, directions: tuple[str, ...], times: list[KernelTimes]) -> float:
    """Mean TFLOP/s in packs of documents; `times` are of the directions."""
    us = sum(predict(each, np.array([counts(lengths, heads) for lengths in packs])) for each in times)
    return float(np.mean([sum(flops(n, heads, each) for each in directions) for n in packs] / us) / 1e6)


def a100() -> dict[str, Any]:
    """Forward and backward in the proportion of h100-fa2, with its launches: only their sum is published."""
    like = load_profile("h100-fa2")
    assert like.backward is not None
    measured, us = bars("a100-fa2", "both")
    launch, tiles = like.forward.launch + like.backward.launch, measured[:, 1:] / us[:, None]
    found = np.linalg.lstsq(tiles, 1 - launch / us)[0]
    both = KernelTimes(launch=launch, tile=found[0], query_tile=found[1])
    share = like.forward.tile / (like.forward.tile + like.backward.tile)
    return {
        "forward": stated_times(both.scaled(share)) | {"launch": like.forward.launch},
        "backward": stated_times(both.scaled(1 - share)) | {"launch": like.backward.launch},
        "error": {"both directions": errors(predict(both, measured), us, "fitted")},
    }


def packed_documents(tokens: int, count: int) -> list[np.ndarray]:
    """MagiAttention's packs: documents of its distribution, longer ones in pieces of a quarter, int64 [n] each."""
    rng, drawn = np.random.default_rng(0), _FILE["documents"]
    edges, share = np.array([0, *drawn["up_to"]]), np.array(drawn["number"]) / sum(drawn["number"])
    packs = []
    for _ in range(count):
        pieces: list[int] = []
        while (left := tokens - sum(pieces)) > 0:
            i = rng.choice(len(share), p=share)
            length = min(int(rng.integers(edges[i], edges[i + 1])) + 1, left)
            pieces += [tokens // 4] * (length // (tokens // 4)) + [length % (tokens // 4)]
        packs.append(np.array([piece for piece in pieces if piece]))
    return packs


def product_shapes() -> list[tuple[int, int, int]]:
    """Rows, columns and inner size of TransformerEngine's products: forward, and both backwards, of each matrix."""
    of, rows = _FILE["products"], _FILE["products"]["rows"]
    return [shape for n, m in of["matrices"] for shape in ((rows, m, n), (rows, n, m), (m, rows, n))]


def gains(device: str, memory_gb_per_s: float) -> list[list[Any]]:
    """Rates of products over those in bf16, and bytes that quantization takes for a value of the operands.

    The measurement quantizes both operands of every product; a step does so once for the two products of an operand.
    """
    layer, alone = (_FILE["products"][name][device] for name in ("layer_ms", "products_ms"))
    values = 2 * sum((rows + columns) * inner for rows, columns, inner in product_shapes())
    found = []
    for recipe in filter(lambda each: each != "bf16", layer):
        products = alone.get(recipe, alone["tensorwise"])
        quantized = (layer[recipe] - products) * 1e6 * memory_gb_per_s / values
        found.append([recipe, round(alone["bf16"] / products, 2), round(quantized, 2)])
    return found


def grouped_error(profile: Profile) -> dict[str, Any]:
    """Errors of what MXFP8 gains in grouped products of experts, which no profile is fitted to."""
    predicted, measured = [], []
    for rows, columns, inner, experts, bf16, mxfp8 in _FILE["grouped"]["mxfp8"]:
        of = rows / experts
        shapes = (of, columns, inner), (of, inner, columns), (columns, inner, of)
        times = (sum(profile.product(*shape, *gain) for shape in shapes) for gain in ((), profile.gain("mxfp8", "mlp")))
        predicted.append(next(times) / next(times))
        measured.append(bf16 / mxfp8)
    return errors(np.array(predicted), np.array(measured), "error") | {"products": len(measured)}


def newer(name: str) -> dict[str, Any]:
    """A profile of `NEWER`: attention by its bars; products, memory and links by what is measured nearest to them."""
    gpu, kernels = name.split("-")[0].upper(), NEWER[name]
    device, of, links = _FILE["devices"][gpu], _FILE["products"], _FILE["networks"]
    bf16_us, shapes = 1e3 * of["layer_ms"][device["products"]]["bf16"], product_shapes()
    base = replace(load_profile("h100-cudnn"), wave_outputs=device["processors"] * TILE_ROWS**2)
    # The rate with which the twelve products take as long as measured.
    fixed = len(shapes) * base.kernel_us
    computing = sum(base.product(*shape) for shape in shapes) - fixed
    base = replace(base, assumed_tflops=base.assumed_tflops * computing / (bf16_us - fixed))
    of_products = {}
    if alone := of["forward_ms"].get(device["products"]):
        predicted = np.array([base.product(*shape) for shape in shapes[::3]])
        found = errors(predicted, 1e3 * np.array(alone), "error")
        of_products = {"products": found | {"products": len(alone)}}
    low, memory = gains(device["products"], 0.8 * device["memory"]), round(0.8 * device["memory"], -2)
    if "mxfp8" in of["layer_ms"][device["products"]]:
        of_products["mxfp8 of experts"] = grouped_error(replace(base, gains=low, memory_gb_per_s=memory))
    scale = (device["watts"] / device["of_watts"]) ** (1 / 3) * device.get("of_steps", 1.0)
    ring = links["B200" if device["processors"] > 132 else "H200"] / links["H200"]
    faster = {c: getattr(H100_NETWORK, c) for c in ("all_gather", "reduce_scatter", "all_reduce")}
    faster = {c: m._replace(gb_per_s=tuple(round(ring * x, 1) for x in m.gb_per_s)) for c, m in faster.items()}
    sizes = {"gpus_per_node": device["gpus"], "link_gb_per_s": float(device["link"])}
    network = replace(H100_NETWORK, name=gpu.lower(), **sizes, **faster)
    stated: dict[str, Any] = {"name": name, "tile_rows": TILE_ROWS}
    stated |= {each: stated_times(fitted(kernels, each), each == "backward" and name in HIDING) for each in DIRECTIONS}
    stated["error"] = {each: error(kernels, each) for each in DIRECTIONS} | of_products
    if any(f"{kernels} fp8" in each for each in PUBLICATIONS.values()):
        stated["fp8"] = [stated_times(fitted(f"{kernels} fp8", each)) for each in DIRECTIONS]
        stated["error"] |= {f"fp8 {each}": error(f"{kernels} fp8", each) for each in DIRECTIONS}
    stated |= {
        "head_size": HEAD_SIZE,
        "dtype": "bf16",
        "unit": "us; tile and query_tile per query head, launch once",
        "device": f"NVIDIA {gpu}",
        "source": "; ".join(each["source"] for each in PUBLICATIONS.values() if kernels in each),
        "assumed_tflops": round(base.assumed_tflops * scale),
        "products": f"{of['source']}: {device['products']}, times {scale:.3f}",
        "gains": low,
        "wave_outputs": base.wave_outputs,
        "memory_gb_per_s": memory,
        "memory_gib": device["memory_gib"],
        "network": asdict(network) if ring != 1 else None,
        "assumed": f"memory: 80 % of {device['memory']} GB/s; network: latencies of h100, and its bandwidths times "
        f"{ring:.2f}, as rings are measured; between nodes {device['link']} GB/s a GPU",
        "command": "python -m benchmarks.attention",
    }
    return {key: value for key, value in stated.items() if value is not None}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in HOPPER:
        directions = ("backward",) if name == "h100-fa2" else DIRECTIONS
        stated = json.loads(profile_file(name).read_text())
        stated |= {each: stated_times(fitted(name, each), each == "backward" and name in HIDING) for each in directions}
        stated["error"] |= {direction: error(name, direction) for direction in directions}
        write(name, stated | {"gains": gains("H200 NVL", 0.8 * 4800)})
    write("a100-fa2", json.loads(profile_file("a100-fa2").read_text()) | a100())
    for name in NEWER:
        write(name, newer(name))


def write(name: str, stated: dict[str, Any]) -> None:
    for times in (stated["forward"], stated["backward"], *stated.get("fp8", ())):
        times |= {key: rounded(value) for key, value in times.items()}
    path = profile_file(HOPPER[0]).parent / f"{name}.json"
    print(results.write_whole(path, json.dumps(stated, indent=1) + "\n"))


if __name__ == "__main__":
    main()
