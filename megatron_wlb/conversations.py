"""Conversations of `--sft`, tokenized once into a folder beside the data: a `.bin/.idx` dataset and its mask."""

import contextlib
import fcntl
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import print_rank_0

from megatron_wlb.files import INPUTS
from megatron_wlb.plan.dataset import DocumentIndex, read_index

VERSION = 1
ROLES = ("system", "user", "assistant", "tool")
SUFFIXES = (".jsonl", ".json", ".parquet", ".pq")
_ROWS = 64
"""Rows that a process takes at once."""
_IGNORED = -100
_worker: dict[str, Any] = {}
"""What processes of the pool inherit."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations of one `--data-path`."""

    index: DocumentIndex
    mask: np.ndarray
    """uint8 [tokens of the file], 1: trained as a target."""
    lengths: np.ndarray
    """Tokens of each, int32 [conversations]; 0: left out."""
    begins: np.ndarray
    """The first of each row of the files, int64 [rows + 1]."""


@dataclass(frozen=True, slots=True)
class _Rows:
    file: int
    begin: int
    """First byte, or first row of a parquet file."""
    first: int
    """Number of the first row, from 1."""
    count: int


@dataclass(frozen=True, slots=True)
class _Done:
    rows: np.ndarray
    """File and number of the row of each conversation, int32 [n, 2]."""
    lengths: list[int]
    tokens: np.ndarray
    mask: np.ndarray
    broken: list[str]
    """Rows left out, and why."""


def read(path: str, args: Namespace) -> Conversations:
    """Return the conversations of a file or folder, tokenized by this process or another, now or before.

    Raises ValueError for rows that are no conversations (unless `--wlb-sft-broken skip`), and as `read_index`.
    """
    files, tokenizer = _files(path), _tokenizer(args)
    digest = hashlib.blake2b(repr((VERSION, _identity(tokenizer), args.wlb_sft_broken)).encode(), digest_size=16)
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    key = digest.hexdigest()
    name = f"{Path(path).name}.wlb-{key[:16]}"
    folder = Path(args.data_cache_path or Path(path).absolute().parent) / name
    if not folder.exists():
        _build(files, folder, tokenizer, skip=args.wlb_sft_broken == "skip")
    if broken := json.loads((folder / "broken.json").read_text()):
        print_rank_0(f"> wlb: WARNING: {len(broken)} broken rows of {path} are left out: {'; '.join(broken[:3])}")
    index = read_index(str(folder / "tokens"))
    mask = np.memmap(folder / "mask.bin", np.uint8, "r")
    places = np.load(folder / "rows.npy", mmap_mode="r")
    begins = np.flatnonzero(np.diff(places, axis=0, prepend=-1).any(axis=1))
    lengths = np.array(index.lengths)
    (long,) = np.nonzero(lengths > args.seq_length)
    if args.wlb_sft_too_long == "drop":
        lengths[long] = 0
    if len(long):
        number, row = places[long[0]].tolist()
        how = "left out" if args.wlb_sft_too_long == "drop" else "cut off there"
        print_rank_0(
            f"> wlb: {len(long)} of {len(lengths)} conversations of {path} have more than --seq-length "
            f"{args.seq_length} tokens, and are {how}; the first: {files[number]} line {row}"
        )
    return Conversations(index, mask, lengths, np.append(begins, len(lengths)))


def _files(path: str) -> list[Path]:
    given = Path(path)
    files = sorted(f for f in given.iterdir() if f.suffix in SUFFIXES) if given.is_dir() else [given]
    if not files or not all(f.is_file() and f.suffix in SUFFIXES for f in files):
        raise ValueError(
            f"{path} holds no conversations; give --data-path a file of {', '.join(SUFFIXES)}, or a folder of them"
        )
    INPUTS.update(map(os.path.realpath, files))
    return files


def _tokenizer(args: Namespace) -> Any:
    """Upstream's, of `--tokenizer-type SFTTokenizer`."""
    if args.tokenizer_type != "SFTTokenizer":
        raise ValueError(
            f"--wlb: --sft tokenizes conversations by SFTTokenizer, and --tokenizer-type is {args.tokenizer_type}; "
            "give --tokenizer-type SFTTokenizer"
        )
    return _made(args.tokenizer_model, args.sft_tokenizer_prompt_format)


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
    """What tokens depend on."""
    inner = tokenizer._tokenizer
    fast = getattr(inner, "backend_tokenizer", None)
    vocabulary = fast.to_str() if fast is not None else repr(sorted(inner.get_vocab().items()))
    return vocabulary, tokenizer._prompt_format, tokenizer._prompt_config


# Building -----------------------------------------------------------------------------------------------------------


