"""Make a Megatron dataset (PREFIX.bin, PREFIX.idx) of Python source that is on every machine with torch installed.

A document is a source file, or a small folder of them. The window of the demo is short, so that it runs without a GPU,
and most source files are longer: of those over `PIVOT_BYTES` a part is left out, the more the longer they are, until
lengths are spread over the window as in a real corpus over 128K, most far shorter and a few longer.
"""

import argparse
import importlib.util
import json
import os
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.corpus import draw, train_tokenizer

PIVOT_BYTES = 2048
SHARE_OF_JOINED_FOLDERS = 0.1
LARGEST_JOINED_FOLDER_BYTES = 16 * 1024
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Files that become one document."""

    name: str
    paths: tuple[Path, ...]


def main() -> None:
    arguments = parse_arguments()
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    summary = read_complete(arguments.output, settings)
    if summary is None:
        summary = make_dataset(arguments.output, settings)
    print_summary(summary, arguments.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="prefix of the dataset")
    parser.add_argument("--vocab-size", type=int, default=4096, help="including the end-of-document token")
    parser.add_argument("--max-tokens", type=int, default=4_000_000)
    parser.add_argument("--context-length", type=int, default=2048, help="only for the summary")
    return parser.parse_args()


def read_complete(prefix: Path, settings: dict[str, int]) -> dict[str, Any] | None:
    """The summary of a dataset that was finished with these settings, or None."""
    if not all(Path(f"{prefix}{suffix}").exists() for suffix in (".json", ".bin", ".idx")):
        return None
    summary = json.loads(Path(f"{prefix}.json").read_text())
    return summary if summary["settings"] == settings else None


def make_dataset(prefix: Path, settings: dict[str, int]) -> dict[str, Any]:
    sources = find_sources()
    with Console().status("training the tokenizer"):
        tokenizer = train_tokenizer(map(read_document, sources), settings["vocab_size"])
    eod_id = tokenizer.get_vocab_size()
    documents = encode_documents(sources, tokenizer, eod_id, settings["max_tokens"])
    lengths = write_dataset(prefix, documents, eod_id + 1)
    context_length = settings["context_length"]
    summary = {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "vocab_size": eod_id + 1,
        "eod_id": eod_id,
        "longest": int(lengths.max()),
        "quantiles": {name: int(np.quantile(lengths, q)) for name, q in QUANTILES.items()},
        "share_in_longer_than_window": float(lengths[lengths > context_length].sum() / lengths.sum()),
        "settings": settings,
    }
    temporary = Path(f"{prefix}.tmp.json")
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    temporary.rename(f"{prefix}.json")
    return summary


def find_sources() -> list[Source]:
    """Files and folders of the standard library and of torch, in an order drawn from their names; no file twice."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise ModuleNotFoundError("torch is not installed: run scripts/setup.sh first")
    sources = []
    for label, root in (("python", Path(sysconfig.get_paths()["stdlib"])), ("torch", Path(torch.origin).parent)):
        folders = defaultdict(list)
        for path in sorted(root.rglob("*.py")):
            if not {"site-packages", "__pycache__"} & set(path.relative_to(root).parts):
                folders[path.parent].append(path)
        for folder, paths in folders.items():
            name = f"{label}/{folder.relative_to(root)}"
            size_bytes = sum(path.stat().st_size for path in paths)
            if size_bytes <= LARGEST_JOINED_FOLDER_BYTES and draw("join", name) < SHARE_OF_JOINED_FOLDERS:
                sources.append(Source(name=name, paths=tuple(paths)))
                continue
            for path in paths:
                file, size_bytes = f"{name}/{path.name}", path.stat().st_size
                if size_bytes and draw("keep", file) < (PIVOT_BYTES / size_bytes) ** 2:
                    sources.append(Source(name=file, paths=(path,)))
    return sorted(sources, key=lambda source: draw("order", source.name))


def read_document(source: Source) -> str:
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in source.paths)


def encode_documents(sources: list[Source], tokenizer: Tokenizer, eod_id: int, max_tokens: int) -> Iterator[list[int]]:
    """Documents in the order of the sources, skipping those that would exceed `max_tokens`."""
    tokens = 0
    for source in track(sources, description="encoding"):
        document = [*tokenizer.encode(read_document(source)).ids, eod_id]
        if len(document) <= max_tokens - tokens:
            tokens += len(document)
            yield document


def write_dataset(prefix: Path, documents: Iterable[list[int]], vocab_size: int) -> np.ndarray:
    """Writes PREFIX.bin and PREFIX.idx under temporary names first. Returns the lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron regrets the absence of libraries that only training needs
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.tmp.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.tmp.idx")
    Path(f"{prefix}.json").unlink(missing_ok=True)
    for suffix in (".bin", ".idx"):
        os.replace(f"{prefix}.tmp{suffix}", f"{prefix}{suffix}")
    return np.array(builder.sequence_lengths, dtype=np.int64)


def print_summary(summary: dict[str, Any], prefix: Path) -> None:
    context_length = summary["settings"]["context_length"]
    table = Table(title=f"{prefix}, vocabulary of {summary['vocab_size']}", show_header=False)
    rows = {
        "documents": f"{summary['documents']:,}",
        "tokens": f"{summary['tokens']:,}",
        **{f"length, {name}": f"{value:,}" for name, value in summary["quantiles"].items()},
        "length, longest": f"{summary['longest']:,}",
        f"share of tokens in documents over {context_length:,}": f"{summary['share_in_longer_than_window']:.1%}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    main()
