"""Conversations of `--sft`: rows of them are samples. The datasets library tokenizes them once, and keeps them in its
cache."""

import functools
import glob
import hashlib
import importlib
import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import print_rank_0
from megatron.training.datasets.sft_dataset import SFTDataset

from megatron_wlb.adapter.sources.source import DatasetTokens, paths
from megatron_wlb.files import INPUTS
from megatron_wlb.plan.samples import DatasetSamples, Rows
from megatron_wlb.settings import printable

VERSION = 2
ROLES = ("system", "user", "assistant", "tool")
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".pq": "parquet"}
"""Builders of the datasets library, by the suffix of a file, which may be gzipped."""
_ROWS = 64
"""Rows for which a process is worth its start."""
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations of one `--data-path`. Rows without any are not counted."""

    table: Any
    """The dataset that has `tokens` and `trained` of every row."""
    begins: np.ndarray
    """The first conversation of each row, int64 [rows + 1]."""
    lengths: np.ndarray
    """Tokens of each conversation and its padding, int32 [conversations]; 0: left out."""
    starts: np.ndarray
    """Where each begins in its row, int64 [conversations]."""
    size: int
    """Tokens of all rows."""
    pad: int
    """The token between conversations, where upstream pads them."""

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens of a row, int32 [n], and whether each is trained as a target, bool [n]."""
        found, which = self.table[number], slice(*self.begins[number : number + 2])
        read, lengths = found["lengths"], self.lengths[which]
        moved = np.repeat(self.starts[which] - np.cumsum(read) + read, read)
        kept = np.repeat(lengths > 0, read)
        at = (np.arange(len(moved)) + moved)[kept]
        tokens, trained = np.full(lengths.sum(), self.pad, np.int32), np.zeros(lengths.sum(), bool)
        tokens[at], trained[at] = found["tokens"][kept], found["trained"][kept]
        return tokens, trained


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
            path: _in_turn(functools.partial(read, path, self._args), self._args.local_rank)
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

    def __init__(self, found: Conversations, context_length: int) -> None:
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


