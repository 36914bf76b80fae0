"""Work on a host that takes long: it goes on there when the connection is gone."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import secrets
import signal
import time
from collections.abc import Callable, Mapping

from remote.errors import TransportError
from remote.releases import Releases

__all__ = ["Heard", "JobGone", "end_interrupted", "follow", "new_job_name", "run_job"]


class JobGone(TransportError):
    """A job ended with nobody to see how: it was killed with all around it, or its host was."""


class _TooLongError(Exception):
    """A job's time is up."""


_PATIENCE_S = 60.0
_GRACE_S = 30.0
_MORE = 1 << 16  # bytes of a log beyond which the next look comes at once


def new_job_name(what: str) -> str:
    """Sorts by time: `promote-20261130T140102Z-a1b2c3`."""
    return f"{what}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@dataclasses.dataclass
class Heard:
    """How much of a job's log has been read, and what of that is still to be said."""

    offset: int = 0
    rest: str = ""
    lines: collections.deque[str] = dataclasses.field(default_factory=collections.deque)


def follow(
    releases: Releases,
    name: str,
    said: Callable[[str], None],
    *,
    heard: Heard | None = None,
    waits: Callable[[], None] = lambda: None,
    poll_s: float = 1.0,
    patience_s: float = _PATIENCE_S,
) -> int:
    """Give each whole line that a job prints to `said`, until it ends; its exit code.

    heard: where it was left when an interruption ended the call before; no line comes twice then.
    waits: called before each look.

    A host that does not answer for a while is asked again, for `patience_s` seconds. Raises
    TransportError after that, and JobGone where the job ended with nobody to see how (a restarted
    host).
    """
    heard, lost = heard or Heard(), None
    while True:
        while heard.lines:
            said(heard.lines[0])
            heard.lines.popleft()
        waits()
        try:
            found = releases.look_at_job(name, heard.offset)
        except TransportError:
            lost = lost or time.monotonic()
            if time.monotonic() - lost > patience_s:
                raise
            time.sleep(poll_s)
            continue
        lost = None
        grown = found["offset"] - heard.offset
        *lines, rest = (heard.rest + found["text"]).split("\n")
        heard.lines.extend(lines)  # first: interrupted here, a line comes twice and none is lost
        heard.offset, heard.rest = found["offset"], rest
        if not found["alive"] and grown == 0:
            if rest:
                said(rest)
            if found["exit_code"] is None:
                raise JobGone(f"job {name} ended on its host, and nothing says how")
            return int(found["exit_code"])
        if grown < _MORE and not heard.lines:
            time.sleep(poll_s)


def run_job(
    releases: Releases,
    name: str,
    command: list[str],
    environment: Mapping[str, str],
    said: Callable[[str], None],
    *,
    host: str,
    note: Callable[[str], None],
    poll_s: float = 1.0,
    limit_s: float | None = None,
) -> int:
    """Start a job and follow it to its end; its exit code.

    An interruption here ends it there, with all that it has started; `note` gets a line that says
    so. host: what that line calls the host. limit_s: of what has limits of its own, None.

    Raises TransportError where it is not done in time; it is ended there then.
    """
    end = None if limit_s is None else time.monotonic() + limit_s

    def still_may(line: str | None = None) -> None:
        if end is not None and time.monotonic() > end:
            raise _TooLongError
        if line is not None:
            said(line)

    try:
        releases.start_job(name, command, environment)
        return follow(releases, name, still_may, waits=still_may, poll_s=poll_s)
    except _TooLongError:
        end_interrupted(releases, name, host, note, why="its time is up")
        raise TransportError(
            f"host {host}: job {name} was not done after {limit_s:g} s, and was ended",
            remedy=f"its log is there: jobs/{name}/log below the host's root",
        ) from None
    except KeyboardInterrupt:
        end_interrupted(releases, name, host, note)
        raise


def end_interrupted(
    releases: Releases,
    name: str,
    host: str,
    note: Callable[[str], None],
    why: str = "interrupted",
) -> None:
    """End a job and all that it has started, and say so."""
    try:
        if releases.end_job(name):
            note(f"{why}: ends the run on {host}")
            deadline = time.monotonic() + _GRACE_S
            while releases.look_at_job(name)["alive"] and time.monotonic() < deadline:
                time.sleep(0.5)
        releases.end_job(name, signal.SIGKILL)
        note(f"the run on {host} has ended")
    except TransportError as error:
        note(f"the run on {host} may go on there, as job {name}: {error}")
