"""The engine's wheel, as it goes to a host: made from what git knows, without a registry."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from kdtree_engine.build import CompileError

__all__ = ["make_wheel"]

_LIBRARY = pathlib.Path("kdtree_engine") / "lib"
_LIMIT_S = 300.0
_EPOCH = "315532800"  # 1980, the first year that a zip knows


def make_wheel(engine: pathlib.Path, names: Sequence[str], folder: pathlib.Path) -> pathlib.Path:
    """Build the wheel of these files of `engine` and put it into `folder`, which exists.

    With the kernel library where `kd build` has put one, which makes it a wheel for this platform.
    The sources are left as they are. Raises CompileError with what the build said last.
    """
    with tempfile.TemporaryDirectory(prefix="kd-wheel-") as scratch:
        copy = pathlib.Path(scratch) / "sources"
        library = [
            str(path.relative_to(engine))
            for path in (engine / _LIBRARY).glob("*")
            if path.suffix in (".so", ".json")
        ]
        for name in (*names, *library):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engine / name, copy / name)
        program = f"import setuptools.build_meta as meta; meta.build_wheel({str(folder)!r})"
        try:
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=copy,
                # Times of files would make two wheels of the same content differ.
                env=os.environ | {"SOURCE_DATE_EPOCH": _EPOCH},
                capture_output=True,
                text=True,
                check=False,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(f"the wheel was not built within {_LIMIT_S:g} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise CompileError(
            f"the wheel could not be built: {last[0] if last else 'no message'}",
            remedy="pip install 'setuptools>=77'",
        )
    return wheels[0]
