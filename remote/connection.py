"""From a host of the inventory to a transport that reaches it."""

from __future__ import annotations

from kdtree_engine.errors import MissingError
from remote.inventory import Host
from remote.transport import Transport

__all__ = ["connect"]


def connect(host: Host) -> Transport:
    """A transport to `host`. Raises MissingError for hosts that need SSH."""
    if host.kind == "local":
        from remote.local import LocalTransport  # Invoke is loaded when a connection is made

        return LocalTransport(host.name)
    raise MissingError(
        f"host {host.name} is reached over SSH, which this version cannot do yet",
        remedy="use --host local",
    )
