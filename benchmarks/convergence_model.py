"""A small GPT over `megatron_wlb.runtime` attention, and the gradient of a step of micro-batches.

The model is upstream's GPT (RMSNorm, rotary positions, SwiGLU, no biases) with upstream's names and layouts of weights,
so that `tests/benchmarks/test_convergence.py` can compare it with Megatron's own training. Needs torch only.

Shapes: s tokens of a micro-batch, H hidden size, n heads of size D = H / n, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import FLOPS_PROFILE
from megatron_wlb.model import ModelShape
from megatron_wlb.plan.samples import Windows
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import select

ROTARY_BASE = 10_000.0
LOSS_ROWS = 1024
"""Logits exist for this many rows at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed documents; attention and positions never cross them."""

    tokens: Tensor
    """int64 [s]."""
    labels: Tensor
    """int64 [s]."""
    metadata: ShardMetadata


class Corpus:
    """The stream of documents that windows are cut from.

    Args:
        tokens: of all documents, integers [total].
        lengths: of the documents in tokens, int64 [documents].
        windows: of these documents.
    """

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, windows: Windows) -> None:
        order = windows.document_index
        sizes = lengths[order]
        self._begins = np.cumsum(sizes) - sizes
        begins = (np.cumsum(lengths) - lengths)[order]
        self._stream = tokens[np.repeat(begins - self._begins, sizes) + np.arange(sizes.sum())]

    def micro_batch(self, documents: np.ndarray) -> MicroBatch:
        """DOCUMENT rows [n], n >= 1, concatenated; the last token of one has the next of the stream as its label."""
        lengths = documents["length"]
        begins = self._begins[documents["document"]] + documents["offset"]
        # Places of inputs, one after the other within a document.
        places = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        plan = select.divide(lengths, 1, "per-sequence", FLOPS_PROFILE.kernels()[0])
        return MicroBatch(
            tokens=torch.from_numpy(self._stream[places].astype(np.int64)),
            labels=torch.from_numpy(self._stream[places + 1].astype(np.int64)),
            metadata=ShardMetadata.build(plan, 0, get_backend("auto", "cpu").encode),
        )


class Gpt(nn.Module):
    """Decoder-only transformer; weights are drawn from `seed`."""

    def __init__(self, shape: ModelShape, *, attention: AttentionOptions, max_positions: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, attention) for _ in range(shape.num_layers))
        self.final_layernorm = nn.RMSNorm(shape.hidden_size, eps=1e-5)
        self.output_layer = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)
        self.register_buffer("rotary", rotary_table(max_positions, shape.kv_channels), False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = "proj" in name or "fc2" in name
                std = 0.02 / (2 * shape.num_layers) ** 0.5 if residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Loss of every token, fp32 [s]."""
        x = self.embedding(batch.tokens)
        cos, sin = self.rotary[:, batch.metadata.positions].unsqueeze(2)
        for layer in self.layers:
            x = layer(x, cos, sin, batch.metadata)
        x = self.final_layernorm(x)
        parts = zip(x.split(LOSS_ROWS), batch.labels.split(LOSS_ROWS), strict=True)
        return torch.cat([F.cross_entropy(self.output_layer(h).float(), y, reduction="none") for h, y in parts])


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, attention: AttentionOptions) -> None:
        super().__init__()
        hidden, self._heads, self._attention = shape.hidden_size, shape.num_attention_heads, attention
        ffn = shape.ffn_hidden_size
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.linear_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.linear_proj = nn.Linear(hidden, hidden, bias=False)
        self.pre_mlp_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.linear_fc1 = nn.Linear(hidden, 2 * ffn, bias=False)
        self.linear_fc2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, metadata: ShardMetadata) -> Tensor:
        """x [s, H] -> [s, H]; cos and sin [s, 1, D]."""
        qkv = self.linear_qkv(self.input_layernorm(x)).unflatten(1, (self._heads, 3, -1))  # of each head q, k, v
        q, k, v = qkv.unbind(2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        attended = context_parallel_attention(q, k, v, metadata, None, self._attention)
        x = x + self.linear_proj(attended.flatten(1))
        gate, up = self.linear_fc1(self.pre_mlp_layernorm(x)).chunk(2, -1)
        return x + self.linear_fc2(F.silu(gate) * up)


def rotary_table(positions: int, head_size: int) -> Tensor:
    """Cosines and sines, fp32 [2, positions, D]."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [s, n, D]: halves of a head are the two axes."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def accumulate(model: Gpt, corpus: Corpus, packing: PackedBatch) -> float:
    """Add the gradient of the mean loss over all tokens of a step; returns that mean.

    Micro-batches of all data-parallel ranks follow one another, and their sum is the gradient of any layout.
    """
    tokens, total = int(packing.documents["length"].sum()), torch.zeros(())
    for i in range(len(packing)):
        if packing.bounds[i] < packing.bounds[i + 1]:  # a step may have fewer documents than micro-batches
            loss = model(corpus.micro_batch(packing.micro_batch(i))).sum()
            (loss / tokens).backward()
            total += loss.detach()
    return float(total) / tokens
