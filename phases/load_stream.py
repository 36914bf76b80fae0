"""What a server streams, byte by byte: HTTP, server-sent events, the tokens in them.

Nothing here waits or asks for the time, so that every way in which bytes can be cut is tried
without a server.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["Events", "Pieces", "StreamBroken"]

_MOST_HEAD = 65_536
_MOST_BODY = 2_000
_MOST_LINE = 1 << 24
"""Bytes of one event: of 65,536 tokens it has half a million."""
_ODD = (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What reading JSON of another shape, depth or size raises."""
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
_UNFINISHED = re.compile(rb'"finish_reason": ?null')


class StreamBroken(ValueError):
    """The bytes are no answer of SGLang's; the text says what they are."""


class Events:
    """The data of the server-sent events in one HTTP/1.1 response.

    status: of the response; 0 until it is known. ended: whether the response is whole. body: of a
    response that is no success, its beginning.
    """

    def __init__(self) -> None:
        self.status = 0
        self.ended = False
        self.body = b""
        self._head = False
        self._chunked = False
        self._rest: int | None = None  # bytes of this chunk, or of the body; None: to the end
        self._between = False  # whether the line end behind a chunk is still to come
        self._raw = b""
        self._line = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Events that these bytes complete. Raises StreamBroken where they are no HTTP."""
        self._raw += data
        if not self._head and not self._take_head():
            return []
        content = self._dechunked() if self._chunked else self._plain()
        if self.status != 200:
            self.body = (self.body + content)[:_MOST_BODY]
            return []
        *lines, self._line = (self._line + content).split(b"\n")
        if len(self._line) > _MOST_LINE:
            raise StreamBroken(f"an event without an end: {self._line[:60]!r}")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def _take_head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            if len(self._raw) > _MOST_HEAD or not b"HTTP/1."[: len(self._raw)] == self._raw[:7]:
                raise StreamBroken(f"no HTTP response: {self._raw[:60]!r}")
            return False
        first, *fields = head.split(b"\r\n")
        told = re.match(rb"HTTP/1\.[01] (\d{3})", first)
        if told is None:
            raise StreamBroken(f"no HTTP response: {first[:60]!r}")
        named = {}
        for field in fields:
            name, _, value = field.partition(b":")
            named[name.strip().lower()] = value.strip().lower()
        self.status, self._head, self._raw = int(told[1]), True, rest
        self._chunked = named.get(b"transfer-encoding") == b"chunked"
        if not self._chunked and named.get(b"content-length", b"").isdigit():
            self._rest = int(named[b"content-length"])
        return True

    def _plain(self) -> bytes:
        content, self._raw = self._raw, b""
        if self._rest is not None:
            content = content[: self._rest]
            self._rest -= len(content)
            self.ended = self._rest == 0
        return content

    def _dechunked(self) -> bytes:
        content = []
        while not self.ended:
            if self._rest:
                taken = self._raw[: self._rest]
                self._raw = self._raw[len(taken) :]
                self._rest -= len(taken)
                content.append(taken)
                if self._rest:
                    break
                self._between = True
            if self._between:
                if len(self._raw) < 2:
                    break
                self._raw, self._between = self._raw[2:], False
            size, found, rest = self._raw.partition(b"\r\n")
            if not found:
                break
            try:
                self._rest = int(size.partition(b";")[0], 16)
            except ValueError as error:
                raise StreamBroken(f"no size of a chunk: {size[:60]!r}") from error
            self._raw = rest
            self.ended = self._rest == 0
        return b"".join(content)


class Pieces:
    """One answer, put together from its events.

    Each event says how many tokens there are so far (`completion_tokens`). With it come all of
    them, or, of a server with `--incremental-streaming-output`, the new ones: two events tell.

    count: tokens so far. tokens: None where the server tells no token ids. ending: as SGLang names
    it; empty until the last event. verified: verifications of a tree. error: what went wrong there.
    """

    def __init__(self) -> None:
        self.count = 0
        self.tokens: list[int] | None = None
        self.ending = ""
        self.verified = 0
        self.error = ""
        self._all = False  # whether events are known to have all tokens so far

    def take(self, data: bytes) -> int:
        """How many tokens are new in this event. Raises StreamBroken where it is none of SGLang's.

        Reading all tokens of all events would take time that grows with the square of their number,
        so of events that repeat what was said before only the count is read.
        """
        if data == b"[DONE]":
            return 0
        if self._all and _UNFINISHED.search(data) and (told := _COUNT.search(data)):
            return self._counted(int(told[1]))
        try:
            found = json.loads(data)
            if "error" in found:
                self.error = _message(found["error"])
                return 0
            about: dict[str, Any] = found.get("meta_info") or {}
            ids = found.get("output_ids")
            count = int(about.get("completion_tokens", self.count if ids is None else len(ids)))
            ending: Any = about.get("finish_reason")
            self.verified = int(about.get("spec_verify_ct") or 0)
            self.ending = "" if ending is None else str(ending["type"])
            if self.ending == "abort":
                self.error = str(ending.get("message") or "aborted")
            if ids is not None:
                self._take_ids(list(map(int, ids)), count)
        except _ODD as error:
            raise StreamBroken(f"no event of SGLang's: {data[:80]!r}") from error
        return self._counted(count)

    def _counted(self, count: int) -> int:
        if count < self.count:
            raise StreamBroken(f"{count} tokens after {self.count}")
        new, self.count = count - self.count, count
        return new

    def _take_ids(self, ids: list[int], count: int) -> None:
        if len(ids) == count:
            self._all = self._all or self.count > 0
            self.tokens = ids
        elif len(ids) == count - self.count:
            self.tokens = [*(self.tokens or []), *ids]
        else:
            raise ValueError(f"{len(ids)} ids for {count} tokens after {self.count}")


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
