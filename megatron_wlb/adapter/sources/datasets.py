"""Upstream's datasets, built as its `pretrain_gpt.py` builds them, and the contents of their samples."""

import errno
import resource
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb import files
from megatron_wlb.adapter.sources.mock import Mock
from megatron_wlb.adapter.sources.order import order_of
from megatron_wlb.adapter.sources.source import Source, SplitData
from megatron_wlb.adapter.sources.windows import FromIndex, stale
from megatron_wlb.plan.samples import Samples
from megatron_wlb.plan.step import digest_of


def source_of(args: Namespace) -> Source:
    """Return the source that flags ask for."""
    if args.mock_data:
        return Mock(args)
    if args.wlb_sft:
        from megatron_wlb.adapter.sources.conversations import FromConversations

        return FromConversations(args)
    return FromIndex(args)


def build(args: Namespace, num_samples: Sequence[int | None], config: Any = None) -> list[Any]:
    """Build the datasets of the three splits on every rank, in upstream's order; None for one without data.

    `config` is upstream's, by default as in its `pretrain_gpt.py`. Every dataset holds files open, so as many are
    allowed as can be. Raises ValueError where those are too few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    source = source_of(args)
    config = _config(args) if config is None else config
    source.prepare(config)
    config.defer_npy_index_mmap = False  # plans read the indexes from the start
    try:
        built: list[Any] = BlendedMegatronDatasetBuilder(source.kind, num_samples, lambda: True, config).build()
    except Exception as error:
        if getattr(error.__cause__ or error, "errno", None) != errno.EMFILE:  # of which upstream says another cause
            raise
        raise ValueError(
            f"--wlb: the datasets hold more files open than the {most} that this process may; raise its hard limit "
            "(ulimit -Hn), or merge datasets"
        ) from error
    return built


def _config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        path = args.per_dataset_sequences_path
        text = files.read(path, 1 << 28, "give --per-dataset-sequences-path the JSON that upstream's tool wrote")
        sequences = msgspec.json.decode(text)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences,
    )


def split_data(dataset: Any, args: Namespace, split: str, first_sample: int) -> SplitData:
    """Return the data of a built dataset, from `first_sample` on."""
    datasets, blend = [dataset], None
    if isinstance(dataset, BlendedDataset):
        datasets = dataset.datasets
        blend = dataset.dataset_index, dataset.dataset_sample_index
        last = np.full(len(datasets), -1)
        np.maximum.at(last, blend[0], blend[1])
        for each, number in zip(datasets, last.tolist(), strict=True):
            if number >= len(each):
                raise stale(dataset, "", f"{each.dataset_path}, which has {len(each)} samples: it draws {number}")
    source = source_of(args)
    of_datasets, tokens = zip(*map(source.opened, datasets), strict=True)
    samples = Samples(datasets=of_datasets, blend=blend, context_length=args.seq_length)
    order, steps = order_of(args, split, len(samples))
    return SplitData(
        samples=replace(samples, order=order),
        datasets=tokens,
        first_sample=first_sample,
        steps=steps,
        identity=digest_of(dataset.unique_description_hash, *(each.size for each in tokens)),
        remark=source.remark(datasets),
    )
