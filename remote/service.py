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
from collections.abc import Mapping
from typing import Any, ClassVar

from kdtree_engine.errors import ConfigError
from remote.inventory import Host, Service
from remote.managers import WRITTEN_BY
from remote.releases import Releases
from remote.transport import Transport

__all__ = ["Manager", "State", "Status", "Supervisor", "Systemd", "manager_of", "service_document"]

_LAUNCH = pathlib.Path(__file__).with_name("launch.py")


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


class Manager:
    """What keeps one service running on one host. `remote.managers` does it there."""

    kind: ClassVar[str]

    def __init__(self, transport: Transport, releases: Releases, *, unit: str, python: str) -> None:
        """python: path of the host's Python that runs the launcher."""
        self._transport = transport
        self._releases = releases
        self._unit = unit
        self._python = python

    @property
    def about(self) -> dict[str, Any]:
        """What tells `remote.managers` which one it is."""
        return {"kind": self.kind, "unit": self._unit, "python": self._python}

    def install(self) -> None:
        """Let the manager know the service. One that runs is left alone."""
        place = self._releases.prepare()
        name, text = self._configuration(place)
        self._releases.put_service(name, text)
        self._releases.put_service("launch.py", _LAUNCH.read_text(encoding="utf-8"))
        self._manage("install")

    def start(self) -> None:
        """Start what `service.json` says now, once nothing lives of what was started before.

        Raises TransportError where it ends at once.
        """
        self._manage("start")

    def stop(self) -> None:
        """End it, with every process of its group. Raises TransportError where one stays.

        What lives of a service whose first process has died is ended too.
        """
        self._manage("stop")

    def status(self) -> Status:
        """What the manager says of it."""
        return self._manage("status")

    def _configuration(self, place: Mapping[str, Any]) -> tuple[str, str]:
        """Name and text of the file that tells the manager of the service. place: of `prepare`."""
        raise NotImplementedError

    def _manage(self, what: str) -> Status:
        found = self._releases.manage(self.about, what)
        return Status(State(found["state"]), found["pid"], found["said"])

    def _program(self, place: Mapping[str, Any]) -> str:
        """The launcher's Python as a unit names it, which knows of no `~`. place: of `prepare`."""
        if self._python.startswith("~/"):
            return f"{place['home']}/{self._python[2:]}"
        return self._python


class Supervisor(Manager):
    """supervisord, one of kd's own under the root: for hosts without systemd (containers).

    Its Python has to have supervisor.
    """

    kind = "supervisor"

    def _configuration(self, place: Mapping[str, Any]) -> tuple[str, str]:
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
        return "supervisord.conf", self.config(root, self._program(place))

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


class Systemd(Manager):
    """A unit of the host's systemd, which `sudo -n` or root may change."""

    kind = "systemd"
    units = "/etc/systemd/system"

    @property
    def about(self) -> dict[str, Any]:
        return {**super().about, "units": self.units}

    def _configuration(self, place: Mapping[str, Any]) -> tuple[str, str]:
        python = self._program(place)
        if re.search(r"[\"'\\]", python):  # in the path of a program alone, however it is quoted
            raise ConfigError(
                f"host {self._transport.host}: systemd cannot have a quote or a backslash in "
                f"python: {python}",
                remedy="choose another python in remote/hosts.yaml",
            )
        return f"{self._unit}.service", self.unit_text(
            str(place["root"]), str(place["user"]), python
        )

    def unit_text(self, root: str, user: str, python: str) -> str:
        """The unit file. systemd replaces `%` and splits words; both are quoted here."""

        def word(value: str) -> str:
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{path(escaped)}"'

        def argument(value: str) -> str:
            return word(value.replace("$", "$$"))  # which is none in the program's own path

        def path(value: str) -> str:
            return value.replace("%", "%%")

        folder = f"{root}/service"
        return "\n".join(
            (
                f"{WRITTEN_BY} A change here is lost at the next promotion.",
                "[Unit]",
                f"Description=SGLang, as kd promoted it ({self._unit})",
                "After=network-online.target",
                "Wants=network-online.target",
                # How often it is started is for kd to say.
                "StartLimitIntervalSec=0",
                "",
                "[Service]",
                "Type=exec",
                f"User={user}",
                f"WorkingDirectory={path(folder)}",
                f"ExecStart={word(python)} {argument(folder + '/launch.py')}",
                # The whole group, and what a rank started.
                "KillMode=control-group",
                "TimeoutStopSec=30",
                "Restart=no",
                "UMask=0077",
                f"StandardOutput=append:{path(folder)}/service.log",
                f"StandardError=append:{path(folder)}/service.log",
                "LimitMEMLOCK=infinity",
                "LimitNOFILE=1048576",
                # Of all ranks' threads; systemd's own limit may be less than 5,000.
                "TasksMax=infinity",
                "",
                "[Install]",
                "WantedBy=multi-user.target",
                "",
            )
        )
