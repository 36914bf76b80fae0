"""What `kd` exits with. `kd --help` and README state the same list."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """The worst that a command met."""

    PASSED = 0
    FAILED = 1
    USAGE = 2
    BLOCKED = 3
    DOWN = 4
    INTERRUPTED = 130
