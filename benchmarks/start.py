"""The start of a run on ten trillion tokens: processor time and memory of upstream's index, and of --wlb on it.

    python -m benchmarks.start [--quick] [--check] [--data FOLDER]

A dataset of 500 million documents is made in FOLDER (14 GB, of which .bin has holes alone), and removed. Upstream's
`GPTDataset` makes its index of windows; then a rank of --wlb checks it and plans steps, all in one process.
Writes benchmarks/results/start.json in about ten minutes.
"""

import struct
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from benchmarks import results
from benchmarks.lengths import job_7b
from megatron_wlb.adapter.sources.windows import FromIndex
from megatron_wlb.job import Parallel
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Samples

DOCUMENTS, QUICK = 500_000_000, 200_000
AT_ONCE = 10_000_000
WINDOW, WINDOWS, STEPS = 131_072, 128, 100


def write(prefix: Path, documents: int) -> int:
    """Write a dataset of a byte per token, log-normal lengths, and return its tokens."""
    rng, tokens, size = np.random.default_rng(0), 0, min(AT_ONCE, documents)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, documents, documents + 1))
        begin = file.tell()
        for _ in range(0, documents, size):
            file.write(rng.lognormal(9.25, 1.2, size).clip(16, 1 << 20).astype(np.int32).tobytes())
        file.flush()
        lengths = np.memmap(file.name, np.int32, "r", begin, (documents,))
        for first in range(0, documents, size):
            ends = tokens + np.cumsum(lengths[first : first + size], dtype=np.int64)
            file.write(np.concatenate(([tokens], ends[:-1])).tobytes())
            tokens = int(ends[-1])
        for first in range(0, documents, size):
            file.write(np.arange(first, first + size, dtype=np.int64).tobytes())
        file.write(np.array([documents], np.int64).tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(tokens)
    return tokens


def held_gib() -> float:
    """Memory of this process, mapped files included."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "RssFile")) / 2**20


def measured(prefix: Path, documents: int) -> results.Row:
    row: results.Row = {"documents": documents, "tokens": write(prefix, documents)}
    low, begin = IndexedDataset(str(prefix), mmap=True), time.process_time()
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=WINDOW, blend=([str(prefix)], None), split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, tokenizer=SimpleNamespace(eod=0, pad=None, vocab_size=256, unique_identifiers={}),
    )  # fmt: skip
    dataset = GPTDataset(low, str(prefix), np.arange(documents, dtype=np.int32), None, Split.train, config)
    row |= {"windows": len(dataset), "index_s": time.process_time() - begin}
    held, begin = held_gib(), time.process_time()
    args = SimpleNamespace(seq_length=WINDOW, reset_position_ids=False, reset_attention_mask=False)
    part, _ = FromIndex(args).opened(dataset)  # type: ignore[arg-type]
    row |= {"check_s": time.process_time() - begin}
    job = job_7b(WINDOWS, parallel=Parallel(tp=8, cp=2, pp=4, vpp=8, dp=8))
    packer = Packer(Samples(datasets=[part], context_length=WINDOW, order=lambda places: places), job)
    begin = time.process_time()
    for _ in range(STEPS):
        packer.next()
    row |= {"step_ms": (time.process_time() - begin) / STEPS * 1e3, "more_mib": (held_gib() - held) * 2**10}
    return row


def main() -> None:
    parser = results.parser(__doc__, "200,000 documents")
    parser.add_argument("--data", type=Path, help="folder for the dataset; default: a temporary one")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.data) as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows = [measured(Path(folder) / "text", QUICK if args.quick else DOCUMENTS)]
        torch.distributed.destroy_process_group()
    results.show(rows)
    settings = {"window": WINDOW, "windows": WINDOWS, "steps": STEPS}
    results.finish(args, "start", settings=settings, rows=rows, goals=[])


if __name__ == "__main__":
    main()
