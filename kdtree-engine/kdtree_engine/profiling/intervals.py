"""Overlapping intervals as a sequence of segments, within each of which the same ones are open."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["segments"]

T = TypeVar("T")


def segments(
    intervals: Iterable[tuple[float, float, T]],
) -> Iterator[tuple[float, float, list[T]]]:
    """(begin, end, open ones) of every segment in order of time; none is open in a gap.

    intervals: (begin, end, what) in order of their beginning. Segments are disjoint, have no gaps
    between them and end at the last end; those of no length are left out. So

        [(0, 4, "a"), (2, 6, "b"), (8, 9, "c")]

    gives (0, 2, a), (2, 4, a b), (4, 6, b), (6, 8, none), (8, 9, c).
    """
    open_now: list[tuple[float, int, T]] = []  # the number keeps what cannot be ordered apart
    at: float | None = None
    for number, (begin, end, what) in enumerate(intervals):
        while open_now and open_now[0][0] <= begin:
            until = open_now[0][0]
            if at is not None and until > at:
                yield at, until, [one[2] for one in open_now]
                at = until
            heapq.heappop(open_now)
        if at is not None and begin > at:
            yield at, begin, [one[2] for one in open_now]
        at = begin if at is None else max(at, begin)
        if end > begin:
            heapq.heappush(open_now, (end, number, what))
    while open_now:
        until = open_now[0][0]
        assert at is not None
        if until > at:
            yield at, until, [one[2] for one in open_now]
            at = until
        heapq.heappop(open_now)
