"""Layers of each virtual stage, by Megatron's flags."""

import re
from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np

from megatron_wlb.settings import SizeOrNone, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Distribution of decoder layers over (virtual) stages, by Megatron's flags."""

    decoder_first_pipeline_num_layers: SizeOrNone | None = None
    decoder_last_pipeline_num_layers: SizeOrNone | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    """Virtual stages in order, with | between: E, the embedding, t, a layer, m, an MTP layer, L, the loss."""

    def __post_init__(self) -> None:
        checked(self)
        if self.has_ends + (self.edges > 0) + (self.pipeline_model_parallel_layout is not None) > 1:
            given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flags} are different ways to deal layers over stages; choose one")

    @property
    def edges(self) -> int:
        return self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    @property
    def has_ends(self) -> bool:
        ends = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        return ends != (None, None)

    @property
    def num_virtual_stages(self) -> int | None:
        """Of all stages; None where the flags leave it open."""
        return None if self.pipeline_model_parallel_layout is None else len(self._laid_out())

    def layers(self, num_layers: int, pp: int, vpp: int) -> np.ndarray:
        """Return the decoder layers of every virtual stage, int64 [pp, vpp].

        Chunk c of stage s is virtual stage c * pp + s, as in `get_num_layers_to_build` of
        megatron/core/transformer/transformer_block.py. Raises ValueError if layers do not divide.
        """
        if self.pipeline_model_parallel_layout is not None:
            counts = np.array([stage.count("t") for stage in self._laid_out()])
            if counts.size != pp * vpp or counts.sum() != num_layers:
                raise ValueError(
                    f"--pipeline-model-parallel-layout {self.pipeline_model_parallel_layout} has {counts.sum()} layers "
                    f"on {counts.size} virtual stages, not {num_layers} on {pp} stages of {vpp} chunks; change one of "
                    "them"
                )
            return counts.reshape(vpp, pp).T
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        given = {stage: count for stage, count in ((0, first), (pp - 1, last)) if count is not None}
        left = num_layers + self.edges - sum(given.values())
        each, rest = divmod(left, pp - len(given)) if pp > len(given) else (0, left)
        stages = np.array([given.get(stage, each) for stage in range(pp)])
        if rest or left < 0 or (stages % vpp).any():
            counted = f" and {self.edges} for the edges" if self.edges else ""
            counted += f" ({', '.join(f'{n} on stage {stage}' for stage, n in given.items())})" if given else ""
            raise ValueError(
                f"{num_layers} layers{counted} do not divide over {pp} stages of {vpp} chunks; change one of them"
            )
        layers = (stages // vpp).repeat(vpp).reshape(pp, vpp)
        layers[0, 0] -= self.account_for_embedding_in_pipeline_split
        layers[-1, -1] -= self.account_for_loss_in_pipeline_split
        return layers

    def _laid_out(self) -> list[str]:
        said = written = (self.pipeline_model_parallel_layout or "").replace(",", "")
        for repeated in (r"([^()*\d])\*(\d{1,3})", r"\(([^()]*)\)\*(\d{1,3})"):
            written = re.sub(repeated, lambda found: found[1] * int(found[2]), written)
        if not re.fullmatch(r"E[t|]*m*L", written):
            raise ValueError(
                f"--pipeline-model-parallel-layout {said} is not E, then t and |, then L; give MTP layers (m) right "
                "before L, on the last stage"
            )
        return written.split("|")


def laid_out(layers: np.ndarray) -> Split:
    """The split of `Split.layers`, int64 [pp, vpp], by a layout."""
    stages = ["t" * n if n < 4 else f"t*{n}" for n in layers.T.ravel()]
    runs = [(stage, len(list(same))) for stage, same in groupby(stages[:-1])]
    written = "".join(f"({stage}|)*{n}" if n > 1 else f"{stage}|" for stage, n in runs)
    return Split(pipeline_model_parallel_layout=f"E{written}{stages[-1]}L")


EVEN = Split()
"""Equally many layers on every virtual stage."""
