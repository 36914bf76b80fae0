"""What can go wrong on the way to a host and back.

KdError
+-- TransportError      a host could not be reached, or a file could not be moved
    +-- CommandFailed   a command ended with an exit code other than 0
    +-- CommandTimeout  a command ran past its time limit and was ended
    +-- HostKeyError    a host's key is not known here, or is another than before
    +-- FactsError      a host's description of itself could not be read
    +-- UnknownEnd      a live service was being changed, and how that ends is not known here
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kdtree_engine.errors import KdError

__all__ = [
    "CommandFailed",
    "CommandTimeout",
    "FactsError",
    "HostKeyError",
    "TransportError",
    "UnknownEnd",
]


class TransportError(KdError):
    """A host could not be reached, or a command or file could not be moved."""


class CommandFailed(TransportError):
    """A command ended with an exit code other than 0. Its input and environment are not shown."""

    def __init__(self, host: str, argv: Sequence[str], exit_code: int, stderr: str) -> None:
        self.exit_code = exit_code
        how = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
        super().__init__(
            f"host {host}: `{_short(argv)}` ended with {how}{last_words(stderr, ': ')}"
        )


class CommandTimeout(TransportError):
    """A command ran past its time limit; it and what it had started were ended."""

    def __init__(self, host: str, argv: Sequence[str], limit_s: float, stderr: str) -> None:
        self.limit_s = limit_s
        super().__init__(
            f"host {host}: `{_short(argv)}` did not end within {limit_s:g} s and was stopped"
            f"{last_words(stderr, '; it last said: ')}"
        )


class HostKeyError(TransportError):
    """A host's key is not known here, is another than before, or was revoked."""


class FactsError(TransportError):
    """A host answered, and what it said about itself could not be read."""


class UnknownEnd(TransportError):
    """A change of a live service was begun, and nobody here knows what is live when it ends."""


def last_words(text: str, before: str = "") -> str:
    """The last line of `text` that says something, after `before`; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{before}{_cut(lines[-1], 300)}" if lines else ""


def _short(argv: Sequence[str]) -> str:
    """The command on one line: a newline inside an argument is shown as one space."""
    return _cut(" ".join(shlex.join(argv).split()), 120)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
