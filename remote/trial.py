"""Becomes a server of a release, beside the live service, to try it: as a job on the host.

It is sent there like `remote.agent`, and needs Python 3.9 and its standard library alone. What it
starts is no service: no manager knows it, no log of promotions, and nothing is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from typing import Any

from remote import agent, launch

_TRIES_S = 2.0


def start(request: dict[str, Any]) -> None:
    """Replace this process by the server. Raises Refused where it cannot be.

    request: root; release; service, as `remote.launch` reads it; port.
    """
    root = agent.in_home(request["root"])
    mark = root / "releases" / request["release"] / "release.json"
    try:
        held = os.open(mark, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_SH)  # as long as the server lives: no prune removes it
        mark.stat()
    except FileNotFoundError:
        raise agent.Refused(f"release {request['release']} is not there any more") from None
    os.set_inheritable(held, True)
    port = request["port"]
    if taken(port):
        raise agent.Refused(f"port {port} is in use there: name another, -- --port N")
    service = request["service"]
    command = launch.in_home(service["command"])
    try:
        variables = launch.environment(service, root / "service")
    except launch.Refused as error:
        raise agent.Refused(str(error)) from None
    os.execvpe(command[0], command, variables)


def taken(port: int) -> bool:
    """Whether anybody listens at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _TRIES_S):
        return True
    return False


def main(request: dict[str, Any]) -> int:
    """Become the server, or say why not."""
    os.umask(0o077)
    try:
        start(request)
    except agent.Refused as error:
        print(f"kd: {error}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"kd: {agent.told(error)}", file=sys.stderr, flush=True)
    return 78  # EX_CONFIG: trying again changes nothing
