"""How commands and files reach a host. One interface, whether it is this machine or another."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["Completed", "Transport"]


@dataclasses.dataclass(frozen=True)
class Completed:
    """How a command ended.

    exit_code: negative where a signal ended it, as in `subprocess`.
    stdout, stderr: decoded as UTF-8; bytes that are not UTF-8 show as U+FFFD.
    """

    exit_code: int
    stdout: str
    stderr: str


class Transport(Protocol):
    """One connection to one host. Nothing that goes through it can wait for a prompt.

    In the paths of `put`, `get` and `exists` a `~/` at the start is the home folder there. `run`
    changes no argument, so it is no home folder in those.
    """

    @property
    def host(self) -> str:
        """The host's name in the inventory."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        input: bytes | None = None,  # noqa: A002 (subprocess calls it so)
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Completed:
        """Run one program and wait for it.

        `argv` is quoted here: every part arrives as it is, whatever it holds. The program is looked
        for on PATH, or in the host's home folder where it begins with `~/`; exit code 127 says that
        it is not there. Its stdin holds `input` and then ends.
        `env` is added to the host's own environment. What the program leaves running in the
        background, and prints from there, is not waited for.

        Raises CommandTimeout after `timeout` seconds, when the program and all that can be found of
        what it has started have been ended: what left its parent for a session of its own cannot.
        Raises CommandFailed, if `check`, where the exit code is not 0; TransportError where it
        prints more than is sane or an argument cannot be passed (a NUL byte). On KeyboardInterrupt
        all that is ended before the interrupt goes on.
        """
        ...

    def put(self, source: pathlib.Path, target: str, *, mode: int = 0o600) -> None:
        """Copy a file of this machine to path `target` of the host, with the given mode.

        The whole file appears at once or not at all. Raises TransportError.
        """
        ...

    def get(self, source: str, target: pathlib.Path) -> None:
        """Copy the host's file `source` to `target` on this machine, at once or not at all.

        Raises TransportError.
        """
        ...

    def exists(self, path: str) -> bool:
        """Whether the host has a file or folder at `path`."""
        ...

    def rsync_options(self) -> Sequence[str]:
        """What rsync on this machine needs to reach the host as this transport does."""
        ...

    def rsync_place(self, path: str) -> str:
        """An absolute path of the host, as rsync takes it."""
        ...

    def close(self) -> None:
        """Let the connection go. May be called twice."""
        ...
