"""Upstream's datasets, built as its `pretrain_gpt.py` builds them, and what each sample of them holds."""

import errno
import functools
import os
import resource
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_wlb import files
from megatron_wlb.adapter import conversations
from megatron_wlb.documents import DOCUMENT
from megatron_wlb.plan.dataset import check_index, suspicious_layout
from megatron_wlb.plan.mock import MockDocuments, mock_lengths
from megatron_wlb.plan.samples import Part, Rows, Samples, Windows
from megatron_wlb.plan.step import digest_of

SPLITS = ("train", "valid", "test")
SAMPLED = 64
"""Documents that are read at the start, to see where they end."""


class Text(Protocol):
    """Tokens of one dataset of a blend."""

    masks: bool
    """Whether some rows may not be trained."""
    size: int
    """Bytes of the file, or its tokens."""

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, labels and whether they are trained of `count` rows, as the sample has them.

        int64 and bool [count], from row `start` of a DOCUMENT row on; what is behind the sample is token 0, untrained.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitData:
    """What a split trains or evaluates."""

    samples: Samples
    texts: Sequence[Text]
    """By dataset."""
    first_sample: int
    """Where this process begins."""
    steps: int | None
    """Steps of a pass over the split, for --full-validation."""
    identity: int
    """Digest of which files it reads, and of their sizes."""
    remark: str
    """What the start of a run says of documents that do not end with their only EOD; "" if all do."""


def build(args: Namespace, num_samples: Sequence[int | None], config: Any = None) -> list[Any]:
    """Build the datasets of the three splits on every rank, in upstream's order; None for one without data.

    `config` is upstream's, by default that of its `pretrain_gpt.py`. Every dataset holds files open, so as many are
    allowed as can be. Raises ValueError where those are too few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kind: Any = GPTDataset
    if args.mock_data:
        kind = MockGPTDataset if args.wlb_mock_lengths is None else _Mock
    elif args.wlb_sft:
        kind = _Conversations
    config = _config(args) if config is None else config
    config.wlb = args  # for the kinds below
    if args.wlb_sft:  # here, since upstream's builder takes ranks by turns
        read = functools.partial(conversations.read, args=args)
        config.wlb_conversations = {
            path: _in_turn(functools.partial(read, path), args.local_rank)
            for path in _paths(config.blend, config.blend_per_split)
        }
    config.defer_npy_index_mmap = False  # plans read the indexes from the start
    try:
        built: list[Any] = BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()
    except Exception as error:
        if getattr(error.__cause__ or error, "errno", None) != errno.EMFILE:  # of which upstream says another cause
            raise
        raise ValueError(
            f"--wlb: the datasets hold more files open than the {most} that this process may; raise its hard limit "
            "(ulimit -Hn), or merge datasets"
        ) from error
    return built


def _paths(blend: Any, blend_per_split: Any) -> list[str]:
    """Return the files, or prefixes of them, that upstream's blends name, each once."""
    named = [each[0] for each in (blend, *(blend_per_split or ())) if each is not None]
    return list(dict.fromkeys(chain.from_iterable(named)))


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


def check_files(args: Namespace) -> None:
    """Check the files that upstream's data flags name.

    Raises ValueError for none, for a missing or damaged one, and for one with no document in a split, on which upstream
    would wait for ever.
    """
    if args.mock_data or args.wlb_sft:
        return
    blend, blends = get_blend_and_blend_per_split(args)
    prefixes = _paths(blend, blends)
    if not prefixes:
        raise ValueError("--wlb: no dataset; give --data-path PREFIX (or --train-data-path ...), or --mock-data")
    sizes = {prefix: check_index(prefix) for prefix in prefixes if "://" not in prefix}  # which upstream reads
    for said in chain.from_iterable(map(suspicious_layout, sizes)) if args.rank == 0 else ():
        print(f"> wlb: WARNING: {said}", flush=True)
    splits = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split)) if blend is not None else ()
    for name, bounds in zip(SPLITS, splits, strict=False):
        if bounds is not None and any(round(bounds[0] * size) == round(bounds[1] * size) for size in sizes.values()):
            raise empty(args, name)


