"""One point of a load test: a server under so much load, and the figures of it.

Figures are of the time in which it was measured; errors are of all of it, as a request that fails
while the load builds up has failed.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from phases.load_client import MEASURED, Tick
from phases.load_histogram import Histogram
from phases.service import Tokens

__all__ = ["Point", "Window", "drift"]

_BUSY = 0.8
_LATE = 0.25


@dataclasses.dataclass
class Window:
    """Some seconds of a point. used_slots: of the KV pool at its end; None: not told."""

    begun: float
    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    errors: int = 0
    in_flight: int = 0
    used_slots: int | None = None
    inter_token: Histogram = dataclasses.field(default_factory=Histogram)
    chunk_gap: Histogram = dataclasses.field(default_factory=Histogram)

    def add(self, tick: Tick) -> None:
        """A tick in which it was measured."""
        self.seconds += tick.seconds
        self.tokens += tick.tokens
        self.answers += tick.answers
        self.errors += tick.errors.total()
        self.in_flight = tick.in_flight
        self.inter_token.merge(tick.inter_token)
        self.chunk_gap.merge(tick.chunk_gap)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "begun": self.begun,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "answers": self.answers,
            "errors": self.errors,
            "in_flight": self.in_flight,
            "used_slots": self.used_slots,
            "inter_token_seconds": self.inter_token.as_json(),
            "chunk_gap_seconds": self.chunk_gap.as_json(),
        }


@dataclasses.dataclass
class Point:
    """server: its name. length: of the prompts, 0 where a file has them. window_s: of `windows`.

    why: it ended before its time; empty where it did not. forms: the different answers to each
    prompt. unjudged: answers that will not be compared, by why. together: chunks that came in one
    read with the one before them.
    """

    server: str
    length: int
    concurrency: int
    rate: float
    new_tokens: int
    window_s: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    chunks: int = 0
    together: int = 0
    requests: int = 0
    answers: int = 0
    most_in_flight: int = 0
    produced: int = 0
    verified: int = 0
    busy: float = 0.0
    why: str = ""
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    said: list[str] = dataclasses.field(default_factory=list)
    forms: dict[int, list[Tokens]] = dataclasses.field(default_factory=dict)
    unjudged: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    windows: list[Window] = dataclasses.field(default_factory=list)
    first_token: Histogram = dataclasses.field(default_factory=Histogram)
    inter_token: Histogram = dataclasses.field(default_factory=Histogram)
    chunk_gap: Histogram = dataclasses.field(default_factory=Histogram)
    answer: Histogram = dataclasses.field(default_factory=Histogram)
    late: Histogram = dataclasses.field(default_factory=Histogram)

    def add(self, tick: Tick) -> Window | None:
        """One more tick; the window that it completes, if any."""
        self.requests += tick.started
        self.answers += tick.answers
        self.produced += tick.produced
        self.verified += tick.verified
        self.errors.update(tick.errors)
        self.said += tick.said[: max(0, 5 - len(self.said))]
        self.first_token.merge(tick.first_token)
        self.answer.merge(tick.answer)
        for prompt, form in tick.forms:
            self.forms.setdefault(prompt, []).append(form)
        self.unjudged.update(tick.unjudged)
        if tick.stage != MEASURED:
            return None
        self.busy = self._mean(self.busy, self.seconds, tick.busy, tick.seconds)
        self.seconds += tick.seconds
        self.tokens += tick.tokens
        self.chunks += tick.chunks
        self.together += tick.together
        self.most_in_flight = max(self.most_in_flight, tick.in_flight)
        self.inter_token.merge(tick.inter_token)
        self.chunk_gap.merge(tick.chunk_gap)
        self.late.merge(tick.late)
        return self._in_window(tick)

    def _in_window(self, tick: Tick) -> Window | None:
        if not self.window_s:
            return None
        if not self.windows or self.windows[-1].seconds >= self.window_s:
            self.windows.append(Window(tick.at - tick.seconds))
        window = self.windows[-1]
        window.add(tick)
        return window if window.seconds >= self.window_s else None

    @staticmethod
    def _mean(one: float, seconds: float, other: float, more: float) -> float:
        whole = seconds + more
        return (one * seconds + other * more) / whole if whole else 0.0

    @property
    def load(self) -> str:
        """In a few words: `c=16`, or `2.5/s`."""
        return f"c={self.concurrency}" if self.concurrency else f"{self.rate:g}/s"

    @property
    def where(self) -> str:
        return f"{self.server} L={self.length or 'file'} {self.load}"

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def right(self) -> bool:
        """Whether it was measured to its end, and every request was answered in full."""
        return bool(self.answers) and not self.failed and not self.why

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together: what arrived, by the time in which it was measured."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def request_tokens_per_second(self) -> float | None:
        """Of one request: its tokens by the median time of an answer, first token included."""
        middle = self.answer.percentile(50)
        return self.new_tokens / middle if middle else None

    @property
    def accept_length(self) -> float:
        """Tokens that a verification gave; 0 where the server tells of none."""
        return self.produced / self.verified if self.verified else 0.0

    @property
    def client_bound(self) -> str:
        """Why the figures may be the client's own; empty where they are the server's."""
        late, gap = self.late.percentile(99), self.chunk_gap.percentile(50)
        if self.busy > _BUSY:
            return f"the client took {self.busy:.0%} of a core: it may be what bounds the figures"
        if late and gap and late > _LATE * gap:
            return (
                f"one arrival in a hundred was noted up to {1e3 * late:.2g} ms late, of a chunk "
                f"gap of {1e3 * gap:.2g} ms: percentiles above the median are the client's too"
            )
        return ""

    def as_json(self) -> dict[str, Any]:
        """Times in seconds."""
        return {
            "server": self.server,
            "length": self.length,
            "concurrency": self.concurrency or None,
            "rate": self.rate or None,
            "right": self.right,
            "ended_early": self.why or None,
            "seconds": self.seconds,
            "requests": self.requests,
            "answers": self.answers,
            "errors": dict(self.errors),
            "said": self.said,
            "most_in_flight": self.most_in_flight,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "request_tokens_per_second": self.request_tokens_per_second,
            "accept_length": self.accept_length or None,
            "tokens_a_chunk": self.tokens / self.chunks if self.chunks else None,
            "chunks_together": self.together,
            "first_token_seconds": self.first_token.as_json(),
            "inter_token_seconds": self.inter_token.as_json(),
            "chunk_gap_seconds": self.chunk_gap.as_json(),
            "answer_seconds": self.answer.as_json(),
            "client": {
                "busy": self.busy,
                "late_seconds": self.late.as_json(),
                "bound": self.client_bound or None,
            },
            "answers_not_judged": dict(self.unjudged),
            "answers_differ": {
                str(prompt): len(forms) for prompt, forms in self.forms.items() if len(forms) > 1
            },
            "windows": [window.as_json() for window in self.windows],
            "drift": drift(self.windows),
        }


def drift(windows: list[Window]) -> dict[str, float | int | None]:
    """What changed from the first third of the windows to the last, and whether anything stood.

    tokens_per_second, inter_token_p99: the last third's as a multiple of the first's; None with
    less than three windows. silent: windows in which nothing arrived. longest_gap: in seconds.
    """
    third = len(windows) // 3
    whole = 0.5 * max((one.seconds for one in windows), default=0.0)  # the last may be a rest
    early, late = windows[:third], windows[len(windows) - third :]

    def rate(some: list[Window]) -> float:
        seconds = sum(one.seconds for one in some)
        return sum(one.tokens for one in some) / seconds if seconds else 0.0

    def tail(some: list[Window]) -> float:
        both = Histogram()
        for one in some:
            both.merge(one.inter_token)
        return both.percentile(99) or 0.0

    return {
        "tokens_per_second": rate(late) / rate(early) if rate(early) else None,
        "inter_token_p99": tail(late) / tail(early) if tail(early) else None,
        "silent": sum(1 for one in windows if not one.tokens and one.seconds >= whole),
        "longest_gap": max((one.chunk_gap.largest for one in windows), default=0.0),
    }
