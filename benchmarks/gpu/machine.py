"""What a result file of a GPU says of the machine, and its name, which ends with the GPU's."""

import argparse

import torch

from benchmarks import results
from megatron_wlb.hardware.profile import gpu_of


def parser(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """The parser of all benchmarks, which takes --commit, too."""
    options = results.parser(doc, quick)
    options.add_argument("--commit", help="commit that is measured; default: git's, which a copied tree does not know")
    return options


def gpu() -> str | None:
    """The name of the GPU, None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def where(args: argparse.Namespace, device: str | None, of: str = "") -> results.Row:
    """Return for `results.write` what was measured, and where its file goes: NAME_OF_GPU.json."""
    tag = gpu_of(device or "") or ("cuda" if device else "cpu")
    return {"device": device, "commit": args.commit, "suffix": f"{of and f'_{of}'}_{tag}", "folder": args.output}
