"""How far a step with `--wlb` is from Megatron's own, beside Megatron's own distance between micro-batch sizes 1 and 2.

    python -m benchmarks.same_step

Measured in one run on CPUs, in fp32 unless a case says otherwise: a GPT of four layers, 8 windows of 256 tokens a step,
three steps of SGD; `--wlb` in other micro-batches on two context-parallel ranks. Distances are of the whole gradient,
relative to its norm, the largest over the steps; of the gradients of routers apart; and of the losses.
"""

import tempfile
from pathlib import Path
from typing import Any

import tests.adapter.conftest  # noqa: F401  # puts the CPU in the place of CUDA, before megatron is imported
from benchmarks.results import Row, at_most, finish, parser
from tests.adapter.datasets import write_dataset
from tests.adapter.training import CP2, MOE, MTP, train

AUX = f"{MOE} --moe-router-load-balancing-type"
CASES = {
    "dense": "",
    "dense, --eod-mask-loss": "--eod-mask-loss",
    "dense, --eod-mask-loss --calculate-per-token-loss": "--eod-mask-loss --calculate-per-token-loss",
    "dense, bf16": "--bf16",
    "MTP": f"{MTP} --eod-mask-loss",
    "MoE": MOE,
    "MoE, expert bias": f"{MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "MoE, aux_loss 1e-3": f"{AUX} aux_loss --moe-aux-loss-coeff 1e-3",
    "MoE, seq_aux_loss 1e-4": f"{AUX} seq_aux_loss --moe-aux-loss-coeff 1e-4",
    "MoE, global_aux_loss 1e-3": f"{AUX} global_aux_loss --moe-aux-loss-coeff 1e-3",
    "MoE, z-loss 1e-3": f"{MOE} --moe-z-loss-coeff 1e-3",
    "MoE, z-loss 1e-3 --calculate-per-token-loss": f"{MOE} --moe-z-loss-coeff 1e-3 --calculate-per-token-loss",
}
COMMON = "--lr 0.05 --train-iters 3"


def distances(run: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return the distances of a run from Megatron's."""

    def of(part: str) -> float:
        found = [0.0]
        for got, wanted in zip(run["grads"], theirs["grads"], strict=True):
            names = [name for name in wanted if part in name]
            off, norm = (sum(float(each[n].norm()) ** 2 for n in names) for each in (
                {n: got[n] - wanted[n] for n in names}, wanted))  # fmt: skip
            found.append((off / norm) ** 0.5 if norm else 0.0)
        return max(found)

    losses = [abs(ours / other - 1) for ours, other in zip(run["losses"], theirs["losses"], strict=True)]
    return {"gradient": of(""), "routers": of("router"), "loss": max(losses)}


def main() -> None:
    args = parser(__doc__).parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_dataset(Path(folder) / "corpus", seed=0, documents=300)
        for name, of_case in CASES.items():
            flags = [*COMMON.split(), *of_case.split()]
            theirs = train(1, data, *flags, wlb=False)
            two = train(1, data, *flags, "--micro-batch-size", "2", wlb=False)
            ours = train(2, data, *flags, *CP2.split(), "--wlb-micro-batches", "6", "--wlb-max-tokens", "512")
            row = {"case": name, "flags": of_case, "wlb": distances(ours, theirs)}
            rows.append(row | {"micro_batch_size_2": distances(two, theirs)})
            print(rows[-1], flush=True)
    exact = [row for row in rows if "aux_loss" not in row["case"] and "bf16" not in row["case"]]
    goals = [at_most(f"{row['case']}: gradient", row["wlb"]["gradient"], 1e-6) for row in exact]
    goals += [at_most(f"{row['case']}: loss", row["wlb"]["loss"], 1e-6) for row in exact]
    finish(args, "same_step", settings={"measured": True, "common": COMMON}, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
