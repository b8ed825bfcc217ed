"""The state of a packer: made, checked, saved and loaded. A digest detects damage."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb import files
from megatron_wlb.documents import DOCUMENT
from megatron_wlb.job import Job

FORMAT = "megatron-wlb-packer-state"
VERSION = 5
FIELDS = ("packer", "job", "consumed_samples", "documents")
"""Of a file."""
MAX_BYTES = 4 << 30
"""Far above any state (100 bytes per waiting document); a larger file is neither read nor written."""


def make(header: dict[str, Any], waiting: dict[str, np.ndarray]) -> dict[str, Any]:
    state = {"format": FORMAT, "version": VERSION, **header}
    state["waiting"] = {place: [list(row) for row in rows.tolist()] for place, rows in waiting.items()}
    return state | {"digest": _digest(state)}


def waiting(state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the waiting documents of a state, by place: DOCUMENT arrays."""
    return {place: np.array([tuple(row) for row in rows], DOCUMENT) for place, rows in state["waiting"].items()}


def check(state: Any) -> None:
    """Raise ValueError unless this is an undamaged state of this version."""
    kind = state.get("format") if isinstance(state, dict) else None
    if kind != FORMAT:
        raise ValueError(
            f"this is not a packer state: its format is {str(kind)[:40]!r}, not {FORMAT!r}; give the "
            "iter_XXXXXXX.wlb.json of a checkpoint"
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"packer state of version {state.get('version')}; this release reads version {VERSION}, resume with the "
            "release that saved it"
        )
    if state.get("digest") != _digest(state):
        raise ValueError("the packer state is damaged: its digest does not match its contents; resume an older one")


def _digest(state: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in state.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def save(path: str | os.PathLike[str], state: dict[str, Any], job: Job, consumed_samples: int, documents: int) -> None:
    """Write a state, its job, the samples that its checkpoint has consumed, and a digest of the documents, atomically.

    Raises OSError, naming the file, if the disk does not take it, and ValueError for a state that `load` would refuse.
    """
    text = json.dumps(
        dict(zip(FIELDS, (state, job.to_json(), consumed_samples, documents), strict=True)), separators=(",", ":")
    )
    if len(text) > MAX_BYTES:
        raise ValueError(f"the packer state {path} has {len(text)} bytes, over {MAX_BYTES}; let fewer documents wait")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with files.written(path) as file:
            file.write(text)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot save the packer state {path}: {error.strerror}; earlier checkpoints are as they were, free "
            "space or make the folder writable, and resume from the last one",
        ) from error


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Read a file of `save`: state, job as JSON types, samples consumed, digest of documents. Raises ValueError."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"there is no packer state {path}: its checkpoint was saved without --wlb, or copied without this file; "
            "copy the file"
        )
    text = files.read(path, MAX_BYTES, "no packer state is such a file, restore it")
    try:
        data = json.loads(text)
        data = data if isinstance(data, dict) else {}
        check(data.get("packer"))
        if data.keys() != {*FIELDS}:
            raise ValueError(f"its fields are {', '.join(sorted(data))}, not {', '.join(FIELDS)}")
    except (ValueError, RecursionError) as error:  # truncated, no text, nested too deeply, or refused by `check`
        raise ValueError(f"{path} cannot be read as a packer state: {error}; restore it") from error
    packer, job, consumed, documents = (data[name] for name in FIELDS)
    return packer, job, consumed, documents
