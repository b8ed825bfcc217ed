"""The file in which upstream notes the latest checkpoint."""

import contextlib
import os
import pkgutil
from collections.abc import Iterator
from typing import Any

from megatron_wlb import files
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.versions import upstream


@contextlib.contextmanager
def whole_tracker() -> Iterator[None]:
    """Make upstream update its tracker of the latest checkpoint at once; it empties the file first."""

    def at_once(original: Any) -> Any:
        def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            tracker = os.path.basename(path) == "latest_checkpointed_iteration.txt" and "://" not in str(path)
            return files.written(path) if tracker and mode == "w" else original(path, mode, *args, **kwargs)

        return open_file

    owner, name = upstream().tracker
    with replaced(pkgutil.resolve_name(owner), name, at_once, ()):
        yield
