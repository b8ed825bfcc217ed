"""Fits the kernels of shipped profiles to bars that others published: python -m benchmarks.attention

benchmarks/data/attention.json has the bars. A backward that is only published with its forward is what the measured or
fitted forward leaves. Writes megatron_wlb/hardware/profiles/NAME.json, with the errors on the bars that were fitted and
on those of the publication that was left out. The forward of h100-fa2 stays as scripts/fit_h100_fa2.py fits it.
"""

import argparse
import itertools
import json
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.lengths import DATA
from megatron_wlb.cli.profile import fit, predict, relative_error
from megatron_wlb.hardware.profile import KernelTimes, load_profile, profile_file

TILE_ROWS, HEAD_SIZE = 128, 128
FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Of a direction, over two products of attended pairs."""
_FILE = json.loads((DATA / "attention.json").read_text())
PUBLICATIONS = _FILE["publications"]
HOPPER = ("h100-fa2", "h100-fa3", "h100-cudnn")


def counts(lengths: np.ndarray, heads: int) -> np.ndarray:
    """Factors of launch, tile and query tile for whole documents of `lengths` in a call, int64 [3]."""
    tiles = -(-lengths // TILE_ROWS)
    return np.array([1, heads * (tiles * (tiles + 1) // 2).sum(), heads * tiles.sum()])


def flops(lengths: np.ndarray, heads: int, direction: str) -> float:
    """Causal attention's FLOPs."""
    return 2 * FLOPS[direction] * HEAD_SIZE * heads * float((lengths.astype(float) ** 2).sum())


def bars(name: str, direction: str, without: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Counts, [n, 3], and times in us, [n], of a profile's bars in all publications, or in all but one."""
    rows, times = [], []
    for publication, each in PUBLICATIONS.items():
        measured = each.get(name, {}) if publication != without else {}
        for i, length in enumerate(each["lengths"]):
            lengths = np.full((each["tokens"] or length) // length, length)
            us = {d: flops(lengths, each["heads"], d) / tf[i] / 1e6 for d, tf in measured.items() if tf[i]}
            if "both" in us and "forward" in us:
                us["backward"] = us["both"] - us["forward"]
            if direction in us:
                rows.append(counts(lengths, each["heads"]))
                times.append(us[direction])
    return np.array(rows), np.array(times)


@cache
def fitted(name: str, direction: str, without: str = "") -> KernelTimes:
    return fit(*bars(name, direction, without))


def error(name: str, direction: str) -> dict[str, Any]:
    """Errors on bars that were fitted, and on those of a publication that was not, where another has this direction."""
    measured, us = bars(name, direction)
    median, p90 = relative_error(predict(fitted(name, direction), measured), us)
    stated: dict[str, Any] = {"fitted_median": median, "fitted_p90": p90}
    for publication, others in itertools.permutations(PUBLICATIONS, 2):
        left, of_left = bars(name, direction, others)
        if 0 < len(left) < len(measured):
            median, p90 = relative_error(predict(fitted(name, direction, publication), left), of_left)
            stated[f"without {publication}"] = {"held_out_median": median, "held_out_p90": p90, "bars": len(left)}
    return stated


def a100() -> dict[str, Any]:
    """Forward and backward in the proportion of h100-fa2, with its launches: only their sum is published."""
    like = load_profile("h100-fa2")
    assert like.backward is not None
    measured, us = bars("a100-fa2", "both")
    launch, tiles = like.forward.launch + like.backward.launch, measured[:, 1:] / us[:, None]
    found = np.linalg.lstsq(tiles, 1 - launch / us)[0]
    both = KernelTimes(launch=launch, tile=found[0], query_tile=found[1])
    share = like.forward.tile / (like.forward.tile + like.backward.tile)
    median, p90 = relative_error(predict(both, measured), us)
    return {
        "forward": asdict(both.scaled(share)) | {"launch": like.forward.launch},
        "backward": asdict(both.scaled(1 - share)) | {"launch": like.backward.launch},
        "error": {"both directions": {"fitted_median": median, "fitted_p90": p90}},
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in HOPPER:
        directions = ("backward",) if name == "h100-fa2" else ("forward", "backward")
        stated = json.loads(profile_file(name).read_text())
        stated |= {direction: asdict(fitted(name, direction)) for direction in directions}
        stated["error"] |= {direction: error(name, direction) for direction in directions}
        write(name, stated)
    stated = json.loads(profile_file("a100-fa2").read_text()) | a100()
    write("a100-fa2", stated)


def write(name: str, stated: dict[str, Any]) -> None:
    for direction in ("forward", "backward"):
        stated[direction] = {key: float(f"{value:.4g}") for key, value in stated[direction].items()}
    text = json.dumps(stated, indent=1)
    print(results.write_whole(profile_file(name), text + "\n"))


if __name__ == "__main__":
    main()