def read(path: str, args: Namespace) -> Conversations:
    """Return the conversations of a file or folder, tokenized by this process or another, now or before.

    Raises ValueError for rows that are no conversations (unless `--wlb-sft-skip broken`), and for files that the
    datasets library cannot read.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(f"{path} needs the datasets library; pip install '.[sft]' in a clone") from error
    compute: Any = importlib.import_module("pyarrow.compute")
    files, tokenizer, skipped = _files(path), _tokenizer(args), args.wlb_sft_skip or ()
    tables = [_tokenized(file, tokenizer, args.data_cache_path, datasets) for file in files]
    table = datasets.concatenate_datasets(tables)
    reasons = table.data.column("broken")
    counts = compute.list_value_length(table.data.column("lengths")).to_numpy().astype(np.int64)
    if broken := [text for text in reasons.to_pylist() if text]:
        if "broken" not in skipped:
            raise ValueError(f"{broken[0]}; mend it, or leave such rows out by --wlb-sft-skip broken")
        left_out = f"{len(broken)} broken rows of {path} are left out: {'; '.join(broken[:3])}"
        print_rank_0(f"> wlb: WARNING: {printable(left_out)}")
    (rows,) = np.nonzero(counts)
    if not len(rows):
        why = broken[0] if broken else "it is empty"
        raise ValueError(f"{files[0]} has no conversation to train: {why}; give another file")
    begins = np.append(0, np.cumsum(counts[rows]))
    lengths = compute.list_flatten(table.data.column("lengths")).to_numpy().copy()
    size = int(lengths.sum())
    (long,) = np.nonzero(lengths > args.seq_length)
    if "long" in skipped:
        lengths[long] = 0
    if len(long):
        number = int(rows[np.searchsorted(begins, long[0], side="right") - 1])
        file = int(np.searchsorted(np.cumsum([len(each) for each in tables]), number, side="right"))
        how = "left out" if "long" in skipped else "cut off there"
        said = (
            f"{len(long)} of {len(lengths)} conversations of {path} have more than --seq-length {args.seq_length} "
            f"tokens, and are {how}; the first: {files[file]} row "
            f"{number - sum(len(each) for each in tables[:file]) + 1}"
        )
        print_rank_0(f"> wlb: {printable(said)}")
    lengths += -lengths % _multiple(args)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    starts -= np.repeat(starts[begins[:-1]], np.diff(begins))
    return Conversations(
        table=table.select(rows).with_format("numpy"),
        begins=begins,
        lengths=lengths,
        starts=starts,
        size=size,
        pad=tokenizer.pad_id,
    )


def _multiple(args: Namespace) -> int:
    """Return the number to whose multiples upstream pads the length of each conversation."""
    ranks = args.context_parallel_size or 1
    multiple = 2 * ranks if ranks > 1 else 1
    if hasattr(SFTDataset, "_calculate_padding_divisor") and args.sequence_parallel:  # main from #6742 on
        multiple *= args.tensor_model_parallel_size or 1
    return multiple


def _files(path: str) -> list[Path]:
    given = Path(path)
    files = sorted(filter(_kind, given.iterdir())) if given.is_dir() else [given]
    if not files or not all(f.is_file() and _kind(f) for f in files):
        raise ValueError(
            f"{path} holds no conversations; give --data-path a file of {', '.join(KINDS)}, or a folder of them"
        )
    INPUTS.update(map(os.path.realpath, files))
    return files


def _kind(file: Path) -> str | None:
    return KINDS.get(Path(file.name.removesuffix(".gz")).suffix)


def _tokenizer(args: Namespace) -> Any:
    """Upstream's, of `--tokenizer-type SFTTokenizer`."""
    if args.tokenizer_type != "SFTTokenizer":
        raise ValueError(
            f"--wlb: --sft tokenizes conversations by SFTTokenizer, and --tokenizer-type is {args.tokenizer_type}; "
            "give --tokenizer-type SFTTokenizer"
        )
    made = _made(args.tokenizer_model, args.sft_tokenizer_prompt_format)
    if made.pad_id is None:
        raise ValueError(
            f"--wlb: the tokenizer {args.tokenizer_model} has no pad token for --sft-tokenizer-prompt-format "
            f"{args.sft_tokenizer_prompt_format}, and upstream's --sft pads rows; add one"
        )
    return made


@functools.cache
def _made(model: str, prompt_format: str) -> Any:
    args = Namespace(
        tokenizer_type="SFTTokenizer",
        tokenizer_model=model,
        sft_tokenizer_prompt_format=prompt_format,
        metadata_path=None,
        pad_vocab_size=False,
    )
    return build_tokenizer(args)._tokenizer


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    """Parts of the tokenizer that tokens depend on."""
    inner = tokenizer._tokenizer
    fast = getattr(inner, "backend_tokenizer", None)
    vocabulary = fast.to_str() if fast is not None else repr(sorted(inner.get_vocab().items()))
    return vocabulary, tokenizer._prompt_format, tokenizer._prompt_config


