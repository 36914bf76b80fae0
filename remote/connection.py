"""From a host of the inventory to a transport that reaches it."""

from __future__ import annotations

from remote.inventory import Host
from remote.transport import Transport

__all__ = ["connect"]


def connect(host: Host) -> Transport:
    """A transport to `host`. One over SSH connects when it is first used."""
    # Invoke and Fabric are loaded when a connection is made, and not before.
    if host.kind == "local":
        from remote.local import LocalTransport

        return LocalTransport(host.name)
    from remote.ssh import SshTransport

    return SshTransport(host)
