"""Fit the kernel of the shipped profile h100-fa2 and check it: python scripts/fit_h100_fa2.py FOLDER

FOLDER holds two files of the DistCA repository (hao-ai-lab/DistCA, Apache-2.0): compute-attn-H100.csv, the times of
single documents, and compute-attn-H100-packed131072.psv, those of 131,072 tokens of equal documents; both of the
average shard under context parallelism. Prints what a fit to the first and a fit to both give, and their errors on
either file: of the fit, and of fits that leave out each document length in turn, on it.
"""

import argparse
import csv
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_wlb.cli.profile import count, fit, predict, relative_error
from megatron_wlb.documents import SEGMENT, Shard

TILE_ROWS = 128
HEADS = 64


def main(folder: Path) -> None:
    with (folder / "compute-attn-H100.csv").open() as file:
        rows = [(1, int(r["L"]), r, float(r["duration_per_doc"])) for r in csv.DictReader(file)]
    single = len(rows)
    with (folder / "compute-attn-H100-packed131072.psv").open() as file:
        for r in csv.DictReader(file, delimiter="|"):
            documents = int(r["batch_size"])
            rows.append((documents, int(r["total_len"]) // documents, r, float(r["total_latency(ms)"])))
    counts = np.array([_count(n, length, int(r["cp"]), HEADS // int(r["tp"])) for n, length, r, _ in rows])
    lengths = np.array([length for _, length, *_ in rows])
    us = 1e3 * np.array([ms for *_, ms in rows])
    is_single = np.arange(len(rows)) < single
    for name, fitted in (("single", is_single), ("both", np.ones(len(rows), bool))):
        times = fit(counts[fitted], us[fitted])
        left_out = np.empty_like(us)
        for length in np.unique(lengths):
            rest = fitted & (lengths != length)
            left_out[lengths == length] = predict(fit(counts[rest], us[rest]), counts[lengths == length])
        error = {}
        for part, where in (("single", is_single), ("packed", ~is_single)):
            all_in = relative_error(predict(times, counts[where]), us[where])
            out = relative_error(left_out[where], us[where])
            error[part] = {"median": all_in[0], "p90": all_in[1], "held_out_median": out[0], "held_out_p90": out[1]}
            error[part] |= {"shapes": int(where.sum())}
        print(json.dumps({"fitted": name, "forward": asdict(times), "error": error}, indent=1))


def _count(documents: int, length: int, cp_size: int, heads: int) -> tuple[int, int, int]:
    """Counts of the average shard: length / cp_size queries, which begin where queries of a shard do on average."""
    start = length * (cp_size - 1) // (2 * cp_size)
    call = np.zeros(documents, SEGMENT)
    call["document"], call["start"], call["stop"] = range(documents), start, start + length // cp_size
    return count(Shard(calls=(call,)), heads, TILE_ROWS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the two files")
    main(parser.parse_args().folder)
