"""How a service is started, looked at and ended on the host that this runs on.

It is sent there like `remote.agent`, and needs Python 3.9 and its standard library alone. What the
managers are configured with is made by `remote.service`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from remote import agent

_LIMIT_S = 30.0
_STOP_LIMIT_S = 120.0
_GRACE_S = 10.0
_STARTS_S = 1.0
"""What ends sooner has not started."""
_ASK_S = 3.0
_LOG_BYTES, _LOGS_KEPT = 64 << 20, 4
"""A log of this size is begun anew at a start, and so many stay: as in `supervisord.conf`."""
_SYSTEMD = 240
"""The first that can have a unit's output added to a file, and tells whether a program started."""

RUNNING, STOPPED, FAILED = "running", "stopped", "failed"
"""Its process lives; it was ended, or never started; it ended by itself, or could not start."""


def manager_of(root: str, about: dict[str, Any]) -> Supervisor | Systemd:
    """about: kind (`supervisor` or `systemd`), unit, and python: whose supervisor it is.

    units: the folder of systemd's unit files.
    """
    unit, python = str(about["unit"]), str(about.get("python") or sys.executable)
    if about["kind"] == "systemd":
        return Systemd(root, unit, python, pathlib.Path(about["units"]))
    return Supervisor(root, unit, python)


class _OfHost:
    """One unit of this host."""

    def __init__(self, root: str, unit: str, python: str) -> None:
        self._folder = agent.in_home(root) / "service"
        self._root = root
        self._unit = unit
        self._python = str(agent.in_home(python))

    def status(self) -> dict[str, Any]:
        """state, pid (of the first process; None where none runs) and said."""
        raise NotImplementedError

    def variables(self) -> set[str]:
        """Names of the variables that it gives to what it starts, of its own environment.

        Refused, with why, where that cannot be seen.
        """
        raise NotImplementedError

    def _end_group(self, leader: int) -> None:
        """Until no process of the group or session of `leader` lives.

        A manager waits for the first process alone. One that ignores being asked to end outlives
        it, and holds its GPU memory: it is killed after a moment.
        """
        _wait_until_gone(
            lambda: agent.group_of(self._root, leader)["processes"],
            lambda: agent.kill_group(self._root, leader),
        )

    def _end_left(self) -> None:
        """End what lives of the service that was started last. The manager may know none of it."""
        if agent.service_left(self._root)["processes"]:
            agent.end_service_left(self._root, kill=False)
            _wait_until_gone(
                lambda: agent.service_left(self._root)["processes"],
                lambda: agent.end_service_left(self._root, kill=True),
            )


class Supervisor(_OfHost):
    """supervisord, one of kd's own under the root: for hosts without systemd (containers)."""

    def install(self) -> None:
        """Let it know the unit of `supervisord.conf`. A service that runs is left alone."""
        if self._control("pid", check=False) is None:
            done = run(
                [self._python, "-m", "supervisor.supervisord", "-c", str(self._conf)], _LIMIT_S
            )
            if done.returncode:
                raise agent.Refused(f"supervisord does not start: {_last(done)}")
        else:
            self._control("reread")
            self._control("add", self._unit, check=False)  # it may be there

    def start(self) -> None:
        """Start what `service.json` says now, once nothing lives of what was started before.

        Refused where it ends at once.
        """
        if self._control("pid", check=False) is None:
            self.install()  # it was killed since
        if self.status()["state"] != RUNNING:
            self._end_left()
        # Read anew, now that nothing runs by what it said before: `update` would end what runs.
        self._control("reread")
        self._control("remove", self._unit, check=False)
        self._control("add", self._unit)
        self._control("start", self._unit)

    def stop(self) -> None:
        """End it, with every process of its group and those that left it for their own."""
        before = self.status()
        # supervisord knows none of them, and without their parents nobody will.
        noted = {} if before["pid"] is None else agent.below(before["pid"])
        if before["state"] == RUNNING:
            self._control("stop", self._unit, limit_s=_STOP_LIMIT_S)
        if before["pid"] is not None:
            self._end_group(before["pid"])
        self._end_left()
        _send(agent.living(noted), signal.SIGTERM)
        _wait_until_gone(
            lambda: agent.living(noted), lambda: _send(agent.living(noted), signal.SIGKILL)
        )

    def status(self) -> dict[str, Any]:
        """state, pid and said."""
        return supervisor_status(self._control("status", self._unit, check=False) or "")

    def variables(self) -> set[str]:
        """Those that supervisord was started with, or would be from here where none runs.

        It reads none later: those of this connection alone are not the service's.
        """
        said = self._control("pid", check=False) if self._conf.exists() else None
        if said is None:
            return set(os.environ)
        try:
            given = pathlib.Path(f"/proc/{int(said)}/environ").read_bytes()
        except (OSError, ValueError):
            raise agent.Refused(f"the environment of supervisord ({said}) cannot be read") from None
        return {os.fsdecode(one.partition(b"=")[0]) for one in given.split(b"\0") if one}

    @property
    def _conf(self) -> pathlib.Path:
        return self._folder / "supervisord.conf"

    def _control(self, *words: str, check: bool = True, limit_s: float = _LIMIT_S) -> str | None:
        """What supervisorctl says; None where no supervisord answers."""
        done = run(
            [self._python, "-m", "supervisor.supervisorctl", "-c", str(self._conf), *words], limit_s
        )
        said = done.stdout.strip()
        if "No module named" in done.stderr and "supervisor" in done.stderr:
            raise agent.Refused(
                f"{self._python} has no supervisor; on that host: "
                f"{self._python} -m pip install supervisor"
            )
        if "no such file" in said or "refused connection" in said:
            if check:
                raise agent.Refused("no supervisord runs for kd")
            return None
        if check and ("ERROR" in said or done.returncode not in (0, 3)):
            raise agent.Refused(f"supervisor: {said.splitlines()[-1] if said else _last(done)}")
        return said


