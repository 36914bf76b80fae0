"""Files of this machine that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import IO

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(target: pathlib.Path, mode: int) -> Iterator[IO[bytes]]:
    """A file to be written, which becomes `target` when the block ends.

    It has `mode` and is on disk before it has its name; where the block raises, `target` stays as
    it was and nothing remains. Raises OSError.
    """
    # Beside the target, so that the rename stays within one file system.
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".kd-")
    part = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as taken:
            yield taken
            taken.flush()
            os.fchmod(taken.fileno(), mode)
            os.fsync(taken.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
