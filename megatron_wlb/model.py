"""Shapes of decoder-only models, by Megatron's names for their sizes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only model with untied embeddings."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """The sizes of all experts that a token goes to, shared ones too, added up."""
    num_attention_heads: int
    num_query_groups: int
    padded_vocab_size: int
    """0 leaves the embedding and the output layer out."""
    kv_channels: int = 128
    gated_linear_unit: bool = True
    qk_layernorm: bool = False
    """Norms of Q and K."""
    moe_router_topk: int = 0
    """Experts that a token goes to; 0: a dense model."""
    mtp_num_layers: int = 0
    """Layers that predict tokens further ahead, on the last stage. Each has a matrix before it that joins two hidden
    states, and runs the output layer once more."""

    @property
    def query_size(self) -> int:
        """Values of all query heads of a token."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Values of all key heads of a token."""
        return self.num_query_groups * self.kv_channels

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        mlp = self.ffn_hidden_size * (3 if self.gated_linear_unit else 2)
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size + mlp)

    @property
    def column_weights(self) -> tuple[int, ...]:
        """Weights of each column-parallel matrix of one layer but experts', whose tokens are exchanged apart: QKV, and
        the first of the MLP."""
        attention = self.hidden_size * (self.query_size + 2 * self.key_size)
        mlp = self.hidden_size * self.ffn_hidden_size * (2 if self.gated_linear_unit else 1)
        return (attention,) if self.moe_router_topk else (attention, mlp)

    @property
    def expert_weights(self) -> int:
        """The part of `layer_weights` that is in experts; 0 in a dense model."""
        mlp = self.ffn_hidden_size * (3 if self.gated_linear_unit else 2)
        return self.hidden_size * mlp if self.moe_router_topk else 0

    @property
    def vocabulary_weights(self) -> int:
        """Weights of the embedding, and as many of the output layer."""
        return self.padded_vocab_size * self.hidden_size

    @property
    def token_weights(self) -> int:
        """Weights that a token is multiplied with in one layer, with an even share of what is beside layers."""
        ahead = self.mtp_num_layers
        beside = (1 + ahead) * self.vocabulary_weights + ahead * self.joining_weights
        return self.layer_weights + beside // (self.num_layers + ahead)

    @property
    def joining_weights(self) -> int:
        """Weights of the matrix before an MTP layer."""
        return 2 * self.hidden_size * self.hidden_size

    @property
    def crossover_tokens(self) -> int:
        """Crossover length Lc in tokens by the FLOPs of matrix products alone.

        Per token and layer: 2 FLOPs per weight, and 2 * heads * kv_channels per token that is attended to (causal
        attention: QK^T and PV over half of the document).
        """
        return max(1, self.token_weights // self.query_size)

    def heads_per_rank(self, tp: int) -> tuple[int, int]:
        """Query and key heads of a tensor-parallel rank."""
        return max(1, self.num_attention_heads // tp), max(1, self.num_query_groups // tp)


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        padded_vocab_size=vocab,
    )


MODELS = {
    "550m": _shape(24, 1280, 3456, 10, 10, 32000),
    "llama2-7b": _shape(32, 4096, 11008, 32, 32, 32000),
    "llama3-8b": _shape(32, 4096, 14336, 32, 8, 128256),
    "30b": _shape(48, 7168, 19200, 56, 56, 32000),
    "codellama-34b": _shape(48, 8192, 22016, 64, 8, 32000),
    "llama2-70b": _shape(80, 8192, 28672, 64, 8, 32000),
    "llama3-405b": _shape(126, 16384, 53248, 128, 8, 128256),
}
"""llama2-7b, codellama-34b, llama2-70b: the published configurations (Touvron et al. 2023, Roziere et al. 2023);
llama3-8b, llama3-405b: The Llama 3 Herd of Models, table 3. The paper's 550M and 30B are internal models "scaled in
layers and dimensions" of unpublished shape; ours are assumed: 550m has 24 layers of 10 heads (558 M parameters), 30b
the layers, width and heads of OPT-30B, both LLaMA's feed-forward ratio of 8/3."""
