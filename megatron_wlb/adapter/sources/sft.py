"""Rows of the conversations of `--sft`, each of which is a sample."""

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron_wlb.adapter.sources import conversations
from megatron_wlb.adapter.sources.source import DatasetTokens, paths
from megatron_wlb.plan.samples import DatasetSamples, Rows


class FromConversations:
    """See `Source`."""

    apart = True

    def __init__(self, args: Namespace) -> None:
        self._args, self.kind = args, _Conversations

    def check(self) -> None:
        """Files are read by `prepare`."""
        self._args.sft = False  # by which upstream would take means over our micro-batches in evaluation

    def prepare(self, config: Any) -> None:
        """See `Source`; here, since upstream's builder takes ranks by turns."""
        config.wlb_conversations = {
            path: _in_turn(functools.partial(conversations.read, path, self._args), self._args.local_rank)
            for path in paths(config.blend, config.blend_per_split)
        }

    def opened(self, dataset: Any) -> tuple[DatasetSamples, DatasetTokens]:
        """See `Source`."""
        found, size = dataset.dataset, self._args.seq_length
        samples = Rows(
            rows=np.asarray(dataset.indices, np.int64),
            begins=found.begins,
            lengths=found.lengths,
            context_length=size,
            num_samples=len(dataset),
        )
        return samples, _OfRows(found, size)

    def remark(self, datasets: Sequence[Any]) -> str:
        """See `Source`."""
        return ""


class _OfRows:
    """Tokens of conversations, row by row of their file."""

    masks = True

    def __init__(self, found: conversations.Conversations, context_length: int) -> None:
        self._found, self._context_length, self.size = found, context_length, found.size
        self._row = functools.lru_cache(maxsize=16)(found.row)  # pieces of a row are read one after the other

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `DatasetTokens`. A row's last token has no target, as upstream pads behind it."""
        number = int(piece["document"])
        tokens, targets = self._row(int(np.searchsorted(self._found.begins, number, side="right")) - 1)
        end = min(len(tokens), self._context_length)
        begin = int(self._found.starts[number]) + start
        text = np.zeros(count + 1, np.int64)
        trained = np.zeros(count + 1, bool)
        given = max(0, min(end - begin, count + 1))
        text[:given], trained[:given] = tokens[begin : begin + given], targets[begin : begin + given]
        return text[:-1], text[1:], trained[1:]


class _Conversations(MegatronDataset):
    """Upstream's `SFTDataset`, but for its samples: it tells their rows alone."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset.begins) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        return config.wlb_conversations[dataset_path]

    def __getitem__(self, idx: int) -> Any:
        raise NotImplementedError("_OfRows reads")

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else int(self.num_samples)


def _in_turn(read: Callable[[], Any], local_rank: int) -> Any:
    """Read on the first rank, then on one of every node, then on all, so that caches are made once.

    Raises ValueError on all ranks if one does. A collective call.
    """
    found = None
    for turn in (torch.distributed.get_rank() == 0, local_rank == 0, True):
        error = None
        if turn and found is None:
            try:
                found = read()
            except ValueError as raised:
                error = str(raised)
        errors: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(errors, error)
        if error := next(filter(None, errors), None):
            raise ValueError(error)
    return found
