"""Train a tiny GPT with plain PyTorch and our packing: torchrun --nproc-per-node 2 examples/ddp.py [--fsdp].

Every rank plans every step by itself, reads only its own micro-batches, and knows without a word from the others how
many tokens the step has in all. Needs torch and numpy only; learns the bytes of Python's standard library.

Shapes: s tokens of a micro-batch, its documents one after the other; H hidden size, n heads.
"""

import argparse
import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_wlb import (
    Job,
    MicroBatchPlan,
    ModelShape,
    Packer,
    Parallel,
    Samples,
    make_job,
    plan_step,
    windows,
)

CONTEXT_LENGTH = 2048
GLOBAL_BATCH_SIZE = 8
MODEL = ModelShape(
    num_layers=2,
    hidden_size=128,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=32,
    gated_linear_unit=False,
    padded_vocab_size=256,
)
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class MicroBatch(NamedTuple):
    tokens: Tensor
    """int64 [s]."""
    labels: Tensor
    """int64 [s]: the next token of the stream, as in Megatron that of the next document behind a document's last."""
    positions: Tensor
    """int64 [s], within the document."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: where documents begin, and s; as flash_attn_varlen_func takes them. Stays on the host."""


class Step(NamedTuple):
    """A step of one rank."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    """Trained tokens of all ranks."""


class PackedDocuments(IterableDataset[Step]):
    """The steps of this rank, without end; every epoch has the same order.

    Args:
        documents: tokens of each, integers [length]; the same on every rank.
        job: what is trained, and on how many ranks.
        rank: the data-parallel rank that this is.
        first_sample: where the run begins.
    """

    def __init__(self, documents: Sequence[np.ndarray], job: Job, rank: int, first_sample: int = 0) -> None:
        self._documents, self._job, self._rank, self._first_sample = documents, job, rank, first_sample
        self._windows = windows(np.array([len(document) for document in documents]), job.context_length, seed=0)

    def __iter__(self) -> Iterator[Step]:
        """Each of W loader workers plans every step, since that is cheap, and reads every W-th."""
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        job, epoch = self._job, len(self._windows)
        samples = Samples(
            datasets=[self._windows], context_length=job.context_length, order=lambda place: place % epoch
        )
        packer = Packer(samples, job, first_sample=self._first_sample)
        for i in itertools.count():
            plan = plan_step(packer, job, self._rank)
            if i % workers == number:
                yield Step([self._read(micro_batch) for micro_batch in plan.micro_batches], plan.tokens)

    def _read(self, plan: MicroBatchPlan) -> MicroBatch:
        lengths = plan.documents["length"]
        begins = np.append(0, np.cumsum(lengths))
        rows = plan.documents[["document", "offset", "length"]].tolist()
        read = [self._stream(document, offset, length + 1) for document, offset, length in rows]
        tokens, labels = np.concatenate([each[:-1] for each in read]), np.concatenate([each[1:] for each in read])
        positions = np.arange(begins[-1]) - np.repeat(begins[:-1], lengths)
        return MicroBatch(*(torch.from_numpy(a) for a in (tokens, labels, positions, begins.astype(np.int32))))

    def _stream(self, document: int, offset: int, count: int) -> np.ndarray:
        """Tokens from there on, int64 [count], which go on in the next document of the order."""
        parts = []
        while count:
            part = self._documents[self._windows.document_index[document]][offset : offset + count]
            parts.append(part.astype(np.int64))
            count, document, offset = count - len(part), document + 1, 0
        return np.concatenate(parts)


class Gpt(nn.Module):
    def __init__(self, shape: ModelShape = MODEL) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(CONTEXT_LENGTH, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.output = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Sum of the losses of all tokens."""
        lengths = batch.cu_seqlens.diff().tolist()
        x = self.embedding(batch.tokens) + self.positions(batch.positions)
        for layer in self.layers:
            x = layer(x, lengths)
        return F.cross_entropy(self.output(self.norm(x)), batch.labels, reduction="sum")


class Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden_size, self._num_heads = shape.hidden_size, shape.num_attention_heads
        self.norm, self.mlp_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, shape.ffn_hidden_size), nn.GELU(), nn.Linear(shape.ffn_hidden_size, hidden_size)
        )

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x [s, H] -> [s, H]; a call per document, which on a GPU one of flash_attn_varlen_func replaces."""
        qkv = self.qkv(self.norm(x)).unflatten(1, (3, self._num_heads, -1)).permute(1, 2, 0, 3)  # [3, n, s, H / n]
        documents = (F.scaled_dot_product_attention(*d, is_causal=True) for d in qkv.split(lengths, dim=2))
        x = x + self.proj(torch.cat(list(documents), dim=1).transpose(0, 1).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


def job_of(num_ranks: int) -> Job:
    """The job on so many data-parallel ranks."""
    return make_job(
        model=MODEL,
        parallel=Parallel(dp=num_ranks),
        context_length=CONTEXT_LENGTH,
        global_batch_size=GLOBAL_BATCH_SIZE,
    )


def train(
    documents: Sequence[np.ndarray],
    num_steps: int,
    *,
    fsdp: bool = False,
    num_workers: int = 0,
    checkpoint: Path | None,
) -> list[tuple[float, float]]:
    """Mean loss of a token and norm of the gradient in each of `num_steps` steps; they go on after `checkpoint`, if it
    exists, and are saved there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    first_sample = 0
    torch.manual_seed(0)
    model: nn.Module = Gpt().to(device)
    model = fully_shard(model) if fsdp else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, map_location="cpu")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=FULL_STATE,
        )
        first_sample = saved["samples"]

    packed = PackedDocuments(documents, job_of(size), rank, first_sample)
    loader = DataLoader(packed, batch_size=None, num_workers=num_workers)
    steps = []
    for step in itertools.islice(loader, num_steps):
        total = torch.zeros((), device=device)
        for i, batch in enumerate(step.micro_batches):
            moved = MicroBatch(*(x.to(device, non_blocking=True) for x in batch[:-1]), batch.cu_seqlens)
            last = i == len(step.micro_batches) - 1
            with contextlib.nullcontext() if fsdp or last else model.no_sync():
                loss = model(moved) / step.num_tokens
                (loss * size).backward()  # DDP and FSDP take the mean of all ranks, and we want the sum
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        steps.append((total.item(), float(norm.full_tensor() if fsdp else norm)))
        if rank == 0:
            print(f"loss {steps[-1][0]:.6f} gradient {steps[-1][1]:.6f} of {step.num_tokens} tokens", flush=True)

    if checkpoint is not None:
        states = get_state_dict(model, optimizer, options=FULL_STATE)  # all ranks take part
        trained = first_sample + len(steps) * GLOBAL_BATCH_SIZE  # all that the data needs to go on
        if rank == 0:
            whole = checkpoint.with_name(f"{checkpoint.name}.new")  # the one before stays until this is complete
            torch.save({"model": states[0], "optimizer": states[1], "samples": trained}, whole)
            whole.replace(checkpoint)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--num-workers", type=int, default=2, help="processes that read ahead")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="go on after this one if it exists, and save it"
    )
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    library = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    train(library, args.steps, fsdp=args.fsdp, num_workers=args.num_workers, checkpoint=args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
