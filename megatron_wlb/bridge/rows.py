"""Fine-tuning in Megatron-Bridge: the conversations of rows, a document each, in the order of its global batches."""

import functools
import itertools
import threading
from argparse import Namespace
from typing import Any, NamedTuple

import numpy as np
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.data.samplers import MegatronPretrainingBatchSampler

from megatron_wlb.adapter.sources.source import SplitData
from megatron_wlb.documents import DOCUMENT
from megatron_wlb.plan.samples import Samples
from megatron_wlb.plan.step import PLAN_AHEAD, digest_of


def arguments(dataset: GPTSFTDatasetConfig) -> dict[str, Any]:
    """Return Megatron's arguments with the values of a config."""
    absent = (
        "mock_data dataloader_inter_document_masking reset_position_ids reset_attention_mask eod_mask_loss "
        "full_validation multiple_validation_sets"
    )
    return dict.fromkeys(absent.split(), False) | {
        "sft": True,
        "wlb_means_in_evaluation": False,  # Bridge's is the mean of all targets
        "seed": dataset.seed,
        "num_workers": 0,  # the planner's thread has read the rows
    }


def others(dataset: GPTSFTDatasetConfig, train: Any, wlb: dict[str, Any]) -> dict[str, Any]:
    """Return features that Megatron's flags do not have, and whether they are given."""
    specs, options = dataset.offline_packing_specs, dataset.dataset_kwargs or {}
    return {
        f"dataset.dataloader_type {dataset.dataloader_type} instead of batch": dataset.dataloader_type != "batch",
        "dataset.offline_packing_specs.packed_sequence_size over dataset.seq_length": (
            specs is not None and specs.packed_sequence_size > dataset.seq_length
        ),
        "return_cu_seqlen=False of dataset.dataset_kwargs": not options.get("return_cu_seqlen", True),
        "train.num_epochs instead of train.train_iters": train.num_epochs is not None,
        "sft_skip with finetune()": wlb["wlb_sft_skip"],
        "digest with finetune()": wlb["wlb_digest"],
    }


def unprepared(original: Any) -> Any:
    """Wrap the function that splits a batch of fine-tuning into micro-batches, which the plan has."""

    def prepare_finetuning_batch(data_iterator: Any, *, default_seq_length: int, **rest: Any) -> tuple[Any, int]:
        return data_iterator, default_seq_length

    return prepare_finetuning_batch


def split_data(dataset: Any, args: Namespace, split: str, first_sample: int) -> SplitData:
    """Return the data of a split of `GPTSFTDatasetBuilder`, from `first_sample` on.

    Raises ValueError for one with fewer rows than a step trains.
    """
    train = split == "train"
    size = args.global_batch_size if train else args.eval_global_batch_size
    drops = not train or args.drop_last  # Bridge evaluates whole batches alone
    if drops and len(dataset) < size:
        name = "train.global_batch_size" if train else "validation.eval_global_batch_size"
        raise ValueError(
            f"the {split} split has {len(dataset)} rows, and {name} is {size}; give more rows or a smaller one"
        )
    order = _Batches(
        rows=len(dataset),
        size=size,
        micro_batch_size=args.wlb_windows_per_micro_batch if train else args.wlb_eval_windows_per_micro_batch,
        ranks=args.data_parallel_size,
        seed=args.seed,
        drops=drops,
    )
    rows = _Rows(dataset, args.seq_length, (PLAN_AHEAD + 2) * size)
    return SplitData(
        samples=Samples(datasets=(rows,), context_length=args.seq_length, order=order),
        datasets=(rows,),
        first_sample=first_sample,
        steps=None,
        identity=digest_of(str(dataset.file_path), len(dataset), args.seed, drops),
        remark="",
    )


class _Row(NamedTuple):
    tokens: np.ndarray
    """int32 [n]."""
    labels: np.ndarray
    """int32 [n]."""
    trained: np.ndarray
    """bool [n]: whether the label is a target."""
    documents: np.ndarray
    """First token and tokens of each, int64 [documents, 2]."""


