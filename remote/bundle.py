"""One file with all that a release is made of, for machines that reach a host and no registry.

It is a plain tar: `bundle.json` first (what it is, and the hash and mode of each other file), then
`source/...`, the engine's wheel in `wheel/` and the tools' wheels in `wheel/tools/`. The same
content makes the same bytes. What is read is held against all of that: nobody knows who made it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import shutil
import tarfile
from collections.abc import Mapping
from typing import Any

from kdtree_engine.errors import ConfigError
from remote.agent import file_digest
from remote.files import whole_file
from remote.sync import Manifest, manifest_of

__all__ = ["Bundle", "read_bundle", "write_bundle"]

_VERSION = 1
_INDEX = "bundle.json"
_INDEX_BYTES = 64 << 20
_ABOUT: dict[str, type | tuple[type, ...]] = {
    "revision": (str, type(None)),
    "changed": (bool, type(None)),
    "wheel": str,
    "kernels": bool,
    "python": str,
}


@dataclasses.dataclass(frozen=True)
class Bundle:
    """What a bundle held, unpacked.

    checkout: folder of the sources; names: its files.
    about: revision, changed, wheel, kernels, and python, which its tools are for.
    """

    checkout: pathlib.Path
    names: tuple[str, ...]
    wheel: pathlib.Path
    tools: tuple[pathlib.Path, ...]
    about: Mapping[str, Any]


def write_bundle(target: pathlib.Path, bundle: Bundle) -> None:
    """Write it to one file, at once or not at all. Raises OSError."""
    files = {f"source/{name}": bundle.checkout / name for name in bundle.names}
    files[f"wheel/{bundle.wheel.name}"] = bundle.wheel
    files |= {f"wheel/tools/{tool.name}": tool for tool in bundle.tools}
    manifest = manifest_of(bundle.checkout, bundle.names, under="source")
    for path, under in ((bundle.wheel, "wheel"), *((tool, "wheel/tools") for tool in bundle.tools)):
        manifest |= manifest_of(path.parent, [path.name], under=under)
    index = {"version": _VERSION, "about": dict(bundle.about), "files": manifest}
    text = (json.dumps(index, sort_keys=True, indent=1) + "\n").encode()
    with (
        whole_file(target, 0o644) as taken,
        tarfile.open(fileobj=taken, mode="w", format=tarfile.PAX_FORMAT) as packed,
    ):
        packed.addfile(_entry(_INDEX, len(text)), io.BytesIO(text))
        for name in sorted(files):
            with files[name].open("rb") as given:
                size = files[name].stat().st_size
                executable = bool(manifest[name]["executable"])
                packed.addfile(_entry(name, size, executable=executable), given)


def _entry(name: str, size: int, *, executable: bool = False) -> tarfile.TarInfo:
    """Without a time or an owner, which would make two bundles of the same content differ."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mode = 0o755 if executable else 0o644
    return entry


def read_bundle(path: pathlib.Path, folder: pathlib.Path) -> Bundle:
    """Unpack a bundle into `folder`, which is empty. Raises ConfigError with what is wrong."""
    try:
        # Not compressed: no file can hold more than the bundle's own size.
        with tarfile.open(path, mode="r:") as packed:
            manifest, about = _index(packed)
            found = set()
            for entry in packed:
                if entry.name == _INDEX:
                    continue
                _take(packed, entry, manifest, folder)
                if entry.name in found:
                    raise _Wrong(f"{entry.name!r} is there twice")
                found.add(entry.name)
        missing = sorted(set(manifest) - found)
        if missing:
            raise _Wrong(f"{missing[0]!r} is missing, and {len(missing) - 1} more")
    except _Wrong as error:
        raise ConfigError(f"{path}: is no whole bundle of kd: {error}", remedy=_REMEDY) from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (tarfile.TarError, EOFError, ValueError, KeyError, TypeError, OverflowError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: is no whole bundle of kd: {said}", remedy=_REMEDY) from None
    wheels = [name for name in manifest if name.startswith("wheel/")]
    return Bundle(
        checkout=folder / "source",
        names=tuple(
            sorted(name.partition("/")[2] for name in manifest if name.startswith("source/"))
        ),
        wheel=next(folder / name for name in wheels if name.count("/") == 1),
        tools=tuple(folder / name for name in sorted(wheels) if name.count("/") == 2),
        about=about,
    )


_REMEDY = "make it anew with `kd bundle`, or copy it again"


class _Wrong(Exception):
    """Why a file is no bundle, in a few words."""


def _index(packed: tarfile.TarFile) -> tuple[Manifest, dict[str, Any]]:
    first = packed.next()
    if first is None or first.name != _INDEX or not _is_plain(first):
        raise _Wrong(f"it does not begin with {_INDEX}")
    if first.size > _INDEX_BYTES:
        raise _Wrong(f"{_INDEX} has {first.size} bytes")
    given = packed.extractfile(first)
    assert given is not None
    index = json.loads(given.read())
    if index["version"] != _VERSION:
        raise _Wrong(f"it has version {index['version']!r}, expected {_VERSION}")
    manifest, about = index["files"], index["about"]
    if not isinstance(manifest, dict) or not isinstance(about, dict):
        raise _Wrong(f"{_INDEX} does not say what is in it")
    for name, said in manifest.items():
        parts = name.split("/")
        inside = len(parts) > 1 and not {"", ".", ".."} & set(parts) and "\0" not in name
        wheel = parts[0] == "wheel" and parts[-1].endswith(".whl")
        right = parts[0] == "source" or (
            wheel and (len(parts) == 2 or (len(parts) == 3 and parts[1] == "tools"))
        )
        if not (inside and right):
            raise _Wrong(f"{name!r} has no place in a bundle")
        if not isinstance(said["sha256"], str) or not isinstance(said["executable"], bool):
            raise _Wrong(f"{_INDEX} does not say what {name!r} is")
    if sum(name.count("/") == 1 and name.startswith("wheel/") for name in manifest) != 1:
        raise _Wrong("it has not one wheel of the engine")
    wrong = [key for key in _ABOUT if not isinstance(about.get(key), _ABOUT[key])]
    if wrong:
        raise _Wrong(f"{_INDEX} does not say its {', '.join(wrong)}")
    return manifest, about


def _is_plain(entry: tarfile.TarInfo) -> bool:
    """A file, and no link, device or folder; a sparse one could be larger than the bundle."""
    return entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.sparse is None


def _take(
    packed: tarfile.TarFile, entry: tarfile.TarInfo, manifest: Manifest, folder: pathlib.Path
) -> None:
    """Unpack one file that the manifest knows: its name has been looked at there."""
    if not _is_plain(entry):
        raise _Wrong(f"{entry.name!r} is no plain file")
    if entry.name not in manifest:
        raise _Wrong(f"{entry.name!r} is not in {_INDEX}")
    said = manifest[entry.name]
    target = folder / entry.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _Wrong(f"{entry.name!r} lies below a file") from None
    given = packed.extractfile(entry)
    assert given is not None
    if target.exists():
        raise _Wrong(f"{entry.name!r} is there twice")
    with target.open("wb") as taken:
        shutil.copyfileobj(given, taken)
    target.chmod(0o700 if said["executable"] else 0o600)
    if file_digest(target) != said["sha256"]:
        raise _Wrong(f"{entry.name!r} has other content than when it was made")
