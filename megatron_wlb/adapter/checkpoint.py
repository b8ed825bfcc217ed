"""Packer state in one JSON file beside each Megatron checkpoint, with a digest of itself."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_STATE_BYTES = 256 << 20
"""Far above any state (100 bytes a waiting document), so that a wrong file is not read into memory."""


def state_path(folder: str, iteration: int) -> Path:
    """`FOLDER/iter_0000010.wlb.json`, beside upstream's `FOLDER/iter_0000010/`."""
    return Path(folder) / f"iter_{iteration:07d}.wlb.json"


def save_state(folder: str, iteration: int, state: dict[str, Any], layout: Mapping[str, int | str]) -> None:
    """Write the state and the layout of the run atomically: a crash leaves the old file or the new one, never a part.

    The layout is there to be compared with the next run's; nothing depends on it. Raises OSError, naming the file,
    where the disk does not take it.
    """
    state = state | {"layout": dict(layout)}
    path, temporary = state_path(folder, iteration), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with os.fdopen(descriptor, "w") as file:
            json.dump(state | {"digest": _digest(state)}, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(
                error.errno,
                f"cannot save the packer state {path}: {error.strerror}; earlier checkpoints are as they were, free "
                "space or make the folder writable, and resume from the last one",
            ) from error
        raise


def load_state(folder: str, iteration: int) -> tuple[dict[str, Any], dict[str, int | str]]:
    """Read the state of a checkpoint and the layout of the run that saved it, empty in files of earlier releases.

    Raises ValueError if there is none, or it is not what `save_state` wrote.
    """
    path = state_path(folder, iteration)
    if not path.is_file():
        raise ValueError(
            f"the checkpoint of iteration {iteration} in {folder} has no packer state {path.name}: it was saved "
            "without --wlb, or copied without this file; copy the file"
        )
    size = path.stat().st_size
    if size > MAX_STATE_BYTES:
        raise ValueError(
            f"packer state {path} has {size} bytes, where no state has over {MAX_STATE_BYTES}; restore it or resume an "
            "older one"
        )
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        if not isinstance(state, dict) or state.pop("digest", None) != _digest(state):
            raise ValueError("its digest is not that of its contents")
        layout = state.pop("layout", {})
        if not isinstance(layout, dict) or not all(type(v) is int or type(v) is str for v in layout.values()):
            raise ValueError("its layout does not map names to numbers and texts")
    except (ValueError, RecursionError) as error:  # cut off, no text, numbers of thousands of digits, deep nesting
        raise ValueError(f"packer state {path} is damaged ({error}); restore it or resume an older one") from error
    return state, layout


def _digest(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, separators=(",", ":")).encode(), digest_size=16).hexdigest()
