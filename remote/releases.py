"""The releases of one host: what `remote.agent`, which runs there, is asked to do."""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from remote.agent import parsed
from remote.errors import TransportError, last_words
from remote.transport import Transport

__all__ = ["ReleaseRefused", "Releases"]

_LIMIT_S = 120.0
_PROFILE_S = 7200.0  # long prompts are prefilled before it
_SLOW_S = 900.0  # where many files are read or brought to disk
_HERE = pathlib.Path(__file__).parent
# The programs come by stdin, before the request: nothing is installed on the host for them.
_BOOT = """
import json, sys, types
def load(programs):
    room = sys.modules["remote"] = types.ModuleType("remote")
    for name, text in programs.items():
        made = sys.modules["remote." + name] = types.ModuleType("remote." + name)
        setattr(room, name, made)
        exec(compile(text, "kd-" + name, "exec"), made.__dict__)
    return room
given = json.load(sys.stdin)
code = load(given["programs"]).__dict__[given["main"]].main(given["request"])
sys.stdout.flush()
sys.exit(code)
"""
_PROGRAMS = ("agent", "managers")


def program_text(main: str, programs: Iterable[str], request: Mapping[str, Any]) -> str:
    """What `_BOOT` reads: modules of this folder, each after those that it imports."""
    texts = {name: (_HERE / f"{name}.py").read_text(encoding="utf-8") for name in programs}
    return json.dumps({"main": main, "programs": texts, "request": request})


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
        """What a release of these files would change: base, libraries, new, changed, removed."""
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

    def put_evidence(self, release: str, phase: str, gates: Sequence[Mapping[str, Any]]) -> None:
        """Write down how the gates of phases 0..`phase` stand with a release."""
        self._ask("put_evidence", release=release, phase=phase, gates=list(gates))

    def prune(self, keep: int) -> list[str]:
        """Remove old releases but the last `keep` promoted ones and those in use; which went."""
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
        """owner, command and at (Unix time) of the lock; None where nobody has it.

        The owner of a lock file that cannot be read is `damaged`.
        """
        holder: dict[str, Any] | None = self._ask("lock_holder")["holder"]
        return holder

    def break_lock(self, holder: Mapping[str, Any]) -> None:
        """Remove the lock that `lock_holder` told of, and no other."""
        self._ask("break_lock", owner=holder["owner"], at=holder["at"])

    def put_service(self, name: str, text: str) -> None:
        """Write one file of the service's folder."""
        self._ask("put_service", name=name, text=text)

    def manage(self, manager: Mapping[str, Any], what: str) -> dict[str, Any]:
        """`install`, `start`, `stop` or `status` of the service; state, pid and said then."""
        return self._ask("manage", _SLOW_S, manager=manager, what=what)

    def promotions(self) -> dict[str, Any]:
        """live, previous and stopped, entries of the promotion log or None, and all entries."""
        return self._ask("promotions")

    def look_at_log(self, offset: int | None, lines: int = 0) -> dict[str, Any]:
        """text that the service printed from `offset` on (None: its last lines), and offset."""
        return self._ask("look_at_log", offset=offset, lines=lines)

    def tokens(self) -> dict[str, Any] | None:
        """What was recorded for releases to be held against; None where nothing was."""
        record: dict[str, Any] | None = self._ask("tokens")["record"]
        return record

    def model_of(self, path: str) -> dict[str, Any]:
        """path, config and files (hashes), vocabulary and positions of a model's folder."""
        return self._ask("model_of", path=path)

    def audited(self, last: int) -> list[dict[str, Any]]:
        """The last lines of the audit log."""
        return list(self._ask("audited", last=last)["entries"])

    def start_promoter(self, name: str, request: Mapping[str, Any]) -> None:
        """Let `remote.promoter` run there as a job; it gives the lock back."""
        given = program_text(
            "promoter", (*_PROGRAMS, "launch", "promoter"), {**request, "root": self._root}
        )
        self.start_job(name, [self._python, "-I", "-c", _BOOT], {}, given)

    def start_trial(self, name: str, request: Mapping[str, Any]) -> None:
        """Let `remote.trial` become a server there, as a job."""
        programs = (*_PROGRAMS, "launch", "trial")
        given = program_text("trial", programs, {**request, "root": self._root})
        self.start_job(name, [self._python, "-I", "-c", _BOOT], {"PYTHONUNBUFFERED": "1"}, given)

    def group_of(self, pid: int) -> list[int]:
        """The processes that live in the group or session of `pid`."""
        return list(self._ask("group_of", pid=pid)["processes"])

    def kill_group(self, pid: int) -> None:
        """Kill those processes."""
        self._ask("kill_group", pid=pid)

    def service_left(self) -> list[int]:
        """The processes that live of the service started last, its first one or others."""
        return list(self._ask("service_left")["processes"])

    def end_service_left(self, *, kill: bool) -> None:
        """Ask those processes to end, or kill them."""
        self._ask("end_service_left", kill=kill)

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

    def jobs(self) -> list[dict[str, Any]]:
        """name and at (Unix time) of each job that goes on right now, oldest first."""
        return list(self._ask("jobs")["jobs"])

    def metrics(self, leader: int, port: int, prefix: str) -> str:
        """What the service with process `leader` exports at `port`, of names with `prefix`."""
        return str(self._ask("metrics", leader=leader, port=port, prefix=prefix)["text"])

    def audit(self, entry: Mapping[str, Any]) -> None:
        """Add to the audit log."""
        self._ask("audit", entry=entry)

    def readiness(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """what, ok and said of each thing that a promotion needs there: see `remote.readiness`."""
        programs = (*_PROGRAMS, "launch", "promoter", "readiness")
        asked = program_text("readiness", programs, {**request, "root": self._root})
        return list(self._answer("readiness", asked, _LIMIT_S)["found"])

    def _ask(self, do: str, limit_s: float = _LIMIT_S, /, **request: Any) -> dict[str, Any]:
        asked = program_text("agent", _PROGRAMS, {"do": do, "root": self._root, **request})
        return self._answer(do, asked, limit_s)

    def profile(self, request: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
        """Profile the service: see `remote.profiler`. The traces are brought into `folder` here."""
        root = str(self._ask("prepare")["root"])
        asked = {**request, "root": root, "folder": f"{root}/profiles"}
        text = program_text("profiler", (*_PROGRAMS, "profiler"), asked)
        try:
            found = self._answer("profile", text, _PROFILE_S)
            traces = []
            for there in found["traces"]:
                here = folder / pathlib.PurePosixPath(there).name
                self._transport.get(there, here)
                traces.append(str(here))
        finally:
            with contextlib.suppress(TransportError):
                self._ask("remove_profile", name=request["name"])
        return {**found, "traces": traces}

    def _answer(self, do: str, asked: str, limit_s: float) -> dict[str, Any]:
        done = self._transport.run(
            [self._python, "-I", "-c", _BOOT],
            timeout=limit_s,
            input=asked.encode(),
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
            said = parsed(line)
        except ValueError:
            said = None
        # A login script may print last, and what it prints may be JSON as well.
        if isinstance(said, dict) and isinstance(said.get("error"), str):
            raise ReleaseRefused(f"host {host}: {do}: {said['error']}")
        if not isinstance(said, dict) or not isinstance(said.get("done"), dict):
            raise TransportError(
                f"host {host}: {do}: {self._python} ended with exit code {done.exit_code} and no "
                f"answer{last_words(done.stderr or done.stdout, ': ')}"
            )
        found: dict[str, Any] = said["done"]
        return found
