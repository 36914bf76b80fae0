"""The service of a host: what starts it, what keeps it running, how it ends.

A service manager of the host runs `remote.launch`, which becomes the server that `service.json`
says. So a promotion changes that one file, and a unit says nothing that a release could change.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kdtree_engine.errors import ConfigError, MissingError
from remote.errors import CommandFailed, TransportError
from remote.inventory import Host, Service
from remote.releases import Releases
from remote.transport import Transport

__all__ = ["Manager", "State", "Status", "Supervisor", "Systemd", "manager_of", "service_document"]

_LIMIT_S = 30.0
_STOP_LIMIT_S = 120.0
_GRACE_S = 10.0
_LAUNCH = pathlib.Path(__file__).with_name("launch.py")
_UNITS = "/etc/systemd/system"
_WRITTEN = "# Written by kd."  # how a unit begins that may be overwritten


class State(enum.StrEnum):
    """running: its process lives. failed: it ended by itself, or could not be started."""

    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Status:
    """pid: of the first process, which leads the service's group; None where none runs."""

    state: State
    pid: int | None = None
    said: str = ""


class Manager(Protocol):
    """What keeps one service running on one host."""

    def install(self) -> None:
        """Let the manager know the service. One that runs is left alone."""
        ...

    def start(self) -> None:
        """Start what `service.json` says now, once nothing lives of what was started before.

        Raises TransportError where it ends at once.
        """
        ...

    def stop(self) -> None:
        """End it, with every process of its group. Raises TransportError where one stays.

        What lives of a service whose first process has died is ended too.
        """
        ...

    def status(self) -> Status:
        """What the manager says of it."""
        ...


def service_document(
    service: Service,
    *,
    python: str,
    site: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
) -> dict[str, object]:
    """What `remote.launch` reads.

    site: the folder of a release that goes before SGLang on PYTHONPATH; None of the host's own
    PYTHONPATH is kept, as it could bring another engine. arguments, environment: of the phase's
    profile, after the host's own.

    Raises ConfigError where the inventory wants a variable from the host that is set here.
    """
    twice = sorted({*environment, "PYTHONPATH"} & {*service.environment})
    if twice:
        raise ConfigError(
            f"service {service.unit}: {', '.join(twice)} is set for the release, and cannot come "
            "from the host as well",
            remedy="take it from the service's `environment` in remote/hosts.yaml",
        )
    return {
        "command": [
            *(python, "-m", "sglang.launch_server"),
            *service.command_line(),
            *arguments,
        ],
        "environment": {**environment, "PYTHONPATH": site},
        "from_host": list(service.environment),
    }


def manager_of(transport: Transport, releases: Releases, host: Host, python: str) -> Manager:
    """The manager that the inventory names. Raises ConfigError for a host without a service."""
    if host.service is None:
        raise ConfigError(
            f"host {host.name} has no service", remedy="give it one in remote/hosts.yaml"
        )
    unit = host.service.unit
    if host.service.manager == "systemd":
        return Systemd(transport, releases, unit=unit, python=python)
    return Supervisor(transport, releases, unit=unit, python=python)


class _OfHost:
    """One unit of one host."""

    def __init__(self, transport: Transport, releases: Releases, *, unit: str, python: str) -> None:
        """python: path of the host's Python that runs the launcher."""
        self._transport = transport
        self._releases = releases
        self._unit = unit
        self._python = python

    def _program(self, place: Mapping[str, Any]) -> str:
        """The launcher's Python as a unit names it, which knows of no `~`. place: of `prepare`."""
        if self._python.startswith("~/"):
            return f"{place['home']}/{self._python[2:]}"
        return self._python

    def _wait_for_group(self, pid: int) -> None:
        """Until no process of the group or session of `pid` lives.

        A manager waits for the first process alone. One that ignores being asked to end outlives it
        and holds its GPU memory: it is killed after a moment.
        """
        _wait_until_gone(
            self._transport,
            lambda: self._releases.group_of(pid),
            lambda: self._releases.kill_group(pid),
        )

    def _end_left(self) -> None:
        """End what lives of the service that was started last. The manager may know none of it."""
        if self._releases.service_left():
            self._releases.end_service_left(kill=False)
            _wait_until_gone(
                self._transport,
                self._releases.service_left,
                lambda: self._releases.end_service_left(kill=True),
            )