class Systemd(_OfHost):
    """A unit of this host's systemd, which `sudo -n` or root may change."""

    def __init__(self, root: str, unit: str, python: str, units: pathlib.Path) -> None:
        super().__init__(root, unit, python)
        # Else a unit called `a.socket` would be a socket's.
        self._name = f"{unit}.service"
        self._there = units / self._name

    def require(self) -> None:
        """Refused where this systemd cannot have the unit, or has another's of that name."""
        version = re.match(r"systemd (\d+)", run(["systemctl", "--version"], _LIMIT_S).stdout)
        if version is not None and int(version.group(1)) < _SYSTEMD:
            raise agent.Refused(
                f"this is systemd {version.group(1)}, and {_SYSTEMD} or newer is needed: "
                f"`manager: supervisor` does without"
            )
        refuse_another_s(self._there)
        served = served_folder(self._text() or "")
        if served is not None and not self._is_here(served):
            raise agent.Refused(
                f"{self._there} is kd's, for the service in {served}: name another `unit` in "
                f"remote/hosts.yaml"
            )
        # One of another folder is hidden by the unit that kd would write, and stopped in its stead.
        found = self._show("FragmentPath")["FragmentPath"]
        if found and os.path.realpath(found) != os.path.realpath(self._there):
            raise agent.Refused(
                f"{found} is there, and kd has not written it: name another `unit` in "
                f"remote/hosts.yaml"
            )

    def install(self) -> None:
        """Let it know the unit file that lies in the service's folder."""
        self.require()
        self._as_root("install", "-m", "644", str(self._folder / self._name), str(self._there))
        self._as_root("systemctl", "daemon-reload")

    def start(self) -> None:
        """Start what `service.json` says now, once nothing lives of what was started before.

        Refused where it ends at once.
        """
        if self.status()["state"] != RUNNING:
            self._end_left()
            _begin_anew(self._folder / "service.log")
        # systemd would make it as root, for root alone.
        with contextlib.suppress(FileExistsError):
            (self._folder / "service.log").touch(mode=0o600, exist_ok=False)
        try:
            # It waits for what is left of an earlier one to end.
            self._as_root("systemctl", "start", self._name, limit_s=_STOP_LIMIT_S)
        except agent.Refused:
            status = self.status()
            if status["state"] != FAILED:
                raise
            raise agent.Refused(
                f"systemd: {self._unit}: it cannot be started ({status['said']}): "
                f"journalctl -u {self._name}"
            ) from None
        deadline = time.monotonic() + _STARTS_S
        while time.monotonic() < deadline:
            status = self.status()
            if status["state"] != RUNNING:
                raise agent.Refused(f"systemd: {self._unit}: it ended at once ({status['said']})")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it, with every process of its group. A unit of others is left as it is."""
        before = self.status()
        known = self._show("LoadState")["LoadState"] == "loaded"
        # Its unit file may be gone, or damaged.
        if before["state"] == RUNNING or (known and self._is_ours(self._show(*_WHOSE))):
            self._as_root("systemctl", "stop", self._name, limit_s=_STOP_LIMIT_S)
        if before["pid"] is not None:
            self._end_group(before["pid"])
        self._end_left()
        if self.status()["state"] == FAILED:  # what had to be killed, and what failed before
            self._as_root("systemctl", "reset-failed", self._name)

    def status(self) -> dict[str, Any]:
        """state, pid and said; of a unit that is not this root's, that nothing of ours runs."""
        found = self._show("ActiveState", "Result", "ExecMainStatus", *_WHOSE)
        if not self._is_ours(found):
            return {"state": STOPPED, "pid": None, "said": f"{self._name} is another's"}
        return systemd_status(found)

    def _is_ours(self, found: dict[str, str]) -> bool:
        """Whether the unit of that name is what kd has put there for this root, or none is there.

        Its file says so. Where that is gone or damaged, the process counts that it runs.
        found: the properties `_WHOSE`.
        """
        known, pid = found["FragmentPath"], int(found["MainPID"] or 0)
        if known and os.path.realpath(known) != os.path.realpath(self._there):
            return False
        text = None if self._there.is_symlink() else self._text()
        served = served_folder(text or "")
        if served is not None:
            return self._is_here(served)
        if pid:
            return pid in agent.service_left(self._root)["processes"]
        return not os.path.lexists(self._there)

    def _is_here(self, folder: str) -> bool:
        return os.path.realpath(folder) == os.path.realpath(self._folder)

    def _text(self) -> str | None:
        """What the unit file says; None where it cannot be read."""
        try:
            return self._there.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def variables(self) -> set[str]:
        """Those of systemd itself, of the user, and those that drop-ins of the unit set.

        kd's own unit sets none. Nobody but systemd knows what is in a drop-in's EnvironmentFile.
        """
        unit = self._show("Environment", "EnvironmentFiles", "UnsetEnvironment")
        return systemd_variables(unit, self._ask("show-environment"))

    def _show(self, *names: str) -> dict[str, str]:
        """Properties of the unit, whether there is one or not."""
        said = self._ask("show", self._name, f"--property={','.join(names)}")
        found = dict(line.partition("=")[::2] for line in said.splitlines() if "=" in line)
        return {name: found.get(name, "") for name in names}

    def _ask(self, *words: str) -> str:
        """What systemctl says. Refused, after a moment in which it may be replaced, if nothing."""
        deadline = time.monotonic() + _ASK_S
        while True:
            done = run(["systemctl", *words], _LIMIT_S)
            if not done.returncode:
                return done.stdout
            if time.monotonic() > deadline:
                raise agent.Refused(f"systemctl does not say: {_last(done)}")
            time.sleep(0.2)

    def _as_root(self, *words: str, limit_s: float = _LIMIT_S) -> None:
        """As root; sudo never asks."""
        line = [*(() if os.geteuid() == 0 else ("sudo", "-n")), *words]
        done = run(line, limit_s)
        if done.returncode:
            # It ends with whom to ask, and begins with what is wrong.
            told = [one for one in done.stderr.splitlines() if one.strip()]
            why = told[0].strip() if words[0] == "systemctl" and told else _last(done)
            raise agent.Refused(f"`{' '.join(line)}` failed: {why}")


