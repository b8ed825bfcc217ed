"""Stands in for a run: prints and logs what one would, with times, losses and digests that are known, at once.

TRIAL names a folder: `argv` there gets the words of every process, a line each; `fails` has the numbers of processes
that crash; `other` those with other digests, `silent` those with none; with `hangs` a process starts another one, and
both stay.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

GPUS, WINDOW, WINDOWS, LAYERS = 4, 4096, 4, 2
SECONDS = (1.0, 0.8)
"""Of a step, without --wlb and with it; turns and steps differ by a little."""


def seconds(turn, step, wlb):
    """Seconds of a step of the process with this number."""
    return SECONDS[wlb] * (1 + 0.01 * (turn % 3) + 0.001 * (step % 4))


def loss(turn, step, wlb):
    """Its loss."""
    return (9 - 0.01 * step) * (1 + 1e-5 * wlb + 1e-6 * turn)


def main():
    words, folder = sys.argv[1:], Path(os.environ["TRIAL"])

    def last(flag, default=None):
        places = [i for i, word in enumerate(words) if word == flag]
        return words[places[-1] + 1] if places else default

    def named(name, number):
        return (folder / name).exists() and str(number) in (folder / name).read_text().split()

    with (folder / "argv").open("a") as file:
        print(json.dumps(words), file=file)
    turn = len((folder / "argv").read_text().splitlines())
    if (folder / "hangs").exists():
        child = subprocess.Popen(["sleep", "600"])
        (folder / "processes").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    wlb, end = "--wlb" in words, int(last("--exit-interval"))
    if wlb:
        print("> wlb is on: every step trains the same as without --wlb")
    shown = {"num_layers": LAYERS, "world_size": GPUS, "seq_length": WINDOW, "log_interval": 1, "wlb": wlb}
    shown |= {"global_batch_size": WINDOWS, "micro_batch_size": 1}
    print("------------------------ arguments ------------------------")
    for name, value in shown.items():
        print(f"  {name} {'.' * (48 - len(name))} {value}")
    print("-------------------- end of arguments ---------------------", flush=True)
    tracker = Path(last("--load", "nowhere"), "latest_checkpointed_iteration.txt")
    step = int(tracker.read_text()) if tracker.exists() else 0
    while step == 0 or step % end:
        step += 1
        if step > 3 and named("fails", turn):
            print("[rank1]: ValueError: no corpus in /data/corpus/of/words", file=sys.stderr)
            print("[rank0]: RuntimeError: connection closed by peer", file=sys.stderr)
            sys.exit(3)
        digest = f"{step + (step > 8 and named('other', turn)):016x}"
        if not named("silent", turn):
            print(f" wlb step {step:6d} | digest {digest}")
        print(
            f" [2026-11-20 10:00:00.000000] iteration {step:8d}/    1000 | consumed samples: {WINDOWS * step:12d} | "
            f"elapsed time per iteration (ms): {1e3 * seconds(turn, step, wlb):.6f} | global batch size: {WINDOWS} | "
            f"lm loss: {loss(turn, step, wlb):.8E} | number of skipped iterations:   0 |",
            flush=True,
        )
        if wlb:
            entry = {
                "step": step,
                "step_ms": 1e3 * seconds(turn, step, wlb),
                "tokens": WINDOWS * WINDOW,
                "num_micro_batches": int(os.environ["MICRO_BATCHES"]),
                "loss": loss(turn, step, wlb),
                "job": json.loads(os.environ["JOB"]),
                "device": os.environ["DEVICE"],
                "versions": {"megatron-wlb": "1.2.3", "torch": "4.5.6"},
                "predicted_ms": 700 + step,
                "predicted": {"busy": 0.9, "bubble": 0.1, "exchange": 0.0, "waiting": 0.0},
                "measured": {"busy": 0.75, "bubble": 0.2, "exchange": 0.0, "waiting": 0.05},
            }
            with open(last("--wlb-log"), "a") as file:
                print(json.dumps(entry), file=file)
    for rank in (0, 8):
        print(f"[Rank {rank}] (after {step} iterations) memory (MB) | allocated: 1.00 | ", end="")
        print(
            f"max allocated: {1024 * (60 + rank + 10 * wlb):.2f} | reserved: 1.00 | max reserved: 99999.00", flush=True
        )


if __name__ == "__main__":
    main()
