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
from typing import Any, NamedTuple

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
    DocumentStream,
    Job,
    MicroBatchPlan,
    ModelShape,
    Packer,
    Parallel,
    Source,
    make_job,
    make_packer,
    plan_step,
    trained_tokens,
)

CONTEXT_LENGTH = 2048
NUM_MICRO_BATCHES = 8
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
IGNORED = -100
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class MicroBatch(NamedTuple):
    tokens: Tensor
    """int64 [s]."""
    labels: Tensor
    """int64 [s]; IGNORED is not trained."""
    positions: Tensor
    """int64 [s], within the document."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: where documents begin, and s; as flash_attn_varlen_func takes them. Stays on the host."""


class Step(NamedTuple):
    """A step of one rank."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    """Trained tokens of all ranks."""
    state: dict[str, Any]
    """The state of the packer after this step."""


class PackedDocuments(IterableDataset[Step]):
    """The steps of this rank; without end, if the stream of the packer has none.

    Args:
        documents: tokens of each, integers [length].
        packer: of their lengths; the same on every rank.
        job: what is trained, and on how many ranks.
        rank: the data-parallel rank that this is.
    """

    def __init__(self, documents: Sequence[np.ndarray], packer: Packer, job: Job, rank: int) -> None:
        self._documents, self.packer, self._job, self._rank = documents, packer, job, rank

    def __iter__(self) -> Iterator[Step]:
        """Each of W loader workers plans every step, since that is cheap, and reads every W-th."""
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in itertools.count():
            if self.packer.finished:
                return
            plan = plan_step(self.packer, self._job, self._rank)
            if i % workers == number:
                yield Step(
                    [self._read(micro_batch) for micro_batch in plan.micro_batches], plan.tokens, plan.packed.state
                )

    def _read(self, plan: MicroBatchPlan) -> MicroBatch:
        lengths = plan.shards.lengths  # a micro-batch without documents has one token of padding
        begins = np.append(0, np.cumsum(lengths))
        tokens, labels = np.zeros(begins[-1], np.int64), np.full(begins[-1], IGNORED)
        for row, begin in zip(plan.documents, begins, strict=False):
            first, length = int(row["offset"]), int(row["length"])
            read = self._documents[row["document"]][first : first + length + 1]
            tokens[begin : begin + length], labels[begin : begin + length] = read[:-1], read[1:]
        positions = np.arange(begins[-1]) - np.repeat(begins[:-1], lengths)
        return MicroBatch(*(torch.from_numpy(a) for a in (tokens, labels, positions, begins.astype(np.int32))))


class StepLoader(DataLoader[Step]):
    """Steps with a state of what was handed out, whatever the workers have read ahead."""

    def __init__(self, dataset: PackedDocuments, **options: Any) -> None:
        super().__init__(dataset, batch_size=None, **options)
        self._packer, self._state = dataset.packer, dataset.packer.state()

    def __iter__(self) -> Iterator[Step]:
        self._packer.load_state(self._state)
        for step in super().__iter__():
            self._state = step.state
            yield step

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before iteration. Raises ValueError for a state of other documents, or of another policy or window."""
        self._packer.load_state(state)
        self._state = state


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
        return F.cross_entropy(self.output(self.norm(x)), batch.labels, reduction="sum", ignore_index=IGNORED)


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
        global_batch_size=NUM_MICRO_BATCHES,
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
    lengths = trained_tokens(np.array([len(document) for document in documents]))
    stream = DocumentStream([Source(lengths=lengths)], seed=0, context_length=CONTEXT_LENGTH)
    job = job_of(size)
    packed = PackedDocuments(documents, make_packer(stream, job), job, rank)
    loader = StepLoader(packed, num_workers=num_workers)

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
        loader.load_state_dict(saved["data"])

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
        if rank == 0:
            torch.save({"model": states[0], "optimizer": states[1], "data": loader.state_dict()}, checkpoint)
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