WRITTEN_BY = "# Written by kd."
"""How a unit begins that may be overwritten."""
_WHOSE = ("FragmentPath", "MainPID")
"""Properties that tell whose a unit is."""
_SUPERVISOR_STATES = {
    "RUNNING": RUNNING,
    "STARTING": RUNNING,
    "STOPPING": RUNNING,
    "STOPPED": STOPPED,
}
_SYSTEMD_STATES = {
    "active": RUNNING,
    "activating": RUNNING,
    "deactivating": RUNNING,
    "reloading": RUNNING,
    "inactive": STOPPED,
}

_SYSTEMD_CODES = {
    "200": "/CHDIR",
    "203": "/EXEC",
    "205": "/LIMITS",
    "209": "/STDOUT",
    "216": "/GROUP",
    "217": "/USER",
}
"""What systemd ends with that could not start a program, and calls it: see systemd.exec(5)."""


def served_folder(text: str) -> str | None:
    """The folder of the service that a unit of kd's starts; None for what kd has not written so."""
    if not text.startswith(WRITTEN_BY):
        return None
    found = re.search(r"^WorkingDirectory=(.+)$", text, re.MULTILINE)
    return found.group(1).replace("%%", "%") if found else None


def refuse_another_s(path: pathlib.Path) -> None:
    """Refused for a systemd unit that kd has not written, or a link in its place."""
    try:
        mine = not path.is_symlink() and path.read_bytes().startswith(WRITTEN_BY.encode())
    except FileNotFoundError:
        return
    except OSError:
        mine = False
    if not mine:
        raise agent.Refused(
            f"{path} is there, and kd has not written it: it is no file that begins with "
            f"`{WRITTEN_BY}`: name another `unit` in remote/hosts.yaml, or remove that one"
        )


