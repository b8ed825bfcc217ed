"""How bad input ends a run."""

import contextlib
import os
import sys
from collections.abc import Iterator

from megatron_wlb.settings import printable


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn a ValueError for bad input into status 2 and one line, which names the rank: files may be missing there."""
    try:
        yield
    except ValueError as error:
        here = os.environ.get("RANK")
        rank = f" on rank {here}" if here and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print(
            f"{os.path.basename(sys.argv[0])}: error{rank}: {printable(str(error))}\n",
            end="",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2) from error