class Supervisor(_OfHost):
    """supervisord, one of kd's own under the root: for hosts without systemd (containers).

    Its Python has to have supervisor.
    """

    def install(self) -> None:
        place = self._releases.prepare()
        root = str(place["root"])
        if "%" in root:
            raise ConfigError(  # supervisor fills in some values twice, so that no quoting helps
                f"host {self._transport.host}: supervisor cannot have a percent sign in root: "
                f"{root}",
                remedy="choose another root in remote/hosts.yaml",
            )
        for what, path in (("root", root), ("python", self._program(place))):
            if re.search(r"\s[#;]", path):  # the rest of a line is a comment then, quoted or not
                raise ConfigError(
                    f"host {self._transport.host}: supervisor cannot have a space before # or ; "
                    f"in {what}: {path}",
                    remedy=f"choose another {what} in remote/hosts.yaml",
                )
        # A socket's path is short on every system, and a root may be long.
        if len(f"{root}/service/sock") > 100:
            raise ConfigError(
                f"host {self._transport.host}: root is too long for a socket in it: {root}",
                remedy="choose a shorter root in remote/hosts.yaml",
            )
        self._releases.put_service("supervisord.conf", self.config(root, self._program(place)))
        self._releases.put_service("launch.py", _LAUNCH.read_text(encoding="utf-8"))
        if self._control("pid", check=False) is None:
            self._run("-m", "supervisor.supervisord", "-c", self._file(root))
        else:
            self._control("reread")
            self._control("add", self._unit, check=False)  # it may be there

    def start(self) -> None:
        if self.status().state is not State.RUNNING:
            self._end_left()
        # Read anew, now that nothing runs by what it said before: `update` would end what runs.
        self._control("reread")
        self._control("remove", self._unit, check=False)
        self._control("add", self._unit)
        self._control("start", self._unit)

    def stop(self) -> None:
        before = self.status()
        if before.state is State.RUNNING:
            self._control("stop", self._unit, limit_s=_STOP_LIMIT_S)
        if before.pid is not None:
            self._wait_for_group(before.pid)
        self._end_left()

    def status(self) -> Status:
        said = self._control("status", self._unit, check=False) or ""
        return _supervisor_status(said)

    def config(self, root: str, python: str) -> str:
        """`supervisord.conf`, for a root without a percent sign."""

        def word(value: str) -> str:
            """One word of a command: supervisor splits it as a shell would, and fills in `%`."""
            return shlex.quote(value).replace("%", "%%")

        folder = f"{root}/service"
        return "\n".join(
            (
                "; Written by kd. A change here is lost at the next promotion.",
                "[unix_http_server]",
                f"file={folder}/sock",
                "chmod=0600",
                "[supervisord]",
                f"logfile={folder}/supervisord.log",
                f"pidfile={folder}/supervisord.pid",
                f"directory={folder}",
                "umask=077",
                "[rpcinterface:supervisor]",
                "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
                "[supervisorctl]",
                f"serverurl=unix://{folder}/sock",
                f"[program:{self._unit}]",
                f"command={word(python)} {word(folder + '/launch.py')}",
                f"directory={folder}",
                "autostart=false",
                # It is for kd to say whether a service that ended is started again.
                "autorestart=false",
                "startsecs=1",
                "startretries=0",
                "stopsignal=TERM",
                "stopwaitsecs=30",
                "stopasgroup=true",
                "killasgroup=true",
                "redirect_stderr=true",
                f"stdout_logfile={folder}/service.log",
                "stdout_logfile_maxbytes=64MB",
                "stdout_logfile_backups=4",
                "",
            )
        )

    def _file(self, root: str) -> str:
        return f"{root}/service/supervisord.conf"

    def _control(self, *words: str, check: bool = True, limit_s: float = _LIMIT_S) -> str | None:
        """What supervisorctl says; None where no supervisord answers."""
        root = str(self._releases.prepare()["root"])
        done = self._transport.run(
            [self._python, "-m", "supervisor.supervisorctl", "-c", self._file(root), *words],
            timeout=limit_s,
            check=False,
        )
        said = done.stdout.strip()
        if "No module named" in done.stderr and "supervisor" in done.stderr:
            raise MissingError(
                f"host {self._transport.host}: {self._python} has no supervisor",
                remedy=f"on that host: {self._python} -m pip install supervisor",
            )
        if "no such file" in said or "refused connection" in said:
            if check:
                raise TransportError(f"host {self._transport.host}: no supervisord runs for kd")
            return None
        if check and ("ERROR" in said or done.exit_code not in (0, 3)):
            raise TransportError(
                f"host {self._transport.host}: supervisor: {said.splitlines()[-1] if said else ''}"
            )
        return said

    def _run(self, *words: str) -> None:
        try:
            self._transport.run([self._python, *words], timeout=_LIMIT_S)
        except CommandFailed as error:
            if "No module named" in str(error):
                raise MissingError(
                    f"host {self._transport.host}: {self._python} has no supervisor",
                    remedy=f"on that host: {self._python} -m pip install supervisor",
                ) from None
            raise


_SUPERVISOR_STATES = {
    "RUNNING": State.RUNNING,
    "STARTING": State.RUNNING,
    "STOPPING": State.RUNNING,
    "STOPPED": State.STOPPED,
}