def supervisor_status(said: str) -> dict[str, Any]:
    """Of a line such as `sglang   RUNNING   pid 12, uptime 0:00:03`."""
    words = said.split(None, 2)
    if len(words) < 2:
        return {"state": STOPPED, "pid": None, "said": said}
    found = re.search(r"\bpid (\d+)", said)
    return {
        "state": _SUPERVISOR_STATES.get(words[1], FAILED),
        "pid": int(found.group(1)) if found else None,
        "said": said,
    }


def systemd_status(found: dict[str, str]) -> dict[str, Any]:
    """Of the properties ActiveState, MainPID, Result and ExecMainStatus."""
    pid, active = int(found["MainPID"] or 0), found["ActiveState"]
    state = _SYSTEMD_STATES.get(active, FAILED)
    if active == "deactivating" and not pid:  # its first process has ended, and others end
        state = STOPPED if found["Result"] == "success" else FAILED
    said, code = found["Result"], found["ExecMainStatus"]
    if said in ("exit-code", "signal") and code != "0":  # which is of the main process
        said = " ".join((said, code + _SYSTEMD_CODES.get(code, "")))
    return {"state": state, "pid": pid or None, "said": said}


def systemd_variables(unit: dict[str, str], own: str) -> set[str]:
    """Of Environment, EnvironmentFiles and UnsetEnvironment of a unit and of `show-environment`.

    Refused where a file that only systemd reads may hold more.
    """
    if unit["EnvironmentFiles"]:
        raise agent.Refused(f"the unit reads more from {unit['EnvironmentFiles'].split()[0]}")
    # Of a value with a line break `show-environment` makes $'...', so that each line is a variable.
    names = {line.partition("=")[0] for line in own.splitlines() if "=" in line}
    names |= {"HOME", "LOGNAME", "SHELL", "USER"}  # of `User=`
    with contextlib.suppress(ValueError):  # what is quoted as no shell does is not taken for set
        names |= {word.partition("=")[0] for word in shlex.split(unit["Environment"])}
    return names - {word.partition("=")[0] for word in unit["UnsetEnvironment"].split()}


def _wait_until_gone(living: Callable[[], list[int]], kill: Callable[[], Any]) -> None:
    """Until `living` finds no process; those that take longer than a moment are killed.

    Refused where one stays.
    """
    for last in (False, True):
        if last:
            kill()
        deadline = time.monotonic() + _GRACE_S
        while True:
            left = living()
            if not left:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
    raise agent.Refused(
        f"{len(left)} processes of the service outlived its stop: {', '.join(map(str, left[:5]))}"
    )


def _begin_anew(log: pathlib.Path) -> None:
    """Let a long log be the first of those before it, as supervisord does: systemd only adds to it.

    While nothing prints to it. A link, by which somebody has put it elsewhere, stays.
    """
    try:
        if log.is_symlink() or log.stat().st_size < _LOG_BYTES:
            return
    except FileNotFoundError:
        return
    for number in range(_LOGS_KEPT, 0, -1):
        newer = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
        with contextlib.suppress(FileNotFoundError):
            newer.replace(log.with_name(f"{log.name}.{number}"))


def _send(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def run(line: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """A program of the host, with what it prints; Refused where it does not end in time."""
    try:
        return subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise agent.Refused(f"`{' '.join(line)}` did not end within {limit_s:g} s") from None


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"