def evaluates(args: Namespace) -> bool:
    return bool(args.full_validation or args.eval_iters > 0)


def empty(args: Namespace, split: str) -> ValueError:
    """Return the error of a split without documents."""
    names = {"train": "training", "valid": "validation", "test": "test"}
    given = "--full-validation is given" if args.full_validation else f"--eval-iters is {args.eval_iters}"
    remedy = f"and {given}; give --eval-iters 0 and another --split, such as 100,0,0"
    if split == "train":
        remedy = "give another --split"
    return ValueError(f"--wlb: the {names[split.split()[0]]} split is empty, {remedy}")


def split_data(dataset: Any, args: Namespace, split: str, first_sample: int) -> SplitData:
    """Return what a built dataset holds, from `first_sample` on.

    Where --reset-attention-mask or --reset-position-ids ask for it, pieces end with EOD tokens, all of which are read.
    """
    datasets, blend = [dataset], None
    if isinstance(dataset, BlendedDataset):
        datasets = dataset.datasets
        blend = dataset.dataset_index, dataset.dataset_sample_index
        last = np.full(len(datasets), -1)
        np.maximum.at(last, blend[0], blend[1])
        for each, number in zip(datasets, last.tolist(), strict=True):
            if number >= len(each):
                raise _stale(dataset, "", f"{each.dataset_path}, which has {len(each)} samples: it draws {number}")
    parts, texts = zip(*(_part(each, args) for each in datasets), strict=True)
    identity = digest_of(dataset.unique_description_hash, *(text.size for text in texts))
    # Masks of whole documents come with positions in these.
    resets = (args.reset_attention_mask or args.reset_position_ids) and not args.dataloader_inter_document_masking
    remark = "" if args.wlb_sft else _said_of_ends(datasets, resets=resets)
    if resets and not args.wlb_sft:
        parts = tuple(_ByEod(*each) for each in zip(parts, texts, strict=True))
    samples = Samples(parts=parts, blend=blend, context_length=args.seq_length)
    order: Callable[[np.ndarray], np.ndarray] | None = None
    steps, ranks = None, args.data_parallel_size
    if split.startswith("valid") and args.full_validation:
        steps, order = -(-len(samples) // ranks), functools.partial(_passes, len(samples), ranks)
    elif args.wlb_dataloader_type == "cyclic":
        windows = args.wlb_windows_per_micro_batch if split == "train" else args.wlb_eval_windows_per_micro_batch
        order = _Cyclic(len(samples), windows, ranks, sharding=args.data_sharding)
    return SplitData(
        samples=replace(samples, order=order),
        texts=texts,
        first_sample=first_sample,
        steps=steps,
        identity=identity,
        remark=remark,
    )


def _said_of_ends(datasets: Sequence[Any], *, resets: bool) -> str:
    """Return what the start of a run says of documents without EOD as their last token, or with another.

    `SAMPLED` documents of `GPTDataset`s tell; "" if these have none. `resets`: pieces end with EOD.
    """
    sampled = irregular = 0
    pairs = within = 0.0  # of tokens in a document, and of those that no EOD separates
    chosen = range(0, len(datasets), -(-len(datasets) // SAMPLED))
    for i in chosen:
        dataset = datasets[i]
        lengths, eod = dataset.dataset.sequence_lengths, dataset.config.tokenizer.eod
        # --dataloader-fast-cache-load leaves indices out.
        numbers = dataset.document_index if dataset.indices is None else dataset.indices
        numbers = numbers[:: -(-len(numbers) * len(chosen) // SAMPLED)]
        for number in numbers[lengths[numbers] > 0].tolist():
            length = int(lengths[number])
            (at,) = np.nonzero(dataset.dataset.get(number) == eod)
            parts = np.diff(np.concatenate(([0], at[at < length - 1] + 1, [length])))
            sampled, irregular = sampled + 1, irregular + (at.tolist() != [length - 1])
            pairs, within = pairs + float(length) ** 2, within + float((parts.astype(float) ** 2).sum())
    if not irregular:
        return ""
    how = f"{irregular} of {sampled} sampled documents do not end with their only EOD token"
    if resets:
        return f"{how}: pieces end where EOD is, as the flags that reset ask; every rank reads all tokens for that"
    return f"{how}: attention goes across EOD for {1 - within / pairs:.1%} of their pairs of tokens"


def _part(dataset: Any, args: Namespace) -> tuple[Part, Text]:
    if isinstance(dataset, _Conversations):
        found, rows = dataset.dataset, np.asarray(dataset.indices, np.int64)
        part = Rows(
            rows=rows,
            begins=found.begins,
            lengths=found.lengths,
            context_length=args.seq_length,
            num_samples=len(dataset),
        )
        return part, _OfRows(found, args.seq_length)
    windows = Windows(
        document_index=dataset.document_index,
        sample_index=dataset.sample_index,
        shuffle_index=dataset.shuffle_index,
        lengths=dataset.dataset.sequence_lengths,
        context_length=args.seq_length,
    )
    if why := windows.misfit(dataset.indices):
        folder = os.path.join(str(dataset.dataset_path), "cache", f"{type(dataset).__name__}_indices")
        raise _stale(dataset, folder, f"the documents of {dataset.dataset_path}: {why}")
    return windows, _OfWindows(windows, dataset)


def _stale(dataset: Any, folder: str, why: str) -> ValueError:
    """Return what refuses an index of upstream's cache, by default in `folder`: its name tells nothing of the files."""
    name = os.path.join(dataset.config.path_to_cache or folder, f"{dataset.unique_description_hash}-*")
    return ValueError(f"--wlb: upstream's cached index {name} is not of {why}; delete it, upstream makes it anew")


class _OfWindows:
    """Text of a `GPTDataset`, whose windows go on in one stream of documents."""

    def __init__(self, windows: Windows, dataset: Any) -> None:
        self._windows, self._documents = windows, dataset.dataset
        self._pad = -1 if dataset._pad_token_id is None else int(dataset._pad_token_id)
        self._eod, self._masks_eod = dataset.config.tokenizer.eod, dataset.config.eod_mask_loss
        self.masks = self._masks_eod or self._pad >= 0
        prefix = getattr(self._documents, "path_prefix", "mock://")
        self.size = 0 if "://" in prefix else os.path.getsize(f"{prefix}.bin")  # object storage is upstream's to read

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Text`."""
        place = int(piece["index"]) % self._windows.context_length + start
        given = min(count, self._windows.context_length - place) + 1
        text = self._stream(int(piece["document"]), int(piece["offset"]) + start, given)
        text = np.concatenate((text, np.full(count + 1 - len(text), self._pad)))
        tokens, labels = text[:-1].copy(), text[1:].copy()
        tokens[given - 1 :] = self._pad  # the token behind a window is a target only
        trained = labels != self._pad
        if self._masks_eod:
            trained &= tokens != self._eod
        tokens[tokens == self._pad] = labels[labels == self._pad] = 0
        return tokens, labels, trained

    def begins(self, piece: np.void, count: int) -> np.ndarray:
        """Return where `count` tokens from a DOCUMENT row on begin anew, by the EOD tokens before, int64 [n]."""
        text = self._stream(int(piece["document"]), int(piece["offset"]), count)
        return np.concatenate(([0], np.flatnonzero(text[:-1] == self._eod) + 1))

    def _stream(self, document: int, offset: int, count: int) -> np.ndarray:
        """Return up to `count` tokens of the stream from a place in `document_index` on."""
        found, windows = [np.empty(0, np.int64)], self._windows
        while count > 0 and document < len(windows.document_index):
            number = int(windows.document_index[document])
            left = int(windows.lengths[number]) - offset
            if left <= 0:  # a piece may go over documents
                document, offset = document + 1, -left
                continue
            self._check_size()
            found.append(np.asarray(self._documents.get(number, offset=offset, length=min(count, left)), np.int64))
            count, offset = count - left, offset + left
        return np.concatenate(found)

    def _check_size(self) -> None:
        """Raise ValueError for a `.bin` file that is cut off.

        Of a mapped one SIGBUS would tell, without a word, and of one that is read uninitialised memory would be
        trained.
        """
        if self.size and (size := os.path.getsize(name := f"{self._documents.path_prefix}.bin")) < self.size:
            raise ValueError(
                f"{name} was cut off since the run began: it has {size} bytes instead of {self.size}; restore it"
            )


class _ByEod:
    """Windows in pieces that end with EOD tokens, wherever documents end; every rank reads all that it plans."""

    def __init__(self, windows: Windows, text: _OfWindows) -> None:
        self._windows, self._text = windows, text
        self.document_index, self.lengths = windows.document_index, windows.lengths

    def __len__(self) -> int:
        return len(self._windows)

    def pieces(self, samples: np.ndarray) -> np.ndarray:
        """See `Part`. A piece may go over documents, as the stream does."""
        rows, size = self._windows.pieces(samples), self._windows.context_length
        found = [np.empty(0, DOCUMENT)]
        for of_sample in np.split(rows, np.searchsorted(rows["index"], size * np.arange(1, len(samples)))):
            places = of_sample["index"] - of_sample["index"][0]
            total = int(of_sample["length"].sum())
            begins = self._text.begins(of_sample[0], total)
            row = np.searchsorted(places, begins, side="right") - 1
            pieces = of_sample[row]
            pieces["offset"] += begins - places[row]
            pieces["index"] += begins - places[row]
            pieces["length"] = np.diff(begins, append=total)
            found.append(pieces)
        return np.concatenate(found)


class _OfRows:
    """Text of conversations, row by row of their file."""

    masks = True

    def __init__(self, found: conversations.Conversations, context_length: int) -> None:
        self._found, self._context_length, self.size = found, context_length, found.size
        self._row = functools.lru_cache(maxsize=16)(found.row)  # pieces of a row are read one after the other

    def read(self, piece: np.void, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Text`. A row's last token has no target, as upstream pads behind it."""
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
    """Read on the first rank, then on one of every node, then on all, so that what is cached is made once.

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


class _Mock(MockGPTDataset):
    """Upstream's mock dataset, with documents of `--wlb-mock-lengths`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: Any, config: Any) -> Any:
        args, tokenizer = config.wlb, config.tokenizer
        return MockDocuments(
            distribution=mock_lengths(args.wlb_mock_lengths),
            seed=args.seed,
            vocabulary=tokenizer.vocab_size,
            eod=tokenizer.eod,
        )


def _passes(size: int, ranks: int, places: np.ndarray) -> np.ndarray:
    """The samples of upstream's `MegatronFullValidationSampler`: every rank goes through its own again and again."""
    number, rank = np.divmod(places, ranks)
    return rank + ranks * (number % -(-(size - rank) // ranks))


class _Cyclic:
    """The samples of upstream's `MegatronPretrainingRandomSampler`: every epoch has a permutation of its own."""

    def __init__(self, size: int, micro_batch_size: int, ranks: int, *, sharding: bool) -> None:
        self._micro_batch_size, self._ranks, self._sharding = micro_batch_size, ranks, sharding
        each = micro_batch_size * ranks
        self._epoch = size - size % each
        self._permuted = size // each * micro_batch_size if sharding else size - size % micro_batch_size
        self._permutation = functools.lru_cache(maxsize=2)(
            lambda epoch: torch.randperm(self._permuted, generator=torch.Generator().manual_seed(epoch)).numpy()
        )

    def __call__(self, places: np.ndarray) -> np.ndarray:
        epoch, place = np.divmod(places, self._epoch)
        batch, place = np.divmod(place, self._micro_batch_size * self._ranks)
        rank, place = np.divmod(place, self._micro_batch_size)
        place += batch * self._micro_batch_size  # among those of the rank
        if not self._sharding:
            place = place * self._ranks + rank
        found = np.empty_like(places)
        for number in np.unique(epoch).tolist():
            found[epoch == number] = self._permutation(number)[place[epoch == number]]
        return found + rank * self._permuted if self._sharding else found
