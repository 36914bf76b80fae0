"""Wheels as small as pip takes them."""

from __future__ import annotations

import pathlib
import zipfile


def make_wheel(
    folder: pathlib.Path, name: str, *, tag: str = "py3-none-any", needs: str = "", more: str = ""
) -> pathlib.Path:
    """A wheel of one module, as pip takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1-{tag}.whl"
    said = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
    said += f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", "value = 7\n")
        packed.writestr(f"{name}-1.dist-info/METADATA", said)
        packed.writestr(
            f"{name}-1.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        packed.writestr(f"{name}-1.dist-info/RECORD", "")
        if more:
            packed.writestr(more, "echo hello\n")
    return path
