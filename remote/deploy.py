"""`kd deploy`: a checkout and the engine's wheel become a release of a host."""

from __future__ import annotations

import dataclasses
import getpass
import os
import pathlib
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from kdtree_engine.build import require_current
from kdtree_engine.errors import MissingError
from kdtree_engine.library import LIBRARY_NAME
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

__all__ = ["Deployment", "import_check", "python_of", "releases_of", "this_person"]


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
        """What the checkout would change there: base, new, changed, removed. Writes nothing.

        The wheel is left out: it would have to be built to be compared.
        """
        wanted: Manifest = manifest_of(self.checkout, tracked_files(self.checkout), under="source")
        found = releases_of(transport, host).compare(wanted)
        found["removed"] = [name for name in found["removed"] if name.startswith("source/")]
        return found

    def run(
        self,
        transport: Transport,
        host: Host,
        *,
        with_tools: bool = True,
        note: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Build the wheel, send everything and place it; what `release.json` says of it.

        with_tools: whether it is an error where what gates need beside SGLang cannot be fetched.

        The live service and `current` are not touched. Two deployments at once share the folder
        that things arrive in, so the host's lock is held meanwhile.
        """
        names = tracked_files(self._engine)
        releases = releases_of(transport, host)
        releases.known()  # a host that cannot be reached is better met before anything is built
        self.require_library(host)
        require_rsync(transport.host, releases.prepare())
        if left := untracked_files(self.checkout):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            note(f"stays here, as git does not know it: {', '.join(left[:3])}{more}")
        has_kernels = self._library.is_file()
        if not has_kernels:
            note("there is no kernel library (`kd build`): the release runs on CPUs alone")
        commit, changed = self.revision
        release = new_release_name(commit, dirty=bool(changed))
        by = this_person()
        tools = self._tools(releases, with_tools, note)
        with (
            tempfile.TemporaryDirectory(prefix="kd-deploy-") as scratch,
            releases.locked(owner=by, command=f"kd deploy --host {host.name}"),
        ):
            note("builds the wheel")
            wheel = make_wheel(self._engine, names, pathlib.Path(scratch))
            about = {
                "revision": commit,
                "changed": changed,
                "by": by,
                "wheel": wheel.name,
                "kernels": has_kernels,
            }
            placed = deliver(
                transport,
                releases,
                checkout=self.checkout,
                wheel=wheel,
                release=release,
                about=about,
                tools=tools,
                check=import_check(host, kernels=has_kernels),
                note=note,
            )
            releases.audit({"did": "deploy", "by": by, "release": release, "result": "placed"})
        return placed

    def _tools(
        self, releases: Releases, required: bool, note: Callable[[str], None]
    ) -> list[pathlib.Path]:
        """Wheels of what gates import and the host's Python lacks."""
        needed = needed_tools(self.checkout)
        python = releases.look_at_python(list(needed))
        lacking = [needed[name] for name in needed if python["packages"][name] is None]
        try:
            wheels = fetch_tools(
                lacking, python, self.cache or self.checkout / ".kd" / "tools", note
            )
        except MissingError as error:
            if required:
                raise
            note(f"without what gates need there: {error}")
            return []
        # What those need may be there, as SGLang needs it as well.
        have = releases.look_at_python([distribution_of(wheel.name) for wheel in wheels])
        return [wheel for wheel in wheels if have["packages"][distribution_of(wheel.name)] is None]

    @property
    def _library(self) -> pathlib.Path:
        return self._engine / "kdtree_engine" / "lib" / LIBRARY_NAME

    @property
    def _engine(self) -> pathlib.Path:
        return self.checkout / "kdtree-engine"
