"""The two ways to a host: this machine itself, and this machine over SSH."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ssh_server

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


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Each transport in turn, for what stands above them."""
    if request.param == "ssh":
        yield request.getfixturevalue("ssh")
        return
    made = connect(LocalHost(name="local", kind="local", root="/tmp/kd"))
    yield made
    made.close()


@pytest.fixture
def host(transport: Transport) -> Transport:
    """What is tested with it is the contract of both."""
    return transport
