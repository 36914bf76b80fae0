"""The live service of a host, from here: what is live, and its change to something else.

What is done, `remote.promoter` does on the host as a job. So a connection that breaks, or this
machine, may go away in between: the host ends what it has begun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import pathlib
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from remote.errors import TransportError, UnknownEnd
from remote.inventory import Host, Service
from remote.jobs import Heard, JobGone, end_interrupted, follow, new_job_name
from remote.promoter import NOTHING
from remote.releases import ReleaseRefused, Releases
from remote.service import Manager, manager_of, service_document
from remote.transport import Transport

__all__ = ["LiveService", "Outcome", "Target"]

_TRIAL = "serve"
"""What a job of a server to try is called by; others are promotions and gates."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What is to be live. release, phase: None for SGLang as it is, without kd's engine."""

    release: str | None
    phase: int | None
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        if self.release is None:
            return "stock SGLang"
        return f"phase {self.phase} of {self.release}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a change ended: see `remote.promoter`."""

    result: str
    text: str
    job: str

    @property
    def done(self) -> bool:
        return self.result in ("promoted", "recorded", "off")


class LiveService:
    """The service of one host."""

    def __init__(
        self,
        transport: Transport,
        releases: Releases,
        host: Host,
        *,
        python: str,
        manager_python: str | None = None,
    ) -> None:
        """Raises ConfigError for a host without a service.

        python: path of the host's Python that has SGLang. manager_python: of the one that has
        supervisor, if it is another.
        """
        if host.service is None:
            raise ConfigError(
                f"host {host.name} has no service", remedy="give it one in remote/hosts.yaml"
            )
        self._host = host
        self._service: Service = host.service
        self._python = python
        self.transport = transport
        self.releases = releases
        self.manager: Manager = manager_of(transport, releases, host, manager_python or python)

    def model(self) -> dict[str, Any]:
        """The model that the inventory names, as it lies on the host."""
        return self.releases.model_of(self._service.model_path)

    def entry(self, target: Target) -> dict[str, Any]:
        """What the promotion log says of it, and all that is needed to start it again."""
        root = self.releases.prepare()["root"]
        site = "" if target.release is None else f"{root}/releases/{target.release}/site"
        return {
            "release": target.release,
            "phase": target.phase,
            "name": target.name,
            "port": self._service.port,
            "service": service_document(
                self._service,
                python=self._python,
                site=site,
                arguments=target.arguments,
                environment=target.environment,
            ),
        }

    def promote(
        self,
        target: Target,
        checks: Sequence[Mapping[str, Any]],
        *,
        command: str,
        note: Callable[[str], None],
        forced: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Make it live, or leave live what is. checks: of `phases.recorded`.

        forced: what was promoted in spite of, and why; the host's audit log keeps it.
        """
        entry = self.entry(target)
        return self._change("promote", entry, checks, command=command, note=note, forced=forced)

    def again(
        self,
        what: str,
        entry: Mapping[str, Any],
        checks: Sequence[Mapping[str, Any]],
        *,
        seen: Mapping[str, Any] | None,
        command: str,
        note: Callable[[str], None],
    ) -> Outcome:
        """`rollback` to an entry of the promotion log, or `restart` what is live.

        seen: the entry that was live when that was chosen. Where another is by the time that the
        lock is had, the host refuses: a rollback would go past what somebody has just promoted.
        """
        if any(name not in entry for name in ("phase", "name", "service")):
            raise ConfigError(
                f"host {self._host.name}: the promotion log does not say how it was started",
                remedy="kd promote",
            )
        kept = {name: entry[name] for name in ("release", "phase", "name", "service")}
        kept["port"] = entry.get("port", self._service.port)
        return self._change(what, kept, checks, seen=seen, command=command, note=note)

    def stop(
        self, live: Mapping[str, Any] | None, *, command: str, note: Callable[[str], None]
    ) -> Outcome:
        """Take down what is live, on purpose. live: its entry of the promotion log.

        None is for what runs though nothing is live: see `runs`.
        """
        seen = {"at": NOTHING} if live is None else live
        return self._change("stop", live or {}, (), seen=seen, command=command, note=note)

    def runs(self) -> bool:
        """Whether anything of a service is there, live or left by a change that was killed."""
        return self.manager.status().pid is not None or bool(self.releases.service_left())

    def readiness(self) -> list[dict[str, Any]]:
        """Whether the host has what a promotion needs: see `remote.readiness`."""
        return self.releases.readiness(
            {
                "manager": self.manager.about,
                "model": self._service.model_path,
                "port": self._service.port,
                "tensor_parallel": self._service.tensor_parallel,
                "environment": list(self._service.environment),
                "cuda_arch": self._host.cuda_arch,
            }
        )

    def trial(self, target: Target, extra: Sequence[str]) -> dict[str, Any]:
        """How a server of a release is started beside the service: release, service and port.

        extra: SGLang arguments, last, so that they win. Raises ConfigError where it would have the
        port of the live service, also while that is down and is to come back.
        """
        service = self.entry(target)["service"]
        port = _port_of(extra) or self._service.port
        if port == self._service.port and self._has_its_port():
            raise ConfigError(
                f"host {self._host.name}: port {self._service.port} is that of its live service",
                remedy="name another one: -- --port N",
            )
        return {
            "release": target.release,
            "service": {**service, "command": [*service["command"], *extra]},
            "port": port,
        }

    def _has_its_port(self) -> bool:
        """Whether the service runs, is to run, or is being changed."""
        return (
            self.manager.status().pid is not None
            or self.releases.promotions()["live"] is not None
            or self.releases.lock_holder() is not None
        )

    def serve(
        self,
        trial: Mapping[str, Any],
        *,
        said: Callable[[str], None],
        note: Callable[[str], None],
    ) -> int:
        """Run such a server until it ends; its exit code. said: gets each line that it prints.

        Interrupted, the server is ended there. Where the connection is lost for long, it goes on:
        TransportError names its job then, which `end_trial` ends.
        """
        name = new_job_name(_TRIAL)
        host = self.transport.host
        try:
            self.releases.start_trial(name, trial)
            return follow(self.releases, name, said)
        except KeyboardInterrupt:
            end_interrupted(self.releases, name, host, note)
            raise
        except TransportError as error:
            if isinstance(error, (JobGone, ReleaseRefused)):
                raise
            raise TransportError(
                f"{error.problem}; the server may go on there",
                remedy=f"kd serve --host {host} --end {name}",
            ) from None

    def end_trial(self, name: str, note: Callable[[str], None]) -> None:
        """End a server that was left running. Raises ReleaseRefused where there is no such job.

        Raises ConfigError for a job of another kind: a promotion would be killed as it restores.
        """
        if not name.startswith(f"{_TRIAL}-"):
            raise ConfigError(
                f"job {name} is no server that kd serve has started",
                remedy=f"kd status --host {self._host.name}",
            )
        self.releases.look_at_job(name)
        end_interrupted(self.releases, name, self.transport.host, note)

    def profile(self, request: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
        """Have the service profile itself: see `remote.profiler`; its traces come into `folder`."""
        pid = self.manager.status().pid
        if pid is None:
            raise ConfigError(
                f"host {self._host.name}: no service runs there", remedy="kd restart, or kd promote"
            )
        asked = {**request, "leader": pid, "port": self._service.port}
        return self.releases.profile(asked, folder)

    def record(
        self,
        arguments: Sequence[str],
        prompts: Sequence[Sequence[int]],
        *,
        command: str,
        note: Callable[[str], None],
    ) -> Outcome:
        """Write down what SGLang without kd and speculation says. arguments: all of them."""
        entry = {
            "release": None,
            "phase": None,
            "name": "plain decoding",
            "service": {
                "command": [self._python, "-m", "sglang.launch_server", *arguments],
                "environment": {"PYTHONPATH": ""},
                "from_host": list(self._service.environment),
            },
        }
        checks = self.checks_of_live
        return self._change("record", entry, checks, command=command, note=note, prompts=prompts)

    checks_of_live: Sequence[Mapping[str, Any]] = ()
    """What a service that a recording has interrupted is held against when it is back."""

    def _change(
        self,
        what: str,
        target: Mapping[str, Any],
        checks: Sequence[Mapping[str, Any]],
        *,
        command: str,
        note: Callable[[str], None],
        seen: Mapping[str, Any] | None = None,
        forced: Mapping[str, Any] | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ) -> Outcome:
        by = f"{getpass.getuser()}@{socket.gethostname()}"
        token, job = secrets.token_hex(16), new_job_name(what)
        health = self._host.health
        request = {
            "what": what,
            "target": target,
            "manager": self.manager.about,
            "port": target.get("port", self._service.port),
            "health": health.model_dump(),
            "gpu": self._host.cuda_arch is not None,
            "model": self._service.model_path,
            "keep": self._host.keep,
            "seen": None if seen is None else seen.get("at"),
            "by": by,
            "command": command,
            "forced": forced,
            "token": token,
            "checks": list(checks),
            "prompts": list(prompts),
            "new_tokens": health.new_tokens,
        }
        self.releases.prepare()
        asked = False
        try:
            self.releases.lock(owner=by, command=f"{command} ({job})", token=token)
            if what != "stop":  # what is live was installed, and a full disk must not keep it up
                self.manager.install()
            self.releases.start_promoter(job, request)
        except BaseException as error:
            # The answer may be lost and the job begun: it has the token then, and ends as it can.
            # One that was ended with the command that began it gives nothing back.
            if not self._goes_on(job):
                self._unlock(token)
                raise
            if isinstance(error, TransportError):
                raise self._unknown(error, "whether it was begun there is not known") from error
            if not isinstance(error, KeyboardInterrupt):
                raise
            self._cancel(what, job, note)
            asked = True
        return self._follow(what, job, token, note, asked)

    def _goes_on(self, job: str) -> bool:
        """Whether it was begun and lives; True where the host cannot be asked."""
        try:
            return bool(self.releases.look_at_job(job)["alive"])
        except ReleaseRefused:
            return False
        except TransportError:
            return True

    def _unlock(self, token: str) -> None:
        with contextlib.suppress(TransportError):  # what went wrong before is what is told
            self.releases.unlock(token)

    def _unknown(self, error: TransportError, how: str) -> UnknownEnd:
        remedy = f"kd status --host {self._host.name}"
        return UnknownEnd(f"{error.problem}; {how}", remedy=remedy)

    def _cancel(self, what: str, job: str, note: Callable[[str], None]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # the first may have made it deaf
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.default_int_handler)
        if what == "stop":
            note("a stop is not taken back (kd restart); once more leaves it to the host")
            return
        note("the host is asked to put back what was live; once more leaves it alone")
        try:
            self.releases.end_job(job)
        except TransportError as error:
            how = "it was not asked to put back what was live, and what was begun there goes on"
            raise self._unknown(error, how) from error
        except KeyboardInterrupt:
            self._left(note)
            raise

    def _left(self, note: Callable[[str], None]) -> None:
        note(f"left to the host, where it goes on: kd status --host {self._host.name}")

    def _follow(
        self, what: str, job: str, token: str, note: Callable[[str], None], asked: bool = False
    ) -> Outcome:
        ends: dict[str, Any] = {}
        heard = Heard()
        other: list[str] = []

        def said(line: str) -> None:
            try:
                found = json.loads(line)
                note(f"{found['step']}: {found['text']}")
            except (ValueError, KeyError, TypeError):
                other.append(line)
                return
            ends.update(found)

        while True:
            try:
                follow(self.releases, job, said, heard=heard)
                break
            except KeyboardInterrupt:
                if asked:
                    self._left(note)
                    raise
                asked = True
                self._cancel(what, job, note)
            except JobGone:
                break
            except TransportError as error:
                raise self._unknown(error, "what was begun there goes on") from error
        if not ends:  # it was ended before its first step
            self._unlock(token)
            if asked:
                raise KeyboardInterrupt
        if "result" not in ends:
            raise UnknownEnd(
                f"host {self._host.name}: job {job} ended without a result: "
                f"{other[-1] if other else 'it said nothing'}",
                remedy=f"kd status --host {self._host.name}; kd unlock; then the same again",
            )
        if asked and ends["result"] in ("restored", "stopped", "refused"):
            raise KeyboardInterrupt
        return Outcome(str(ends["result"]), str(ends["text"]), job)


def _port_of(arguments: Sequence[str]) -> int | None:
    """The port that the last `--port` of SGLang's arguments names; None where none does.

    Raises ConfigError for what is no port.
    """
    found = None
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == "--port":
            found = value if equals else "".join(arguments[place + 1 : place + 2])
    if found is None:
        return None
    if not (found.isascii() and found.isdigit() and 0 < int(found) < 1 << 16):
        raise ConfigError(f"--port: expected a number from 1 to 65535, got {found!r}")
    return int(found)
