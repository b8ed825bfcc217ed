"""Norms of layers without TransformerEngine."""

from typing import Any

import torch


class TorchNorm:
    """Makes torch's norm, as upstream's wrapper does, which refuses sequence parallelism; specs want a class."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:  # type: ignore[misc]
        norm = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        module = norm(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module