class _Rows:
    """Samples that are rows of Bridge's dataset, as its own `collate_fn` makes them, which every rank reads to plan.

    A conversation ends with its last target: no trained token sees the rest of the row.
    """

    masks = True

    def __init__(self, dataset: Any, context_length: int, kept: int) -> None:
        self._dataset, self._context_length, self.size = dataset, context_length, len(dataset)
        self._lock = threading.Lock()  # the planner reads, and the forecast; Bridge's datasets are of one thread
        self._row = functools.lru_cache(maxsize=kept)(self._collated)
        self._documents_of: dict[int, np.ndarray] = {-1: np.empty((0, 2), np.int64)}  # the row that fills a batch

    def __len__(self) -> int:
        return self.size

    def documents(self, samples: np.ndarray) -> np.ndarray:
        """See `DatasetSamples`. `document` is a row, `offset` the place of a conversation there."""
        found = [self._found(number) for number in samples.tolist()]
        sample = np.repeat(np.arange(len(samples)), list(map(len, found)))
        rows = np.zeros(len(sample), DOCUMENT)
        rows["document"] = samples[sample]
        rows["offset"], rows["length"] = np.concatenate(found).T
        rows["index"] = sample * self._context_length + rows["offset"]
        return rows

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `DatasetTokens`."""
        row, begin = self._row(int(piece["document"])), int(piece["offset"]) + start
        rows = slice(begin, begin + count)
        return row.tokens[rows].astype(np.int64), row.labels[rows].astype(np.int64), row.trained[rows]

    def _found(self, number: int) -> np.ndarray:
        if number not in self._documents_of:
            self._documents_of[number] = self._row(number).documents
        return self._documents_of[number]

    def _collated(self, number: int) -> _Row:
        with self._lock:
            batch = self._dataset.collate_fn([self._dataset[number]])
        tokens, labels, mask = (batch[name][0].numpy() for name in ("tokens", "labels", "loss_mask"))
        bounds = batch.get("cu_seqlens_q_padded", batch.get("cu_seqlens_q"))
        begins = np.unique([0, len(tokens), *([] if bounds is None else bounds[0].tolist())])
        trained, found = mask != 0, []
        for begin, end in itertools.pairwise(begins.tolist()):
            (targets,) = np.nonzero(trained[begin:end])
            found += [(begin, targets[-1] + 1)] if len(targets) else []
        documents = np.array(found, np.int64).reshape(-1, 2)
        return _Row(tokens.astype(np.int32), labels.astype(np.int32), trained, documents)


class _Batches:
    """The rows of Bridge's global batches, by micro-batch, one rank after the other; -1 fills the last batch."""

    def __init__(self, *, rows: int, size: int, micro_batch_size: int, ranks: int, seed: int, drops: bool) -> None:
        self._shape = (-1, size // (micro_batch_size * ranks), micro_batch_size, ranks)
        self._epoch = (rows if drops else rows + size - 1) // size * size
        self._sampled = functools.lru_cache(maxsize=2)(
            lambda epoch: np.array(
                list(
                    MegatronPretrainingBatchSampler(
                        total_samples=rows,
                        consumed_samples=epoch * self._epoch,
                        micro_batch_size=1,
                        global_batch_size=size,
                        data_parallel_rank=0,
                        data_parallel_size=1,
                        drop_last=drops,
                        pad_samples_to_global_batch_size=not drops,
                        seed=seed,
                    )
                ),
                np.int64,
            )
        )

    def __call__(self, places: np.ndarray) -> np.ndarray:
        epoch, place = np.divmod(places, self._epoch)
        found = np.empty_like(places)
        for number in np.unique(epoch).tolist():
            # Ranks take the rows of a batch in turn.
            order = self._sampled(number).reshape(self._shape).transpose(0, 3, 1, 2).ravel()
            found[epoch == number] = order[place[epoch == number]]
        return found
