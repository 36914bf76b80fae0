"""The releases of one host: what `remote.agent`, which runs there, is asked to do."""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from remote.errors import TransportError, last_words
from remote.transport import Transport

__all__ = ["ReleaseRefused", "Releases"]

_LIMIT_S = 120.0
_SLOW_S = 900.0  # where many files are read or brought to disk
_AGENT = pathlib.Path(__file__).with_name("agent.py")
# The program comes by stdin, before the request: nothing is installed on the host for it.
_BOOT = (
    "import sys; size = int(sys.stdin.buffer.readline()); "
    "exec(compile(sys.stdin.buffer.read(size), 'kd-agent', 'exec'), {'__name__': '__main__'})"
)


class ReleaseRefused(TransportError):
    """The host says why it did not do what it was asked for. Nothing has changed there."""


class Releases:
    """What a host has under its root."""

    def __init__(self, transport: Transport, *, python: str, root: str) -> None:
        """python: path of any Python of the host, 3.9 or newer. root: as in the inventory."""
        self._transport = transport
        self._python = python
        self._root = root

    def prepare(self) -> dict[str, Any]:
        """Make the folders, and say what there is.

        root and home (absolute), user, rsync (its path), free_bytes, current, and base: the release
        that is like the next one.
        """
        return self._ask("prepare")

    def expect(self, names: list[str]) -> int:
        """Make room for these files; how many are there already, whole or not."""
        return int(self._ask("expect", _SLOW_S, names=names)["kept"])

    def compare(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """What a release of these files would change: base, new, changed, removed."""
        return self._ask("compare", manifest=manifest)

    def look_at_python(self, packages: Sequence[str] = ()) -> dict[str, Any]:
        """root (absolute), and of the host's Python: executable, version, machine, glibc, packages.

        packages: {name: version, or None where it is not installed}.
        """
        return self._ask("look_at_python", packages=list(packages))

    def place(
        self,
        release: str,
        manifest: Mapping[str, Any],
        about: Mapping[str, Any],
        *,
        check: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Make what has arrived a release, if it is what was sent; what its `release.json` says.

        check: what the host's Python must be able to import from it.
        """
        return self._ask(
            "place_release", _SLOW_S, release=release, manifest=manifest, about=about, check=check
        )

    def switch(self, release: str) -> dict[str, Any]:
        """Let `current` be this release, at once. Returns before and current."""
        return self._ask("switch", release=release)

    def known(self) -> dict[str, Any]:
        """current, previous (promoted before it) and releases, oldest first."""
        return self._ask("releases")

    def promoted(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add to the promotion log."""
        return self._ask("promoted", entry=entry)

    def mark_bad(self, release: str, why: str) -> dict[str, Any]:
        """Say of a release that it failed."""
        return self._ask("mark_bad", release=release, why=why)

    def prune(self, keep: int) -> list[str]:
        """Remove old releases but the last `keep` promoted ones; which went."""
        return list(self._ask("prune", _SLOW_S, keep=keep)["removed"])

    def lock(self, *, owner: str, command: str, token: str) -> None:
        """Take the host's lock. Raises ReleaseRefused, with whose it is."""
        try:
            self._ask("lock", owner=owner, command=command, token=token)
        except ReleaseRefused as error:
            raise ReleaseRefused(
                error.problem,
                remedy="wait until that has ended; `kd unlock` breaks one left behind",
            ) from None

    def unlock(self, token: str) -> bool:
        """Give it back; whether there was one. Raises ReleaseRefused where it is not this one's."""
        return bool(self._ask("unlock", token=token)["was_locked"])

    @contextlib.contextmanager
    def locked(self, *, owner: str, command: str) -> Iterator[None]:
        """Have the lock inside the `with` block.

        Where the host cannot be reached at its end, the lock stays, and the error that ends the
        block goes before that one.
        """
        token = secrets.token_hex(16)
        try:
            self.lock(owner=owner, command=command, token=token)
            yield
        except BaseException:  # the lock may be taken, and its answer lost: unlock knows the token
            with contextlib.suppress(TransportError):
                self.unlock(token)
            raise
        self.unlock(token)

    def lock_holder(self) -> dict[str, Any] | None:
        """owner, command and at (Unix time) of the lock; None where nobody has it."""
        holder: dict[str, Any] | None = self._ask("lock_holder")["holder"]
        return holder

    def break_lock(self, holder: Mapping[str, Any]) -> None:
        """Remove the lock that `lock_holder` told of, and no other."""
        self._ask("break_lock", owner=holder["owner"], at=holder["at"])

    def put_service(self, name: str, text: str) -> None:
        """Write one file of the service's folder."""
        self._ask("put_service", name=name, text=text)

    def group_of(self, pid: int) -> list[int]:
        """The processes that live in the group or session of `pid`."""
        return list(self._ask("group_of", pid=pid)["processes"])

    def kill_group(self, pid: int) -> None:
        """Kill those processes."""
        self._ask("kill_group", pid=pid)

    def start_job(
        self, name: str, command: list[str], environment: Mapping[str, str], given: str = ""
    ) -> None:
        """Let a program run there that outlives this connection. given: what it reads."""
        self._ask(
            "start_job", name=name, command=command, environment=dict(environment), given=given
        )

    def look_at_job(self, name: str, offset: int = 0) -> dict[str, Any]:
        """text that it printed from byte `offset` on, the next offset, alive and exit_code."""
        return self._ask("look_at_job", name=name, offset=offset)

    def end_job(self, name: str, number: int = signal.SIGTERM) -> bool:
        """Send a signal to it and all that it started; whether it was there."""
        return bool(self._ask("end_job", name=name, number=int(number))["was_alive"])

    def audit(self, entry: Mapping[str, Any]) -> None:
        """Add to the audit log."""
        self._ask("audit", entry=entry)

    def _ask(self, what: str, limit_s: float = _LIMIT_S, **request: Any) -> dict[str, Any]:
        program = _AGENT.read_bytes()
        asked = json.dumps({"do": what, "root": self._root, **request}).encode()
        done = self._transport.run(
            [self._python, "-I", "-c", _BOOT],
            timeout=limit_s,
            input=b"%d\n%s%s" % (len(program), program, asked),
            check=False,
        )
        host = self._transport.host
        if done.exit_code in (126, 127):
            raise ConfigError(
                f"host {host}: {self._python} is not there or cannot be run",
                remedy="correct the host's `python` in remote/hosts.yaml",
            )
        # The last line, as a login message may come before it.
        line = done.stdout.strip().rpartition("\n")[2]
        try:
            said = json.loads(line)
        except ValueError:
            raise TransportError(
                f"host {host}: {what}: {self._python} ended with exit code {done.exit_code} and no "
                f"answer{last_words(done.stderr, ': ')}"
            ) from None
        if "error" in said:
            raise ReleaseRefused(f"host {host}: {what}: {said['error']}")
        found: dict[str, Any] = said["done"]
        return found
