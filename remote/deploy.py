"""`kd deploy`: a checkout and the engine's wheel become a release of a host."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import hashlib
import os
import pathlib
import socket
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdtree_engine.build import require_current
from kdtree_engine.errors import ConfigError, KdError, MissingError
from kdtree_engine.library import LIBRARY_NAME
from remote.agent import file_digest
from remote.bundle import Bundle, read_bundle, write_bundle
from remote.host_build import build_on_host, require_nvcc
from remote.inventory import Host
from remote.releases import Releases
from remote.sync import (
    Manifest,
    deliver,
    manifest_of,
    new_release_name,
    require_rsync,
    tracked_files,
    untracked_files,
)
from remote.tools import distribution_of, fetch_tools, needed_tools
from remote.transport import Transport
from remote.wheel import make_wheel

__all__ = [
    "Deployment",
    "deploy_bundle",
    "preview_bundle",
    "python_of",
    "releases_of",
    "this_person",
]


def releases_of(transport: Transport, host: Host) -> Releases:
    """The releases of a host, looked after by the Python that the inventory names for it."""
    return Releases(transport, python=python_of(host), root=host.root)


def python_of(host: Host) -> str:
    """The Python that SGLang is installed for: the inventory's, else the one of gates here."""
    return host.python or os.environ.get("KD_SGLANG_PYTHON") or sys.executable


