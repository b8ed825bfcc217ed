"""The text of `benchmarks/convergence.py`: Python files of packages at the versions of requirements/constraints.txt.

Whoever has these versions has the same text, and can add runs to older ones. A document is a file; of files with equal
content the first by name counts. Long files are thinned (`THINNING`), so that lengths are spread as in a real corpus
over a long window: most documents are short, and a few long ones hold much of the tokens. Which documents are held out
for validation depends on their names alone.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

CONSTRAINTS = Path(__file__).parent.parent / "requirements/constraints.txt"
PACKAGES = """
    torch megatron-core numpy psutil setuptools pytest hypothesis mypy matplotlib tokenizers rich tensorboard scipy
    pyarrow mkdocs-material mkdocs
""".split()
HELD_OUT = 0.06
THINNING = 1.5
"""The share (pivot_bytes / size) ** THINNING of the files over `pivot_bytes` is kept."""
SAMPLE_CHARACTERS = 4_000_000
"""Text that tokenizers are trained on, in whole documents."""


def load(path: Path, *, vocab_size: int, pivot_bytes: int) -> dict[str, Any]:
    """The corpus, made anew if `path` (.npz) has none of these settings.

    Returns {"tokens": uint16 [total], "lengths": int64 [documents] in tokens, the end of document included,
    "held_out": bool [documents], "summary": sizes and a digest}.
    """
    settings = {"vocab_size": vocab_size, "pivot_bytes": pivot_bytes}
    if path.exists():
        with np.load(path) as stored:
            summary = json.loads(str(stored["summary"]))
            if summary["settings"] == settings:
                return {name: stored[name] for name in ("tokens", "lengths", "held_out")} | {"summary": summary}
    corpus = _make(**settings)
    summary = _summary(**corpus) | {"settings": settings}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez(temporary, **corpus, summary=json.dumps(summary))  # type: ignore[arg-type]
    temporary.rename(path)
    return corpus | {"summary": summary}


def draw(purpose: str, name: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:6]) / 2**48


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE of `SAMPLE_CHARACTERS` of the texts; it leaves the last of `vocab_size` ids to the end of a
    document."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # reading a corpus needs none

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_sample(texts), trainer)
    return tokenizer


def _sample(texts: Iterable[str]) -> Iterator[str]:
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size >= SAMPLE_CHARACTERS:
            return


def _make(*, vocab_size: int, pivot_bytes: int) -> dict[str, np.ndarray]:
    texts: dict[str, str] = {}
    """Content to name."""
    for name, path in _files():
        size_bytes = path.stat().st_size
        if size_bytes and draw("keep", name) < (pivot_bytes / size_bytes) ** THINNING:
            texts.setdefault(path.read_text(encoding="utf-8", errors="replace"), name)
    order = sorted(texts, key=lambda text: draw("order", texts[text]))
    held_out = np.array([draw("held out", texts[text]) < HELD_OUT for text in order])
    tokenizer = train_tokenizer((text for text, held in zip(order, held_out, strict=True) if not held), vocab_size)
    end_of_document = tokenizer.get_vocab_size()
    documents = [[*encoding.ids, end_of_document] for encoding in tokenizer.encode_batch(order)]
    lengths = np.array([len(document) for document in documents], np.int64)
    return {"tokens": np.concatenate(documents).astype(np.uint16), "lengths": lengths, "held_out": held_out}


def _files() -> Iterator[tuple[str, Path]]:
    """The files, by names that do not depend on where packages are installed.

    Raises ValueError if a package is of another version, PackageNotFoundError if it is missing.
    """
    wanted = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    for package in PACKAGES:
        found = distribution(package)
        if found.version != wanted[package]:
            said = f"the text is of {package} {wanted[package]}, which is {found.version} here"
            raise ValueError(f"{said}; install {CONSTRAINTS.name}")
        for path in sorted(str(file) for file in found.files or () if file.suffix == ".py"):
            yield f"{package}/{path}", Path(str(found.locate_file(path)))


def _summary(*, tokens: np.ndarray, lengths: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for array in (tokens, lengths, held_out):
        digest.update(array.tobytes())

    def sizes(lengths: np.ndarray) -> dict[str, Any]:
        p50, p90 = np.quantile(lengths, (0.5, 0.9)).astype(int).tolist()
        found = {"documents": len(lengths), "tokens": int(lengths.sum()), "longest": int(lengths.max())}
        return found | {"p50": p50, "p90": p90}

    return {"train": sizes(lengths[~held_out]), "held_out": sizes(lengths[held_out]), "digest": digest.hexdigest()}
