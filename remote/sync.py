"""A checkout's files, brought to a host and made a release there.

rsync carries them into the host's `incoming` folder, where a transfer that breaks off is taken up
again. What arrived is then read there and held against hashes that were made here, so that nothing
depends on what rsync believes.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError, MissingError
from remote.agent import file_digest
from remote.errors import TransportError, last_words
from remote.releases import Releases
from remote.transport import Transport

__all__ = [
    "Manifest",
    "deliver",
    "manifest_of",
    "new_release_name",
    "require_rsync",
    "tracked_files",
    "untracked_files",
]

Manifest = dict[str, dict[str, Any]]
"""{path: {"sha256": hex, "executable": bool}}"""

_LIMIT_S = 3600.0
_SILENT_S = 300
"""How long a transfer may stand still, on a line that lives: the other end's disk may hang."""
_ROOM = 1.2
"""How many times the bytes of the files have to be free before anything is sent."""


def tracked_files(root: pathlib.Path) -> list[str]:
    """The files of the checkout that git knows and that are there, as they are now.

    Raises ConfigError where `root` is no git checkout, or a file is a link or of another kind.
    """
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False, timeout=60
        )
    except FileNotFoundError:
        raise MissingError("git is not on PATH", remedy="install git") from None
    if listed.returncode:
        raise ConfigError(
            f"{root}: its files cannot be listed{last_words(os.fsdecode(listed.stderr), ': ')}",
            remedy="deploy from a git checkout",
        )
    listing = [name for name in os.fsdecode(listed.stdout).split("\0") if name]
    if not listing:
        raise ConfigError(f"{root}: git knows no file here", remedy="deploy from a git checkout")
    names = []
    for name in listing:
        try:
            kind = (root / name).lstat().st_mode
        except FileNotFoundError:
            continue  # removed, and not committed yet
        inside = (root / name).parent.resolve() == (root.resolve() / name).parent
        if not (inside and stat.S_ISREG(kind)):
            raise ConfigError(f"{root / name}: expected a plain file, to be sent to a host")
        names.append(name)
    return names


def manifest_of(folder: pathlib.Path, names: Sequence[str], *, under: str) -> Manifest:
    """Of files of `folder`, whose paths on the host begin with `under`."""
    return {
        f"{under}/{name}": {
            "sha256": file_digest(folder / name),
            "executable": bool((folder / name).stat().st_mode & stat.S_IXUSR),
        }
        for name in names
    }


def new_release_name(revision: str | None, *, dirty: bool) -> str:
    """Sorts by time: `20261129T140102Z-5f30ea0`, with `-changed` where that is not all of it."""
    now = datetime.datetime.now(datetime.UTC)
    name = f"{now:%Y%m%dT%H%M%SZ}-{(revision or 'unknown')[:7]}"
    return f"{name}-changed" if dirty else name


def deliver(
    transport: Transport,
    releases: Releases,
    *,
    checkout: pathlib.Path,
    wheel: pathlib.Path,
    release: str,
    about: Mapping[str, Any],
    names: Sequence[str] | None = None,
    tools: Sequence[pathlib.Path] = (),
    check: Mapping[str, Any] | None = None,
    arrived: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Send the checkout and the engine's wheel, and make them a release; its `release.json`.

    names: the files of the checkout; those that git knows where it is None.
    tools: wheels of what gates import and the host lacks. check: see `Releases.place`.
    arrived: called when all is there, before it is a release.

    Nothing that is in use is touched: a failure at any point leaves `incoming` behind, and the next
    call goes on from there.

    Raises MissingError without rsync on either side, TransportError where something cannot be sent
    or does not arrive as it is.
    """
    names = tracked_files(checkout) if names is None else names
    note(f"{len(names)} files")
    manifest = manifest_of(checkout, names, under="source")
    manifest |= manifest_of(wheel.parent, [wheel.name], under="wheel")
    for tool in tools:
        manifest |= manifest_of(tool.parent, [tool.name], under="wheel/tools")
    place = releases.prepare()
    host = transport.host
    require_rsync(host, place)
    needed = sum((checkout / name).stat().st_size for name in names)
    needed += 3 * sum(packed.stat().st_size for packed in (wheel, *tools))
    if place["free_bytes"] < _ROOM * needed:
        raise TransportError(
            f"host {host}: {place['root']} has {place['free_bytes'] >> 20} MiB free, "
            f"{int(_ROOM * needed) >> 20} MiB are needed"
        )
    kept = releases.expect(sorted(manifest))
    note(f"sends, {kept} are there" if kept else "sends")
    _rsync(transport, checkout, names, f"{place['root']}/incoming/source", place["base"])
    transport.put(wheel, f"{place['root']}/incoming/wheel/{wheel.name}")
    for tool in tools:
        transport.put(tool, f"{place['root']}/incoming/wheel/tools/{tool.name}")
    arrived()
    note("verifies")
    return releases.place(release, manifest, about, check=check)


def untracked_files(root: pathlib.Path) -> list[str]:
    """The files that git neither knows nor ignores: they are not sent."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=False,
        timeout=60,
    )
    return [name for name in os.fsdecode(done.stdout).split("\0") if name]


def require_rsync(host: str, place: Mapping[str, Any]) -> None:
    """Raises MissingError without rsync here or there. place: of `Releases.prepare`."""
    if shutil.which("rsync") is None or place["rsync"] is None:
        where = f"host {host}" if place["rsync"] is None else "this machine"
        raise MissingError(f"{where}: rsync is not on PATH", remedy="install rsync there")


def _rsync(
    transport: Transport,
    source: pathlib.Path,
    names: Sequence[str],
    target: str,
    base: str | None = None,
) -> None:
    line = [
        *("rsync", "--recursive", "--times", "--perms", "--partial", "--checksum"),
        # For this user alone; whether a file is a program is kept.
        "--chmod=Du=rwx,Dgo=,Fu=rwX,Fgo=",
        *("--files-from=-", "--from0", "--protect-args", f"--timeout={_SILENT_S}"),
        # What the last release has as well takes no time and no room.
        *([f"--link-dest=../../releases/{base}/source"] if base else []),
        *transport.rsync_options(),
        f"{source}/",
        f"{transport.rsync_place(target)}/",
    ]
    try:
        done = subprocess.run(
            line,
            # With ./ no name begins with # or ;, which rsync takes for a comment.
            input=os.fsencode("\0".join(f"./{name}" for name in names)),
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise TransportError(
            f"host {transport.host}: rsync did not end within {_LIMIT_S:g} s; the next try goes on "
            "where it was"
        ) from None
    if done.returncode:
        raise TransportError(
            f"host {transport.host}: rsync ended with exit code {done.returncode}"
            f"{last_words(_reason(os.fsdecode(done.stderr)), ': ')}; the next try goes on where it "
            "was"
        )


def _reason(said: str) -> str:
    """Why rsync failed: what ssh said where it was ssh, else the first fault of rsync's own."""
    lines = said.splitlines()
    own = [line for line in lines if line.startswith("rsync:")]
    ssh = [line for line in lines if not line.startswith(("rsync", "--link-dest"))]
    lost = own and "connection unexpectedly closed" in own[0]
    return (ssh[-1] if lost and ssh else own[0] if own else said) if lines else ""
