"""A command as one line of POSIX shell, alike for every transport."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from remote.errors import TransportError

__all__ = ["shell_line"]


def shell_line(host: str, argv: Sequence[str]) -> str:
    """The shell line that runs exactly `argv`.

    `exec` makes the first word a program's name, never a shell keyword, builtin or assignment. One
    that begins with `~/` lies in the home folder of the host.
    Raises TransportError, which names `host`, where `argv` cannot be a command.
    """
    if isinstance(argv, str) or not argv or not argv[0] or argv[0].startswith("-"):
        raise TransportError(
            f"host {host}: a command is a list that starts with a program, got {argv!r}"
        )
    if any("\0" in part for part in argv):
        raise TransportError(f"host {host}: `{argv[0]}`: an argument holds a NUL byte")
    program, *arguments = (shlex.quote(part) for part in argv)
    if argv[0].startswith("~/"):
        program = f'"$HOME"/{shlex.quote(argv[0][2:])}'
    return " ".join(("exec", program, *arguments))
