"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import pathlib
import tempfile

__all__ = ["write_atomically"]


def write_atomically(path: pathlib.Path, content: str | bytes) -> None:
    """Write `content` so that a reader, or a crash at any point, sees the old file or the new one.

    Makes the folder where it is missing. The bytes are on disk before the name points to them.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        pathlib.Path(temporary).chmod(0o666 & ~umask)
        pathlib.Path(temporary).replace(path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
