"""A real systemd: the first process of namespaces of its own on this machine.

It shares this machine's files and network. Its processes, mounts, cgroups and /run are its own, and
so are /etc/systemd and the accounts, to which `PERSON` is added: one that is not root and may use
sudo for what README says. Root can start it, with what Debian has in util-linux and systemd.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

import ssh_server

from remote.local import LocalTransport
from remote.transport import Completed

__all__ = ["PERSON", "SYSTEM_PYTHON", "MachineTransport", "SystemdMachine", "Unavailable"]

PERSON, _UID = "kd-person", 64123
SYSTEM_PYTHON = "/usr/bin/python3"
_SCRIPT = pathlib.Path(__file__).with_name("systemd_machine.sh")
_SYSTEMD = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
_DEBIAN = pathlib.Path("/usr/lib/systemd/system")
_BOOT_S = 30.0


class Unavailable(Exception):
    """Why this machine cannot start one."""


class MachineTransport(LocalTransport):
    """Runs commands there. Files are this machine's but for those below /run and /etc/systemd."""

    def __init__(self, enter: Sequence[str]) -> None:
        super().__init__("machine")
        self._enter = enter

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        input: bytes | None = None,  # noqa: A002
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Completed:
        line = [*self._enter, *argv]
        return super().run(line, timeout=timeout, input=input, env=env, check=check)


class SystemdMachine:
    """Raises Unavailable where it does not start.

    folder: an empty one, for its files.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        systemd = next((path for path in _SYSTEMD if pathlib.Path(path).exists()), None)
        if systemd is None:
            raise Unavailable("systemd is not installed (apt-get install systemd)")
        if os.geteuid():
            raise Unavailable("only root can make the namespaces of a systemd")
        for program in ("unshare", "nsenter", "setpriv"):
            if shutil.which(program) is None:
                raise Unavailable(f"{program} is not on PATH (apt-get install util-linux)")
        self.uid = _UID
        """Of `PERSON`."""
        self.units = folder / "units"
        """What is /etc/systemd/system there."""
        self.home = folder / "home"
        """Of `PERSON`; there it is `/run/kd-person`."""
        self._fill(folder)
        self._log = folder / "log"
        command = (*("setpriv", "--pdeathsig", "TERM", "unshare", "--mount"), "--propagation")
        with self._log.open("wb") as log:
            self._outside = subprocess.Popen(
                [*command, "private", "sh", str(_SCRIPT), "outside", str(folder), systemd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._first = self._booted()
        except BaseException:
            self.stop()
            raise

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command there begins with."""
        return self._entering(self._first)

    @property
    def enter_as_person(self) -> tuple[str, ...]:
        """The same, as `PERSON`."""
        home = ("env", "HOME=/run/kd-person", f"USER={PERSON}", f"LOGNAME={PERSON}")
        return (
            *self.enter,
            "setpriv",
            f"--reuid={_UID}",
            f"--regid={_UID}",
            "--clear-groups",
            *home,
        )

    def run(self, *argv: str) -> str:
        """What a command there prints; it must not fail."""
        done = subprocess.run(
            [*self.enter, *argv], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def has(self, pid: int) -> bool:
        """Whether a process lives there."""
        line = [*self.enter, "grep", "--quiet", "^State:[^Z]*$", f"/proc/{pid}/status"]
        return subprocess.run(line, capture_output=True, check=False, timeout=60).returncode == 0

    def drop_in(self, unit: str, *lines: str) -> pathlib.Path:
        """A file of somebody else's that adds to a unit; the same one each time."""
        path = self.units / f"{unit}.service.d" / "test.conf"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return path

    def forget(self, unit: str) -> None:
        """A unit and what adds to it are gone, as if they had never been there."""
        (self.units / f"{unit}.service").unlink(missing_ok=True)
        shutil.rmtree(self.units / f"{unit}.service.d", ignore_errors=True)
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "reset-failed")

    def stop(self) -> None:
        """The first process takes all others with it."""
        for pid in self._inside():
            ssh_server.kill([pid])
        try:
            self._outside.wait(20)
        except subprocess.TimeoutExpired:
            self._outside.kill()
            self._outside.wait()

    def _fill(self, folder: pathlib.Path) -> None:
        for made in (self.units, self.home, folder / "own"):
            made.mkdir()
        folder.chmod(0o755)
        os.chown(self.home, _UID, _UID)
        account = f"{PERSON}:x:{_UID}:{_UID}::/run/kd-person:/bin/sh\n"
        added = {
            "passwd": account,
            "group": f"{PERSON}:x:{_UID}:\n",
            "shadow": f"{PERSON}:*:::::::\n",
        }
        for name, line in added.items():
            shutil.copy(f"/etc/{name}", folder / name)
            with (folder / name).open("a") as accounts:
                accounts.write(line)
        (folder / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        allowed = ", ".join(str(shutil.which(name)) for name in ("systemctl", "install"))
        (folder / "sudoers").write_text(f"{PERSON} ALL=(root) NOPASSWD: {allowed}\n")
        (folder / "sudoers").chmod(0o440)
        for name in ("sysinit", "basic", "sockets", "shutdown", "multi-user"):
            wants = "Wants=dbus.socket\n" if name == "multi-user" else ""
            text = f"[Unit]\nDescription={name}\nDefaultDependencies=no\n{wants}"
            (folder / "own" / f"{name}.target").write_text(text)
        for name in ("dbus.socket", "dbus.service"):
            if (_DEBIAN / name).exists():
                shutil.copy(_DEBIAN / name, folder / "own")

    def _booted(self) -> int:
        """The first process's number here, once it has started what it should."""
        deadline = time.monotonic() + _BOOT_S
        said = ""
        while self._outside.poll() is None and time.monotonic() < deadline:
            for first in self._inside():
                line = [*self._entering(first), "systemctl", "is-system-running"]
                asked = subprocess.run(line, capture_output=True, text=True, timeout=20)
                said = (asked.stdout or asked.stderr).strip()
                if said in ("running", "degraded"):
                    return first
            time.sleep(0.05)
        printed = self._log.read_text(errors="replace").strip().splitlines()
        raise Unavailable(f"no systemd starts here: {printed[-1] if printed else said}")

    def _inside(self) -> list[int]:
        """The first process, which is in namespaces of its own; none where there is none yet."""
        between = ssh_server.children(self._outside.pid)
        return [one for pid in between for one in ssh_server.children(pid)]

    def _entering(self, first: int) -> tuple[str, ...]:
        spaces = ("--pid", "--mount", "--cgroup", "--uts", "--ipc")
        return ("nsenter", f"--target={first}", *spaces, "--")
