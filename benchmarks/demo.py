"""Keeps the figures of the last `bash scripts/demo.sh` on record, and its picture for the README."""

import json
import shutil

import numpy as np

from benchmarks import results
from benchmarks.results import ROOT

KEPT = ("step", "loss", "tokens", "imbalance_original", "imbalance", "delay_mean_steps", "delay_max_steps")


def main() -> None:
    steps = [json.loads(line) for line in (ROOT / "demo/uninterrupted.jsonl").read_text().splitlines()]
    data = json.loads((ROOT / "demo/data/python.json").read_text())

    def cp_imbalance(key: str) -> float:
        shards = [m[key] for step in steps for m in step["micro_batches"]]
        return float(np.mean([max(work) * len(work) / sum(work) for work in shards]))

    path = results.write(
        "demo",
        settings={
            "command": "bash scripts/demo.sh",
            "data": {k: data[k] for k in ("documents", "tokens", "longest", "quantiles")},
            "mean imbalance of micro-batches, original": float(np.mean([s["imbalance_original"] for s in steps])),
            "mean imbalance of micro-batches, wlb": float(np.mean([s["imbalance"] for s in steps])),
            "mean imbalance of CP ranks, per-sequence": cp_imbalance("cp_work_per_sequence"),
            "mean imbalance of CP ranks, chosen": cp_imbalance("cp_work"),
        },
        rows=[{k: step[k] for k in KEPT} for step in steps],
    )
    shutil.copy(ROOT / "demo/report.png", ROOT / "docs/demo.png")
    print(path)


if __name__ == "__main__":
    main()
