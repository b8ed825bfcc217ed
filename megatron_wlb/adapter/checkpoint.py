"""Packer state in one JSON file beside each Megatron checkpoint."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def state_path(folder: str, iteration: int) -> Path:
    """`FOLDER/iter_0000010.wlb.json`, beside upstream's `FOLDER/iter_0000010/`."""
    return Path(folder) / f"iter_{iteration:07d}.wlb.json"


def save_state(folder: str, iteration: int, state: dict[str, Any]) -> None:
    """Write the state atomically: a crash leaves the old file or the new one, never a part."""
    path = state_path(folder, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(state, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_state(folder: str, iteration: int) -> dict[str, Any]:
    """Read the state of a checkpoint. Raises ValueError if there is none or it is not JSON."""
    path = state_path(folder, iteration)
    if not path.is_file():
        raise ValueError(
            f"the checkpoint of iteration {iteration} in {folder} has no packer state {path.name}: it was saved "
            "without --wlb, or copied without this file; copy the file, or start from it with --finetune"
        )
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"packer state {path} is damaged ({error}); restore it or resume an older one") from error
    return state
