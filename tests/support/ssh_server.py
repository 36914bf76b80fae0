"""A real sshd on this machine, which neither reads nor writes anything of the person's own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

from remote.inventory import SshHost

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")


class SshServer:
    """An sshd with keys of its own. folder/ssh is what a person's ~/.ssh would be.

    extra: lines of sshd_config that count before those here. enter: what its command begins with,
    to run elsewhere.
    """

    def __init__(
        self, folder: pathlib.Path, *extra: str, sftp: bool = True, enter: tuple[str, ...] = ()
    ) -> None:
        assert SSHD is not None
        self.folder = folder
        self.port = free_port()
        self.person = folder / "ssh"
        self.person.mkdir()
        for name, kind in (("host_ed25519", "ed25519"), ("host_ecdsa", "ecdsa")):
            make_key(folder / name, kind)
        make_key(self.person / "key")
        shutil.copy(self.person / "key.pub", folder / "authorized_keys")
        server = next((path for path in SFTP_SERVERS if pathlib.Path(path).exists()), None)
        lines = [
            *extra,  # first, as the first line about a thing counts for sshd
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {folder}/host_ed25519",
            f"HostKey {folder}/host_ecdsa",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            f"PidFile {folder}/sshd.pid",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "MaxStartups 100",
            *([f"Subsystem sftp {server}"] if sftp and server else []),
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self.write_config(self.person / "key")
        self.write_known_hosts(f"[127.0.0.1]:{self.port}")
        if os.geteuid() == 0:
            pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [*enter, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stderr=self._log,
        )
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.02)

    def host(self, **changes: object) -> SshHost:
        """As the inventory would name this server."""
        fields = {
            "name": "near",
            "kind": "ssh",
            "address": "127.0.0.1",
            "port": self.port,
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "identity": "near",
            "root": "/tmp/kd",
            "python": "/usr/bin/python3",
        }
        return SshHost.model_validate(fields | changes)

    def write_config(self, key: pathlib.Path) -> None:
        """HostName, User and Port are wrong here: the inventory's count."""
        (self.person / "config").write_text(
            "Host near\n  HostName 127.0.0.9\n  User nobody-at-all\n  Port 9\n"
            f"  IdentityFile {key}\n  IdentitiesOnly yes\n"
        )

    def write_known_hosts(self, names: str, key: str = "host_ed25519") -> pathlib.Path:
        kind, blob = (self.folder / f"{key}.pub").read_text().split()[:2]
        path = self.person / "known_hosts"
        path.write_text(f"# a comment\n{names} {kind} {blob}\n")
        return path

    def sessions(self) -> list[int]:
        """The sshd processes that serve connections."""
        return descendants(self._process.pid)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


def make_key(path: pathlib.Path, kind: str = "ed25519", passphrase: str = "") -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)],
        check=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """The children of a process that are called sshd, and theirs."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if pathlib.Path(f"/proc/{child}/comm").read_text().startswith("sshd"):
                found += [child, *descendants(child)]
    return found


def children(pid: int) -> Iterator[int]:
    """The children of a process, those that have ended and are not yet reaped among them."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(path.parent.name)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
