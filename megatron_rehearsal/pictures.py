"""Pictures of a rehearsal."""

from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megatron_wlb.cli.pictures import COLORS, GREY, INK, Section, section

MOST = 8


def sections(seen: list[dict[str, Any]], gpu_gib: float) -> list[Section]:
    """Draw the memory of the ranks that reserve most."""
    fullest = sorted(seen, key=lambda rank: -rank["reserved_gib"])[:MOST]
    text = "Peak in each pass. Held: reserved, and free or fragmented. The line is the card."
    return [
        section(f"Rank {rank['rank']}", text, partial(memory, rank, gpu_gib), 3.4)
        for rank in sorted(fullest, key=lambda rank: int(rank["rank"]))
        if rank["passes"]
    ]


def memory(rank: dict[str, Any], gpu_gib: float, figure: Figure) -> None:
    """Draw a rehearsed rank's memory in its passes, by kind."""
    axes, gib = figure.subplots(), 2**30
    step, allocated, reserved = np.array(rank["passes"], dtype=float).T
    kept = np.array([float(each["kept"]) for each in rank["steps"]])[step.astype(int)]  # when the step began
    parts = {"weights and gradients": np.full(len(step), float(rank["weights"]))}
    parts["optimizer and tables"] = np.maximum(0, kept - rank["weights"])
    parts["activations"] = np.maximum(0, allocated - sum(parts.values()))
    parts["held"] = np.maximum(0, reserved - sum(parts.values()))
    values = [part / gib for part in parts.values()]
    axes.stackplot(np.arange(len(step)), values, labels=parts, colors=(*COLORS[:3], GREY), step="mid")
    axes.axhline(gpu_gib, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.05 * gpu_gib)
    axes.set_xticks(np.searchsorted(step, np.unique(step)), [f"step {int(s)}" for s in np.unique(step)])
    axes.margins(x=0)
    axes.set_ylabel("GiB")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, fontsize=9)