def _supervisor_status(said: str) -> Status:
    """Of a line such as `sglang   RUNNING   pid 12, uptime 0:00:03`."""
    words = said.split(None, 2)
    if len(words) < 2:
        return Status(State.STOPPED, said=said)
    found = re.search(r"\bpid (\d+)", said)
    return Status(
        _SUPERVISOR_STATES.get(words[1], State.FAILED),
        int(found.group(1)) if found else None,
        said,
    )


class Systemd(_OfHost):
    """A unit of the host's systemd, which `sudo -n` or root may change."""

    def install(self) -> None:
        place = self._releases.prepare()
        root, user = str(place["root"]), str(place["user"])
        name = f"{self._unit}.service"
        self._refuse_another_s(f"{_UNITS}/{name}")
        self._releases.put_service("launch.py", _LAUNCH.read_text(encoding="utf-8"))
        self._releases.put_service(name, self.unit_text(root, user, self._program(place)))
        self._root("install", "-m", "644", f"{root}/service/{name}", f"{_UNITS}/{name}")
        self._root("systemctl", "daemon-reload")

    def start(self) -> None:
        if self.status().state is not State.RUNNING:
            self._end_left()
        self._root("systemctl", "start", self._unit)

    def stop(self) -> None:
        before = self.status()
        self._root("systemctl", "stop", self._unit, limit_s=_STOP_LIMIT_S)
        if before.pid is not None:
            self._wait_for_group(before.pid)
        self._end_left()

    def status(self) -> Status:
        done = self._transport.run(
            ["systemctl", "show", self._unit, "--property=ActiveState,MainPID,Result"],
            timeout=_LIMIT_S,
        )
        return _systemd_status(done.stdout)

    def unit_text(self, root: str, user: str, python: str) -> str:
        """The unit file. systemd replaces `%` and splits words; both are quoted here."""

        def word(value: str) -> str:
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'

        def path(value: str) -> str:
            return value.replace("%", "%%")

        folder = f"{root}/service"
        return "\n".join(
            (
                f"{_WRITTEN} A change here is lost at the next promotion.",
                "[Unit]",
                f"Description=SGLang, as kd promoted it ({self._unit})",
                "After=network-online.target",
                "Wants=network-online.target",
                "",
                "[Service]",
                "Type=exec",
                f"User={user}",
                f"WorkingDirectory={path(folder)}",
                f"ExecStart={word(python)} {word(folder + '/launch.py')}",
                # The whole group, and what a rank started.
                "KillMode=control-group",
                "TimeoutStopSec=60",
                "Restart=no",
                "UMask=0077",
                f"StandardOutput=append:{path(folder)}/service.log",
                f"StandardError=append:{path(folder)}/service.log",
                "LimitMEMLOCK=infinity",
                "LimitNOFILE=1048576",
                "",
                "[Install]",
                "WantedBy=multi-user.target",
                "",
            )
        )

    def _refuse_another_s(self, path: str) -> None:
        """Raises ConfigError for a unit that kd has not written, or a link in its place."""
        there = self._transport.run(
            ["test", "-e", path, "-o", "-L", path], timeout=_LIMIT_S, check=False
        )
        if there.exit_code == 1:
            return
        link = self._transport.run(["test", "-L", path], timeout=_LIMIT_S, check=False)
        first = self._transport.run(["head", "-n", "1", path], timeout=_LIMIT_S, check=False)
        if link.exit_code != 1 or not first.stdout.startswith(_WRITTEN):
            raise ConfigError(
                f"host {self._transport.host}: {path} is there, and kd has not written it: it is "
                f"no file that begins with `{_WRITTEN}`",
                remedy="name another `unit` in remote/hosts.yaml, or remove that one there",
            )

    def _root(self, *words: str, limit_s: float = _LIMIT_S) -> None:
        """As root; sudo never asks."""
        may = self._transport.run(["id", "-u"], timeout=_LIMIT_S).stdout.strip() == "0"
        self._transport.run([*(() if may else ("sudo", "-n")), *words], timeout=limit_s)


def _systemd_status(said: str) -> Status:
    """Of lines such as `ActiveState=active`."""
    found = dict(line.partition("=")[::2] for line in said.splitlines() if "=" in line)
    state = {
        "active": State.RUNNING,
        "activating": State.RUNNING,
        "deactivating": State.RUNNING,
        "reloading": State.RUNNING,
        "inactive": State.STOPPED,
    }.get(found.get("ActiveState", ""), State.FAILED)
    pid = int(found.get("MainPID") or 0)
    return Status(state, pid or None, found.get("Result", ""))


def _wait_until_gone(
    transport: Transport, living: Callable[[], list[int]], kill: Callable[[], None]
) -> None:
    """Until `living` finds no process; those that take longer than a moment are killed.

    Raises TransportError where one stays.
    """
    for last in (False, True):
        if last:
            kill()
        deadline = time.monotonic() + _GRACE_S
        while left := living():
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        else:
            return
    raise TransportError(
        f"host {transport.host}: {len(left)} processes of the service outlived its stop: "
        f"{', '.join(map(str, left[:5]))}"
    )
