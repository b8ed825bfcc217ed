"""Upstream's mock data, by `--wlb-mock-lengths` with documents of other lengths."""

from argparse import Namespace
from typing import Any

from megatron.core.datasets.gpt_dataset import MockGPTDataset

from megatron_wlb.adapter.sources.windows import FromIndex
from megatron_wlb.plan.mock import MockDocuments, mock_lengths


class Mock(FromIndex):
    """See `Source`."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.apart = bool(args.wlb_sft)
        self.kind = MockGPTDataset if args.wlb_mock_lengths is None else _Drawn

    def check(self) -> None:
        """There is no file."""

    def prepare(self, config: Any) -> None:
        """See `Source`."""
        config.wlb = self._args


class _Drawn(MockGPTDataset):
    """Upstream's, with documents of `--wlb-mock-lengths`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: Any, config: Any) -> Any:
        args, tokenizer = config.wlb, config.tokenizer
        return MockDocuments(
            distribution=mock_lengths(args.wlb_mock_lengths),
            seed=args.seed,
            vocabulary=tokenizer.vocab_size,
            eod=tokenizer.eod,
        )
