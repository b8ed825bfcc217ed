"""Does the image work: healthcheck.py [--train]. Imports what it is for, and packs four steps."""

import argparse
import importlib

import numpy as np

from megatron_wlb import MODELS, Packer, Samples, make_job, windows

TRAINING = "transformer_engine.pytorch apex transformers megatron_wlb.adapter.training".split()


def main() -> None:
    """Raise, and so exit with a status other than 0, if anything is missing or nothing is packed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="the image to train with, not the one for analyses")
    for module in TRAINING if parser.parse_args().train else ("rich", "jinja2", "matplotlib", "scipy"):
        importlib.import_module(module)
    print(f"ok: {pack()} documents packed")


def pack() -> int:
    """Documents of four steps."""
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 2000).astype(np.int64) + 1
    job = make_job(model=MODELS["llama2-7b"], context_length=8192, global_batch_size=8)
    packer = Packer(Samples(datasets=[windows(lengths, 8192)], context_length=8192), job)
    count = sum(len(packer.next().batch.documents) for _ in range(4))
    if not count:
        raise RuntimeError("four steps are packed without a document")
    return count


if __name__ == "__main__":
    main()
