"""Shapes of decoder-only models, by Megatron's names for their sizes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.settings import Count, Size, SizeOrNone, checked

FULL, WINDOWED, MLP, EXPERTS, DELTA_NET, MAMBA = "*", "W", "-", "E", "G", "M"
"""Kinds of layers, and parts of them: attention to all of a document or in a window, an MLP, experts, a gated delta
net, Mamba."""
MIXERS = {DELTA_NET: "delta_net", MAMBA: "mamba"}
"""Fields of `ModelShape` that hold the `Mixer` of a kind."""


class Matrix(NamedTuple):
    """A matrix that every row of a layer is multiplied with."""

    part: str
    """attention, mixer, mlp or experts."""
    outputs: int
    inputs: int
    divided: str
    """The side that tensor-parallel ranks divide: outputs (column-parallel), inputs, or rows."""
    copies: int = 1
    """Experts that a row goes to, whose sizes are summed in the divided side."""

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs

    def shape(self, rows: np.ndarray, ranks: int) -> tuple[np.ndarray, float, float]:
        """Return rows, outputs and inputs of the product on one of so many tensor-parallel ranks."""
        of = {
            name: 1 / (ranks * self.copies) if name == self.divided else 1.0 for name in ("rows", "outputs", "inputs")
        }
        return rows * self.copies * of["rows"], self.outputs * of["outputs"], self.inputs * of["inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """The part of a layer in the place of attention, over all heads: a convolution and a scan of projected rows."""

    projected: Size
    """Values that a row is projected to; all of them go to the ranks of their heads."""
    inner: Size
    """Values that come back, and are projected to the hidden state."""
    scan: Size
    """Multiplications that the scan does for a row, so many as weights would."""
    kept: Size
    """Values that its kernels keep of a row for backward; two for one in fp32."""

    def __post_init__(self) -> None:
        checked(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only model with untied embeddings. Raises ValueError for sizes that are none."""

    num_layers: Count
    hidden_size: Count
    ffn_hidden_size: Size
    """Summed over all experts that a token goes to, including shared ones."""
    num_attention_heads: Count
    num_query_groups: Count
    padded_vocab_size: SizeOrNone
    """0 omits the embedding and the output layer."""
    kv_channels: Count = 128
    """Values of a query head and of a key head."""
    v_head_dim: SizeOrNone = 0
    """Values of a value head; 0: `kv_channels`."""
    kv_lora_rank: SizeOrNone = 0
    """Multi-latent attention: values of the latent of a token's keys and values; 0: none."""
    q_lora_rank: SizeOrNone = 0
    """Values of the latent of queries; 0: none."""
    qk_pos_emb_head_dim: SizeOrNone = 0
    """Rotated values of a key, which all heads share."""
    gated_linear_unit: bool = True
    qk_layernorm: bool = False
    """Norms of Q and K."""
    moe_router_topk: SizeOrNone = 0
    """Experts that a token goes to; 0: a dense model."""
    num_experts: SizeOrNone = 0
    """Experts of a layer; 0: as many as a token has."""
    moe_router_num_groups: Count = 1
    """Groups of experts, of which a token goes to `moe_router_group_topk`."""
    moe_router_group_topk: Count = 1
    shared_ffn_hidden_size: SizeOrNone = 0
    """The part of `ffn_hidden_size` that is of shared experts."""
    mtp_num_layers: SizeOrNone = 0
    """Layers for multi-token prediction, on the last stage: each with a joining matrix before and the output layer
    after it."""
    window: SizeOrNone | None = None
    """Keys that a query sees before its own in layers with a window."""
    pattern: str = FULL
    """Kinds of the layers, over and over, a letter each. But for a hybrid model, an MLP or experts follow in each, and
    a letter with - behind it has an MLP where others have experts."""
    hybrid: bool = False
    """Layers are one part each, and MLPs layers of their own, as of `--hybrid-layer-pattern`."""
    delta_net: Mixer | None = None
    mamba: Mixer | None = None
    dense_ffn_hidden_size: SizeOrNone = 0
    """Of MLPs in a model that has experts, too; 0: `ffn_hidden_size`."""
    output_gate: bool = False
    """Queries are projected with a gate of their size (`--attention-output-gate`)."""

    def __post_init__(self) -> None:
        checked(self)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups (--num-query-groups) is {self.num_query_groups}, which does not divide "
                f"{self.num_attention_heads} attention heads; change one of them"
            )
        if self.moe_router_group_topk > self.moe_router_num_groups:
            raise ValueError(
                f"moe_router_group_topk (--moe-router-group-topk) is {self.moe_router_group_topk} of "
                f"{self.moe_router_num_groups} groups of experts (--moe-router-num-groups); change one of them"
            )
        known = FULL + WINDOWED + "".join(MIXERS) + MLP + EXPERTS * self.hybrid
        needs = {
            WINDOWED: ("window (--window-size)", self.window is not None),
            EXPERTS: ("moe_router_topk (--num-experts)", self.is_mixture),
            MLP: ("moe_router_topk (--num-experts)", self.is_mixture or self.hybrid),
            **{kind: (name, getattr(self, name) is not None) for kind, name in MIXERS.items()},
        }
        where = "--hybrid-layer-pattern" if self.hybrid else "pattern"
        for kind in self.pattern or " ":
            if kind not in known:
                raise ValueError(f"{where} has {kind!r}, whose cost is not known; give letters of {known}")
            name, there = needs.get(kind, ("", True))
            if not there:
                raise ValueError(f"{where} has {kind} without {name}; give both or neither")
        if not self.hybrid and (MLP * 2 in self.pattern or self.pattern[0] == MLP):
            raise ValueError(f"{where} has {MLP} behind no layer; give it once, behind the letter of a layer")

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of every layer."""
        kinds = re.findall("." if self.hybrid else f".{MLP}?", self.pattern)
        return (kinds * -(-self.num_layers // len(kinds)))[: self.num_layers]

    @property
    def depth_kinds(self) -> list[str]:
        """The kind of the layer of every depth: Megatron numbers it from 1 again, and makes it as the last layer."""
        layers = self.layer_kinds
        return [layers[i % self.num_layers][0] + layers[-1][1:] for i in range(self.depths)]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.layer_kinds + self.depth_kinds))

    def parts_of(self, kind: str) -> str:
        """Return the parts of a layer, a letter each."""
        return kind if self.hybrid or len(kind) > 1 else kind + self.feed_forward

    @property
    def feed_forward(self) -> str:
        """The part of layers behind attention; experts where some have these."""
        return EXPERTS if self.is_mixture else MLP

    def mixer_of(self, kind: str) -> Mixer | None:
        mixer: Mixer | None = getattr(self, MIXERS[kind[0]]) if kind[0] in MIXERS else None
        return mixer

    def ffn_size_of(self, part: str) -> int:
        return (part == MLP and self.dense_ffn_hidden_size) or self.ffn_hidden_size

    @property
    def window_by_kind(self) -> dict[str, int | None]:
        """The window of every kind of layers that have attention; None: all of a document."""
        return {kind: self.window if kind[0] == WINDOWED else None for kind in self.kinds if kind[0] in FULL + WINDOWED}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of attention; None: all of a document."""
        return tuple(dict.fromkeys(self.window_by_kind.values())) or (None,)

    def without_windows(self) -> "ModelShape":
        return replace(self, pattern=self.pattern.replace(WINDOWED, FULL))

    @property
    def widest(self) -> int | None:
        return None if None in self.windows else self.window

    @property
    def attention_layers(self) -> int:
        return sum(kind[0] in FULL + WINDOWED for kind in self.layer_kinds)

    def pairs_beyond(self, lengths: np.ndarray) -> np.ndarray:
        """Return twice the token pairs of documents that are beyond windows, averaged over layers with attention,
        int64 [n]."""
        if self.window is None:
            return np.zeros_like(lengths, np.int64)
        beyond = np.maximum(lengths.astype(np.int64) - self.window - 1, 0)
        share = Fraction(sum(kind[0] == WINDOWED for kind in self.layer_kinds), self.attention_layers or 1)
        return beyond * beyond * share.numerator // share.denominator

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        return self.num_query_groups * self.kv_channels

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Values of a key head and of a value head."""
        return self.kv_channels, self.value_channels

    @property
    def head_size(self) -> int:
        """Values of a head as FLOPs count them: the mean of key and value heads."""
        return sum(self.head_sizes) // 2

    @property
    def value_channels(self) -> int:
        return self.v_head_dim or self.kv_channels

    @property
    def value_size(self) -> int:
        return self.num_query_groups * self.value_channels

    @property
    def output_size(self) -> int:
        return self.num_attention_heads * self.value_channels

    @property
    def compressed(self) -> tuple[int, ...]:
        """Values of the latents of queries and of keys and values, and of the rotated key part; () without latents."""
        return (self.q_lora_rank, self.kv_lora_rank, self.qk_pos_emb_head_dim) if self.kv_lora_rank else ()

    @property
    def projections(self) -> list[tuple[int, int]]:
        """Outputs and inputs of matrices before Q, K and V, or to and from latents."""
        if not self.kv_lora_rank:
            queries = self.query_size * (2 if self.output_gate else 1)
            return [(queries + self.key_size + self.value_size, self.hidden_size)]
        rotated = self.num_query_groups * self.qk_pos_emb_head_dim
        return [
            (sum(self.compressed), self.hidden_size),
            (self.query_size, self.q_lora_rank or self.hidden_size),
            (self.key_size - rotated + self.value_size, self.kv_lora_rank),
        ]

    @property
    def qkv_weights(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.projections)

    def matrices_of(self, kind: str) -> list[Matrix]:
        """Return the matrices of a layer, in the order in which rows meet them."""
        return [matrix for part in self.parts_of(kind) for matrix in self.part(part)]

    def part(self, part: str) -> list[Matrix]:
        """Return the matrices of a part of layers, in the order in which rows meet them."""
        if mixer := self.mixer_of(part):
            into = Matrix("mixer", mixer.projected, self.hidden_size, "outputs")
            return [into, Matrix("mixer", self.hidden_size, mixer.inner, "inputs")]
        if part in (FULL, WINDOWED):
            of_hidden, *of_latents = self.projections
            found = [Matrix("attention", *of_hidden, "rows" if of_latents else "outputs")]
            found += [Matrix("attention", *each, "outputs") for each in of_latents]
            return [*found, Matrix("attention", self.hidden_size, self.output_size, "inputs")]
        name, copies = ("experts", self.moe_router_topk) if part == EXPERTS else ("mlp", 1)
        size = self.ffn_size_of(part)
        into = Matrix(name, size * (2 if self.gated_linear_unit else 1), self.hidden_size, "outputs", copies)
        return [into, Matrix(name, self.hidden_size, size, "inputs", copies)]

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of all parts of layers."""
        parts = "".join(map(self.parts_of, self.kinds)).replace(WINDOWED, FULL)
        return [matrix for part in dict.fromkeys(parts) for matrix in self.part(part)]

    def weights_of(self, kind: str, part: str = "") -> int:
        """Return the weights of the matrices of a layer, or of a part of it."""
        return sum(matrix.weights for matrix in self.matrices_of(kind) if part in ("", matrix.part))

    def held_weights_of(self, kind: str) -> tuple[int, int]:
        """Return the weights of all matrices of a layer but routed experts', and of routed experts."""
        of_token = int(self.weights_of(kind, "experts") * (1 - self.shared_part))
        held = of_token * (self.num_experts or self.moe_router_topk) // max(1, self.moe_router_topk)
        return self.weights_of(kind) - of_token, held

    def _mean(self, values: Mapping[str, int]) -> int:
        return sum(values[kind] * self.layer_kinds.count(kind) for kind in self.kinds) // self.num_layers

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer, on average over kinds."""
        return self._mean({kind: self.weights_of(kind) for kind in self.kinds})

    @property
    def is_mixture(self) -> bool:
        """Whether a token goes to some of many experts."""
        return self.moe_router_topk > 0

    @property
    def is_whole(self) -> bool:
        """Whether all weights are known, not only a token's experts."""
        return not self.is_mixture or self.num_experts > 0

    @property
    def shared_part(self) -> float:
        """The part of a token's experts that is shared."""
        return self.shared_ffn_hidden_size / self.ffn_hidden_size

    @property
    def expert_weights(self) -> int:
        """The experts' part of `layer_weights`; 0 in a dense model."""
        return self._mean({kind: self.weights_of(kind, "experts") for kind in self.kinds})

    @property
    def vocabulary_weights(self) -> int:
        """Weights of the embedding, and of the output layer."""
        return self.padded_vocab_size * self.hidden_size

    @property
    def token_weights(self) -> int:
        """Weights that multiply a token in a layer, with its scan and a share of those outside."""
        beside = (1 + self.depths) * self.vocabulary_weights + self.depths * self.joining.weights
        scan = self._mean({kind: mixer.scan if (mixer := self.mixer_of(kind)) else 0 for kind in self.kinds})
        return self.layer_weights + scan + beside // (self.num_layers + self.depths)

    @property
    def depths(self) -> int:
        """Tokens beyond the next that a row predicts, by as many layers after the decoder."""
        return self.mtp_num_layers

    @property
    def joining(self) -> Matrix:
        """The matrix before the layer of a depth: of the embedding and of the hidden state before."""
        return Matrix("joining", self.hidden_size, 2 * self.hidden_size, "outputs")

    @property
    def crossover_tokens(self) -> int:
        """Crossover length Lc by FLOPs: 2 per weight; QK^T and PV over half. 1 << 24 without attention: work stays
        within 64 bits."""
        pair = (self.query_size + self.output_size) * self.attention_layers
        return max(1, 2 * self.token_weights * self.num_layers // pair) if pair else 1 << 24

    def kv_values_per_rank(self, tp: int) -> int:
        return self.heads_per_rank(tp)[1] * sum(self.head_sizes)

    def heads_per_rank(self, tp: int) -> tuple[int, int]:
        """Query and key heads of a tensor-parallel rank."""
        return max(1, self.num_attention_heads // tp), max(1, self.num_query_groups // tp)


def shape(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **rest: Any) -> ModelShape:
    """Return a shape of these sizes; `rest` are other fields of `ModelShape`."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        padded_vocab_size=vocab,
        **rest,
    )


def latent_sizes(
    *, kv_lora_rank: int, q_lora_rank: int | None, qk_head_dim: int, qk_pos_emb_head_dim: int, v_head_dim: int
) -> dict[str, int]:
    """Return `ModelShape`'s fields by Megatron's sizes of latent attention."""
    return {
        "kv_channels": qk_head_dim + qk_pos_emb_head_dim,
        "v_head_dim": v_head_dim,
        "kv_lora_rank": kv_lora_rank,
        "q_lora_rank": q_lora_rank or 0,
        "qk_pos_emb_head_dim": qk_pos_emb_head_dim,
    }


_EXPERTS = {"moe_router_topk": 8, "num_experts": 128, "qk_layernorm": True}
_DEEPSEEK = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
_V2_LITE: dict[str, Any] = latent_sizes(q_lora_rank=None, **_DEEPSEEK)
_V2_LITE |= {"pattern": "*-" + "*" * 26, "dense_ffn_hidden_size": 10944}
_V3: dict[str, Any] = latent_sizes(q_lora_rank=1536, **_DEEPSEEK)
_V3 |= {"pattern": "*-" * 3 + "*" * 58, "dense_ffn_hidden_size": 18432}
_V3 |= {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
MODELS = {
    "550m": shape(24, 1280, 3456, 10, 10, 32000),
    "llama2-7b": shape(32, 4096, 11008, 32, 32, 32000),
    "llama3-8b": shape(32, 4096, 14336, 32, 8, 128256),
    "30b": shape(48, 7168, 19200, 56, 56, 32000),
    "codellama-34b": shape(48, 8192, 22016, 64, 8, 32000),
    "llama2-70b": shape(80, 8192, 28672, 64, 8, 32000),
    "llama3-405b": shape(126, 16384, 53248, 128, 8, 128256),
    "qwen3-30b-a3b": shape(48, 2048, 8 * 768, 32, 4, 151936, **_EXPERTS),
    "qwen3-235b-a22b": shape(94, 4096, 8 * 1536, 64, 4, 151936, **_EXPERTS),
    "deepseek-v2-lite": shape(
        27, 2048, 8 * 1408, 16, 16, 102400, moe_router_topk=6, num_experts=64, shared_ffn_hidden_size=2816, **_V2_LITE
    ),
    "deepseek-v3": shape(
        61, 7168, 9 * 2048, 128, 128, 129280, moe_router_topk=8, num_experts=256, shared_ffn_hidden_size=2048, **_V3
    ),
}
"""llama2-7b, codellama-34b, llama2-70b: published (Touvron et al. 2023, Roziere et al. 2023). llama3-8b, llama3-405b:
The Llama 3 Herd of Models, table 3. qwen3-30b-a3b, qwen3-235b-a22b: their config.json. deepseek-v2-lite, deepseek-v3:
their technical reports (2024). The paper does not publish the shapes of 550M and 30B. Assumed: 550m has 24 layers of 10
heads (558 M parameters), 30b the layers, width and heads of OPT-30B, both LLaMA's feed-forward ratio of 8/3."""