def _tokenized(file: Path, tokenizer: Any, cache: str | None, datasets: Any) -> Any:
    """Return a row for every row of a file, see `_row`; from the cache if they are there."""
    try:
        named = glob.escape(str(file))  # the library takes names for patterns
        with file.open("rb") as opened:  # and times for contents
            content = hashlib.file_digest(opened, "blake2b").hexdigest()[:32]
        folder = Path(cache or datasets.config.HF_DATASETS_CACHE, content)
        table = datasets.load_dataset(_kind(file), data_files=named, split="all", cache_dir=str(folder))
    except Exception as error:  # of all kinds, StopIteration for an empty file
        raise ValueError(
            f"{file} cannot be read by the datasets library: {error.__cause__ or repr(error)}; mend it, and see that "
            "its cache can be written (--data-cache-path, or HF_DATASETS_CACHE)"
        ) from error
    told = repr((VERSION, _identity(tokenizer), str(file), table._fingerprint))
    types = {"tokens": "int32", "trained": "bool", "lengths": "int32"}
    features = {name: datasets.Sequence(datasets.Value(of)) for name, of in types.items()}
    try:
        return table.map(
            _row,
            with_indices=True,
            fn_kwargs={"file": str(file), "tokenizer": tokenizer},
            remove_columns=table.column_names,
            features=datasets.Features(features | {"broken": datasets.Value("string")}),
            num_proc=min(len(os.sched_getaffinity(0)), -(-len(table) // _ROWS)) if len(table) > _ROWS else None,
            new_fingerprint=hashlib.blake2b(told.encode(), digest_size=16).hexdigest(),
            desc=f"> wlb: tokenizing {printable(file.name)}",
        )
    except Exception as error:  # a full disk, whose file the library then closes twice
        raise ValueError(
            f"the tokens of {file} cannot be written: {error.__context__ or error}; free space, or name another folder "
            "(--data-cache-path, or HF_DATASETS_CACHE)"
        ) from error


def _row(row: dict[str, Any], number: int, file: str, tokenizer: Any) -> dict[str, Any]:
    """Return a row's tokens, which are trained as targets, and the length of each conversation.

    A broken row has none, and says why in `broken`.
    """
    found, broken = [], ""
    try:
        found = list(_conversations(row, tokenizer))
        if not all(mask[1:].any() for _, mask in found):
            raise ValueError("no token of it is trained")
    except Exception as error:  # templates raise of all kinds
        found, broken = [], f"{file} row {number + 1}: {type(error).__name__ if not str(error) else error}"[:300]
    tokens, trained = ([each[i] for each in found] for i in (0, 1))
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens], dtype=np.int32),
        "trained": np.concatenate([np.empty(0, bool), *trained]),
        "lengths": list(map(len, tokens)),
        "broken": broken,
    }


def _conversations(row: dict[str, Any], tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and mask of every conversation of a row, as upstream's SFTDataset splits and masks them."""
    if row.get("seq_start_id") is not None and row.get("input_ids") is not None:
        yield from _pack(row)
        return
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("it has no messages")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise ValueError(f"a message has role {role!r}; roles are {', '.join(ROLES)}")
        if role.lower() == "assistant" and not (message.get("content") or message.get("tool_calls")):
            raise ValueError("a message of the assistant is empty")
    begins = [i for i, message in enumerate(messages) if message["role"] == "system" or i == 0]
    for begin, end in itertools.pairwise([*begins, len(messages)]):
        ids, targets = tokenizer.tokenize_conversation(
            messages[begin:end], return_target=True, add_generation_prompt=False
        )
        yield ids, (targets != _IGNORED) & (targets != tokenizer.pad_id)


def _pack(row: dict[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The conversations of a pack of Megatron-Bridge, whose mask is for labels."""
    ids, labels, starts = (np.asarray(row.get(name)) for name in ("input_ids", "loss_mask", "seq_start_id"))
    for name, values, most in (
        ("input_ids", ids, 1 << 31),
        ("loss_mask", labels, 2),
        ("seq_start_id", starts, len(ids)),
    ):
        if values.ndim != 1 or values.dtype.kind not in "iub" or not ((values >= 0) & (values < most)).all():
            raise ValueError(f"{name} is no list of whole numbers from 0 to {most - 1}")
    if len(labels) != len(ids) or not len(starts) or starts[0] or (np.diff(starts) <= 0).any():
        raise ValueError(
            f"{len(labels)} entries of loss_mask for {len(ids)} input_ids, and seq_start_id {starts[:4].tolist()}...; "
            "they must be as many, and start at 0 and ascend"
        )
    for begin, end in itertools.pairwise([*starts.tolist(), len(ids)]):
        yield ids[begin:end].astype(np.int32), np.append(False, labels[begin : end - 1] != 0)