def _build(files: list[Path], folder: Path, tokenizer: Any, *, skip: bool) -> None:
    """Make the folder, whole or not at all; one process of a machine does, the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock, parts = (folder.with_name(f"{folder.name}.{end}") for end in ("lock", "parts"))
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # a process that is killed lets go of it
        if folder.exists():
            return
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        try:
            _write(files, parts, tokenizer, skip)
            with contextlib.suppress(FileExistsError):  # of another machine
                parts.rename(folder)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _write(files: list[Path], parts: Path, tokenizer: Any, skip: bool) -> None:
    builder = IndexedDatasetBuilder(str(parts / "tokens.bin"), dtype=np.int32)
    rows, broken, total = [np.empty((0, 2), np.int32)], [], 0
    with (parts / "mask.bin").open("wb") as mask:
        for done in _tokenized(files, tokenizer, skip):
            for tokens in np.split(done.tokens, np.cumsum(done.lengths)[:-1]):
                builder.add_document(tokens, [len(tokens)])
            mask.write(done.mask.tobytes())
            rows.append(done.rows)
            broken += done.broken
            total += len(done.lengths)
    builder.finalize(str(parts / "tokens.idx"))
    if not total:
        why = broken[0] if broken else "it is empty"
        raise ValueError(f"{files[0]} has no conversation to train: {why}; give another file")
    np.save(parts / "rows.npy", np.concatenate(rows))
    (parts / "broken.json").write_text(json.dumps(broken))


def _tokenized(files: list[Path], tokenizer: Any, skip: bool) -> Iterator[_Done]:
    """Conversations in order, from a pool of processes; shows how far it is."""
    tqdm: Any = importlib.import_module("tqdm").tqdm  # upstream's tokenizer has imported it
    tables = {i: _table(file) for i, file in enumerate(files) if file.suffix in (".parquet", ".pq")}
    _worker.update(files=files, tables=tables, tokenizer=tokenizer, skip=skip)
    size = sum(len(tables[i]) if i in tables else file.stat().st_size for i, file in enumerate(files))
    running: deque[tuple[int, Future[_Done]]] = deque()
    processes = len(os.sched_getaffinity(0))
    with (
        ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin) as pool,
        tqdm(total=size, desc=f"> wlb: tokenizing {files[0].name}", unit_scale=True, disable=None) as bar,
    ):
        for tasks in itertools.chain(_tasks(files, tables), itertools.repeat(None)):
            if tasks is not None:
                running.append((tasks[0], pool.submit(_take, tasks[1])))
            if running and (tasks is None or len(running) > 4 * processes):
                amount, future = running.popleft()
                yield future.result()
                bar.update(amount)
            if not running and tasks is None:
                break
    print_rank_0(f"> wlb: tokenized {', '.join(map(str, files))} in {processes} processes")


def _table(file: Path) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(f"{file} needs the datasets library; install it, as for upstream's --sft") from error
    return datasets.load_dataset("parquet", data_files=str(file), split="all")


def _tasks(files: list[Path], tables: dict[int, Any]) -> Iterator[tuple[int, _Rows]]:
    """Rows for the pool, and how many bytes (or rows of a table) they are."""
    for i, file in enumerate(files):
        if i in tables:
            for begin in range(0, len(tables[i]), _ROWS):
                count = min(_ROWS, len(tables[i]) - begin)
                yield count, _Rows(i, begin, begin + 1, count)
            continue
        with file.open("rb") as lines:
            begin = number = 0
            while some := list(itertools.islice(lines, _ROWS)):
                size = sum(map(len, some))
                yield size, _Rows(i, begin, number + 1, len(some))
                begin, number = begin + size, number + len(some)


def _begin() -> None:
    """In a process of the pool: the processes are parallel already."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def _take(task: _Rows) -> _Done:
    """Tokenize rows. Raises ValueError for a broken one, naming it, unless those are skipped."""
    rows, tokens, masks, broken = [], [], [], []
    file = _worker["files"][task.file]
    for number, row in enumerate(_rows(task), task.first):
        try:
            for ids, mask in _conversations(row):
                if not mask[1:].any():
                    raise ValueError("no token of it is trained")
                rows.append((task.file, number))
                tokens.append(ids)
                masks.append(mask)
        except Exception as error:  # templates raise of all kinds
            reason = f"{file} line {number}: {type(error).__name__ if not str(error) else error}"[:300]
            if not _worker["skip"]:
                raise ValueError(f"{reason}; mend it, or leave such rows out by --wlb-sft-broken skip") from None
            broken.append(reason)
    empty = np.empty(0, np.int32)
    return _Done(
        np.array(rows, np.int32).reshape(-1, 2),
        [len(each) for each in tokens],
        np.concatenate([empty, *tokens]).astype(np.int32),
        np.concatenate([empty, *masks]).astype(np.uint8),
        broken,
    )


def _rows(task: _Rows) -> Iterator[Any]:
    if task.file in _worker["tables"]:
        table = _worker["tables"][task.file]
        yield from (table[i] for i in range(task.begin, task.begin + task.count))
        return
    with _worker["files"][task.file].open("rb") as lines:
        lines.seek(task.begin)
        yield from itertools.islice(lines, task.count)


def _conversations(row: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and mask of every conversation of a row, as upstream's SFTDataset splits and masks them."""
    if isinstance(row, bytes):
        if not row.strip():
            return
        row = json.loads(row)
    if not isinstance(row, dict):
        raise ValueError("it is no object with messages")
    if "seq_start_id" in row and "input_ids" in row:  # a pack of Megatron-Bridge, whose mask is that of labels
        ids, labels = np.asarray(row["input_ids"]), np.asarray(row["loss_mask"], np.uint8)
        for begin, end in itertools.pairwise([*row["seq_start_id"], len(ids)]):
            yield ids[begin:end], np.append(np.zeros(1, np.uint8), labels[begin : end - 1])
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
    tokenizer = _worker["tokenizer"]
    begins = [i for i, message in enumerate(messages) if message["role"] == "system" or i == 0]
    for begin, end in itertools.pairwise([*begins, len(messages)]):
        ids, targets = tokenizer.tokenize_conversation(
            messages[begin:end], return_target=True, add_generation_prompt=False
        )
        yield ids, ((targets != _IGNORED) & (targets != tokenizer.pad_id)).astype(np.uint8)
