"""A streaming reader of torch-profiler traces: Chrome trace JSON as Kineto writes it, or its gzip.

One event is in memory at a time, and a window of text around it, so a file of any size is read in
the same memory. Each event is decoded by the standard library's C scanner (`raw_decode`). ijson 3.6
was measured beside it and left out: it is as fast and no faster (plan 40), names no line where a
file is damaged, and would be a dependency of a package that needs torch alone.
"""

from __future__ import annotations

import codecs
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from kdtree_engine.errors import ConfigError

__all__ = ["MOST_CHARACTERS", "Progress", "TraceFile"]

MOST_CHARACTERS = 1 << 26
"""Of one event, or of one value beside the events: with more, a file is no trace."""

_CHUNK = 1 << 20  # bytes of text a read, at least
_SPACE = re.compile(r"[ \t\r\n]*")
_GZIP_MAGIC = b"\x1f\x8b"

Progress = Callable[[int, int], None]
"""Told how many bytes of the file have been read, and how many it has."""


class TraceFile:
    """One trace file. Events come from `events`; `header` fills with what stands beside them.

    header: the top-level values but `traceEvents`, such as `deviceProperties` and
    `distributedInfo`. Complete once the events are at their end.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._window: _Window | None = None

    def events(self, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
        """The events in the order of the file, which is not that of time.

        Raises ConfigError, with file and line, where the file is empty, cut off or damaged, or is
        JSON of another kind. OSError where it cannot be read.
        """
        size = self.path.stat().st_size
        with self.path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            told = (lambda: progress(raw.tell(), size)) if progress else (lambda: None)
            window = self._window = _Window(stream, self.path, told)
            opened = window.take()
            if opened == "":
                raise window.fault("is empty")
            if opened == "[":  # the other form of a Chrome trace: the events alone
                yield from self._array(window)
            elif opened == "{":
                yield from self._object(window)
            else:
                raise window.fault("is no JSON of a trace")
            if window.take() != "":
                raise window.fault("goes on after the end of its JSON")

    def fault(self, problem: str) -> ConfigError:
        """For who finds fault with the event that came last: `problem`, with file and line."""
        assert self._window is not None
        return self._window.fault(problem)

    def _object(self, window: _Window) -> Iterator[dict[str, Any]]:
        found = False
        mark = window.take()
        while mark != "}":
            if mark != '"':
                raise window.lacking("has no name of a field where one is due")
            window.give_back()
            name = window.value()
            if window.take() != ":":
                raise window.lacking(f"has no ':' after {name!r}")
            if name == "traceEvents":
                if window.take() != "[":
                    raise window.lacking("has traceEvents that are no list")
                found = True
                yield from self._array(window)
            else:
                self.header[name] = window.value()
            mark = window.take()
            if mark == ",":
                mark = window.take()
            elif mark != "}":
                raise window.lacking(f"has no ',' after the value of {name!r}")
        if not found:
            raise ConfigError(
                f"{self.path} has no traceEvents",
                remedy="it has to be a trace that torch.profiler exported",
            )

    @staticmethod
    def _array(window: _Window) -> Iterator[dict[str, Any]]:
        mark = window.take()
        while mark != "]":
            window.give_back()
            event = window.value()
            if not isinstance(event, dict):
                raise window.fault("has an event that is no JSON object")
            yield event
            mark = window.take()
            if mark == ",":
                mark = window.take()
            elif mark != "]":
                raise window.lacking("has no ',' between two events")


class _Window:
    """The text around the place that is read: what lies before it has been dropped."""

    def __init__(self, stream: IO[bytes], path: pathlib.Path, told: Callable[[], None]) -> None:
        self._stream = stream
        self._path = path
        self._told = told
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        # Kernel names are another program's: control characters in them are let through.
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._text = ""
        self._at = 0
        self._taken = ""
        self._lines = 1  # the number of the first line in the text
        self._ended = False

    def take(self) -> str:
        """The next character that is no space; nothing at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                self._taken = self._text[self._at]
                self._at += 1
                return self._taken
            if not self._more():
                self._taken = ""
                return ""

    def give_back(self) -> None:
        """What `take` gave last."""
        if self._at:
            self._at -= 1

    def value(self) -> Any:
        """The JSON value that comes next."""
        if self.take() == "":
            raise self.fault("is cut off")
        self.give_back()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                # Most often the value goes on behind the window.
                if len(self._text) - self._at > MOST_CHARACTERS:
                    raise self.fault(f"is damaged: {error.msg}", error.pos) from None
                if not self._more():
                    raise self._ending(error) from None
            except RecursionError:
                raise self.fault("nests its JSON too deep") from None
            except ValueError as error:  # an integer of thousands of digits
                raise self.fault(f"is damaged: {error}") from None
            else:
                # A number may go on behind the window's end, as 1.5 does in 1.5e+3.
                if end + len("e+") >= len(self._text) and self._more():
                    continue
                self._at = end
                return value

    def lacking(self, problem: str) -> ConfigError:
        """Another character came than was due, or none at all."""
        return self.fault(problem if self._taken else "is cut off")

    def fault(self, problem: str, at: int | None = None) -> ConfigError:
        line = self._lines + self._text.count("\n", 0, self._at if at is None else at)
        return ConfigError(f"{self._path} {problem}, line {line}")

    def _ending(self, error: json.JSONDecodeError) -> ConfigError:
        """No more text, and a value that is none: is it cut off, or damaged further up?"""
        rest = len(self._text.rstrip())
        if error.pos >= rest or error.msg.startswith("Unterminated string"):
            return self.fault("is cut off", rest)
        return self.fault(f"is damaged: {error.msg}", error.pos)

    def _more(self) -> bool:
        """Read on, and drop what has been read; False at the end of the file."""
        if self._ended:
            return False
        # As much again as is kept: a long value is scanned a few times and not once a chunk.
        wanted = max(_CHUNK, len(self._text) - self._at)
        try:
            data = self._stream.read(wanted)
            text = self._decode(data, final=not data)
        except EOFError:
            raise self.fault("is cut off: its gzip has no end") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.fault(f"is damaged gzip: {error}") from None
        except UnicodeDecodeError as error:
            raise self.fault(f"is not UTF-8: {error.reason}", len(self._text)) from None
        self._lines += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + text
        self._at = 0
        self._ended = not data
        self._told()
        return True
