"""The ways to a host: this machine itself, this machine over SSH, and a machine with systemd."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import ssh_server
from systemd_machine import PERSON, SYSTEM_PYTHON, SystemdMachine

from remote.connection import connect
from remote.errors import TransportError
from remote.inventory import LocalHost
from remote.ssh import SshTransport
from remote.transport import Transport


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_server.SshServer]:
    """An sshd on a free port of the loopback address."""
    if ssh_server.SSHD is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    running = ssh_server.SshServer(tmp_path_factory.mktemp("sshd"))
    transport = SshTransport(running.host(), folder=running.person)
    try:
        transport.run(["true"], timeout=20)
    except TransportError:
        # Without PAM sshd lets nobody in whose account has "!" for a password.
        if "account is locked" in (running.folder / "log").read_text():
            pytest.skip(f"the account {running.host().user} is locked, so that sshd refuses it")
        raise
    finally:
        transport.close()
    yield running
    running.stop()


@pytest.fixture
def ssh(server: ssh_server.SshServer) -> Iterator[SshTransport]:
    transport = SshTransport(server.host(), folder=server.person)
    yield transport
    transport.close()


@pytest.fixture
def person(machine: SystemdMachine) -> str:
    """A login of that machine that is not root; skips where it could not do what it has to."""
    for program in ("sudo", "dbus-daemon"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if not pathlib.Path(SYSTEM_PYTHON).exists():  # that of the tests may be root's alone
        pytest.skip(f"{SYSTEM_PYTHON} is not there")
    return PERSON


@pytest.fixture
def open_path(machine: SystemdMachine, person: str) -> Iterator[pathlib.Path]:
    """A folder of that person's, as `tmp_path` is root's alone."""
    with tempfile.TemporaryDirectory(prefix="kd-test-") as name:
        os.chown(name, machine.uid, machine.uid)
        pathlib.Path(name).chmod(0o755)
        yield pathlib.Path(name)


@pytest.fixture
def person_ssh(
    machine: SystemdMachine, person: str, open_path: pathlib.Path
) -> Iterator[SshTransport]:
    """That machine over SSH, by that login."""
    if ssh_server.SSHD is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    folder = open_path / "sshd"
    folder.mkdir()
    running = ssh_server.SshServer(folder, enter=machine.enter)
    transport = SshTransport(running.host(user=person), folder=running.person)
    yield transport
    transport.close()
    machine.run("kill", (folder / "sshd.pid").read_text().strip())
    running.stop()
    machine.forget("sglang")


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Each transport in turn, for what stands above them."""
    if request.param == "ssh":
        yield request.getfixturevalue("ssh")
        return
    made = connect(LocalHost(name="local", kind="local", root="/tmp/kd"))
    yield made
    made.close()