def this_person() -> str:
    """Who does something, as logs of hosts name them."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def import_check(host: Host, *, kernels: bool) -> dict[str, Any]:
    """What a host's Python must be able to do with a release: see `remote.agent`."""
    return {
        "imports": ["kdtree_engine", "kdtree_engine.attention", "kdtree_engine.sglang_ext"],
        "entry_point": ["sglang.srt.plugins", "kdtree_mla"],
        "library": kernels and host.cuda_arch is not None,
    }


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One checkout on its way to one host.

    revision: its commit, and whether it differs from it; None where that is not known.
    cache: where tools that were fetched are kept; in the checkout's `.kd` where it is None.
    """

    checkout: pathlib.Path
    revision: tuple[str | None, bool | None]
    cache: pathlib.Path | None = None

    def require_library(self, host: Host) -> None:
        """Raises where the host has a GPU and the wheel would lack the kernels for it."""
        if host.cuda_arch is None:
            return
        if not self._library.is_file():
            raise MissingError(
                f"host {host.name} has a GPU ({host.cuda_arch}), and there is no kernel library",
                remedy="run `kd build`",
            )
        require_current(self._library, self._engine / "csrc")

    def preview(self, transport: Transport, host: Host) -> dict[str, Any]:
        """What the checkout would change there. Writes nothing.

        base: the release that it is held against; None where there is none. new, changed, removed:
        files. sends: folder, files and bytes of what is new or changed, by folders. kernels: of
        the libraries that `kd build` made, against those there.

        The wheel is left out, which would have to be built to be compared: it is of these sources
        and libraries.
        """
        libraries = {one.name: file_digest(one) for one in self._library.parent.glob("*.so")}
        names = tracked_files(self.checkout)
        return _preview(transport, host, self.checkout, names, libraries)

    def run(
        self,
        transport: Transport,
        host: Host,
        *,
        with_tools: bool = True,
        build_there: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Build the wheel, send everything and place it; what `release.json` says of it.

        with_tools: whether it is an error where what gates need beside SGLang cannot be fetched.
        build_there: compile the kernels on the host, and not take what `kd build` made here.

        The live service and `current` are not touched. Two deployments at once share the folder
        that things arrive in, so the host's lock is held meanwhile.
        """
        releases = releases_of(transport, host)
        releases.known()  # a host that cannot be reached is better met before anything is built
        if build_there:
            require_nvcc(transport)
        else:
            self.require_library(host)
        require_rsync(transport.host, releases.prepare())
        self._say_what_stays(note)
        if not build_there and not self._library.is_file():
            note("there is no kernel library (`kd build`): the release runs on CPUs alone")
        tools = self._tools(releases, with_tools, note)
        with (
            tempfile.TemporaryDirectory(prefix="kd-deploy-") as scratch,
            releases.locked(owner=this_person(), command=f"kd deploy --host {host.name}"),
        ):
            parts = self._parts(pathlib.Path(scratch), tools, note)
            return _place(transport, releases, host, parts, build_there, note)

    def bundle(
        self,
        target: pathlib.Path,
        python: Mapping[str, Any],
        *,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Write all that a release is made of to one file; the same checkout makes the same bytes.

        python: version, machine and glibc of the host's Python, which the tools are fetched for.
        All of them: what a host has is found out when it is deployed to.
        """
        if not target.absolute().parent.is_dir():
            raise ConfigError(f"{target.absolute().parent}: there is no such folder")
        if self._library.is_file():
            require_current(self._library, self._engine / "csrc")
        else:
            note("there is no kernel library (`kd build`): its releases run on CPUs alone")
        self._say_what_stays(note)
        needed = list(needed_tools(self.checkout).values())
        tools = fetch_tools(needed, python, self._cache, note)
        with tempfile.TemporaryDirectory(prefix="kd-bundle-") as scratch:
            parts = self._parts(pathlib.Path(scratch), tools, note)
            about = {**parts.about, "python": python["version"]}
            write_bundle(target, dataclasses.replace(parts, about=about))

    def _parts(
        self,
        scratch: pathlib.Path,
        tools: Sequence[pathlib.Path],
        note: Callable[[str], None],
    ) -> Bundle:
        note("builds the wheel")
        wheel = make_wheel(self._engine, tracked_files(self._engine), scratch)
        commit, changed = self.revision
        return Bundle(
            checkout=self.checkout,
            names=tuple(tracked_files(self.checkout)),
            wheel=wheel,
            tools=tuple(tools),
            about={
                "revision": commit,
                "changed": changed,
                "wheel": wheel.name,
                "kernels": self._library.is_file(),
            },
        )

    def _say_what_stays(self, note: Callable[[str], None]) -> None:
        if left := untracked_files(self.checkout):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            note(f"stays here, as git does not know it: {', '.join(left[:3])}{more}")

    def _tools(
        self, releases: Releases, required: bool, note: Callable[[str], None]
    ) -> list[pathlib.Path]:
        """Wheels of what gates import and the host's Python lacks."""
        needed = needed_tools(self.checkout)
        python = releases.look_at_python(list(needed))
        lacking = [needed[name] for name in needed if python["packages"][name] is None]
        try:
            wheels = fetch_tools(lacking, python, self._cache, note)
        except MissingError as error:
            if required:
                raise
            note(f"without what gates need there: {error}")
            return []
        # What those need may be there, as SGLang needs it as well.
        have = releases.look_at_python([distribution_of(wheel.name) for wheel in wheels])
        return [wheel for wheel in wheels if have["packages"][distribution_of(wheel.name)] is None]

    @property
    def _cache(self) -> pathlib.Path:
        return self.cache or self.checkout / ".kd" / "tools"

    @property
    def _library(self) -> pathlib.Path:
        return self._engine / "kdtree_engine" / "lib" / LIBRARY_NAME

    @property
    def _engine(self) -> pathlib.Path:
        return self.checkout / "kdtree-engine"


def deploy_bundle(
    path: pathlib.Path,
    transport: Transport,
    host: Host,
    *,
    with_tools: bool = True,
    build_there: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """As `Deployment.run`, of what `Deployment.bundle` wrote: nothing is built or fetched here."""
    with tempfile.TemporaryDirectory(prefix="kd-deploy-") as scratch:
        parts = read_bundle(path, pathlib.Path(scratch))
        releases = releases_of(transport, host)
        tools = _tools_of(parts, releases, host.name, with_tools, note)
        if build_there:
            require_nvcc(transport)
        elif host.cuda_arch is not None and not parts.about["kernels"]:
            raise MissingError(
                f"host {host.name} has a GPU ({host.cuda_arch}), and {path} has no kernel library",
                remedy="run `kd build` before `kd bundle`, or deploy with --build-on-host",
            )
        require_rsync(transport.host, releases.prepare())
        about = {key: parts.about[key] for key in ("revision", "changed", "wheel", "kernels")}
        parts = dataclasses.replace(parts, tools=tuple(tools), about=about)
        with releases.locked(owner=this_person(), command=f"kd deploy --host {host.name}"):
            return _place(transport, releases, host, parts, build_there, note)


def preview_bundle(path: pathlib.Path, transport: Transport, host: Host) -> dict[str, Any]:
    """As `Deployment.preview`."""
    with tempfile.TemporaryDirectory(prefix="kd-deploy-") as scratch:
        parts = read_bundle(path, pathlib.Path(scratch))
        with zipfile.ZipFile(parts.wheel) as packed:
            libraries = {
                pathlib.PurePosixPath(name).name: hashlib.sha256(packed.read(name)).hexdigest()
                for name in packed.namelist()
                if name.startswith("kdtree_engine/lib/") and name.endswith(".so")
            }
        return _preview(transport, host, parts.checkout, parts.names, libraries)


def _tools_of(
    parts: Bundle, releases: Releases, host: str, required: bool, note: Callable[[str], None]
) -> list[pathlib.Path]:
    """Those of a bundle that the host lacks. Raises MissingError where that is not all it lacks."""
    tools = {distribution_of(tool.name): tool for tool in parts.tools}
    python = releases.look_at_python([*tools, *needed_tools(parts.checkout)])
    lacking = [name for name, version in python["packages"].items() if version is None]
    unfit = [
        name
        for name in lacking
        if name not in tools
        or not (
            tools[name].name.endswith("-none-any.whl") or parts.about["python"] == python["version"]
        )
    ]
    if unfit:
        problem = (
            f"host {host}: gates need {', '.join(unfit)}, its Python {python['version']} lacks "
            f"them, and the bundle, made for Python {parts.about['python']}, has none for that one"
        )
        if required:
            remedy = f"`kd bundle --python {python['version']}`"
            raise MissingError(problem, remedy=remedy)
        note(problem)
    return [tools[name] for name in lacking if name not in unfit]


def _place(
    transport: Transport,
    releases: Releases,
    host: Host,
    parts: Bundle,
    build_there: bool,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Send the parts and make them a release, with the host's lock held."""
    kernels = build_there or bool(parts.about["kernels"])
    about = {
        **parts.about,
        "by": this_person(),
        "kernels": kernels,
        "wheel_sha256": file_digest(parts.wheel),
    }

    def arrived() -> None:
        if build_there:
            note("compiles the kernels there")
            build_on_host(transport, releases, note)

    release = new_release_name(parts.about["revision"], dirty=bool(parts.about["changed"]))
    did = {"did": "deploy", "by": about["by"], "from": None, "to": release, "release": release}
    try:
        placed = deliver(
            transport,
            releases,
            checkout=parts.checkout,
            names=parts.names,
            wheel=parts.wheel,
            tools=parts.tools,
            release=release,
            about=about,
            check=import_check(host, kernels=kernels),
            arrived=arrived,
            note=note,
        )
    except BaseException as error:
        with contextlib.suppress(KdError, OSError):  # of a host that is out of reach, say
            releases.audit({**did, "result": "failed", "text": str(error) or type(error).__name__})
        raise
    releases.audit({**did, "result": "placed"})
    return placed


def _preview(
    transport: Transport,
    host: Host,
    checkout: pathlib.Path,
    names: Sequence[str],
    libraries: Mapping[str, str],
) -> dict[str, Any]:
    wanted: Manifest = manifest_of(checkout, names, under="source")
    found = releases_of(transport, host).compare(wanted)
    there = found.pop("libraries")
    found["removed"] = [name for name in found["removed"] if name.startswith("source/")]
    found["sends"] = _by_folder(checkout, [*found["new"], *found["changed"]])
    if there == libraries:
        found["kernels"] = "the same" if libraries else "none"
    else:
        found["kernels"] = "changed" if there and libraries else "new" if libraries else "removed"
    return found


def _by_folder(checkout: pathlib.Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """folder, files and bytes; folder: the first of a path, `.` for files outside of any.

    names: of a manifest, as in `source/plans/a.md`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        path = pathlib.PurePosixPath(name).relative_to("source")
        folder = path.parts[0] if len(path.parts) > 1 else "."
        one = found.setdefault(folder, {"folder": folder, "files": 0, "bytes": 0})
        one["files"] += 1
        one["bytes"] += (checkout / path).stat().st_size
    return list(found.values())
