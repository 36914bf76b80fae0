"""Overlapping intervals as a sequence of segments, within each of which the same ones are open."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["segments"]

K = TypeVar("K")
W = TypeVar("W")


def segments(
    intervals: Iterable[tuple[float, float, K, W]],
) -> Iterator[tuple[float, float, dict[K, int], list[W]]]:
    """(begin, end, open ones by kind, those that began then) of every segment in order of time.

    intervals: (begin, end, kind, what) in order of their beginning. Segments are disjoint, have no
    gaps between them and end at the last end; those of no length are left out, and so are intervals
    of no length. None is open in a gap, so what begins behind one is all that is open there. The
    cost of a segment grows with the kinds that are open and not with the intervals. So

        [(0, 4, "a", 1), (2, 6, "b", 2), (3, 6, "b", 3), (8, 9, "c", 4)]

    gives (0, 2, {a: 1}, [1]), (2, 3, {a: 1, b: 1}, [2]), (3, 4, {a: 1, b: 2}, [3]),
    (4, 6, {b: 2}, []), (6, 8, {}, []), (8, 9, {c: 1}, [4]).
    """
    ends: list[tuple[float, int, K]] = []  # the number keeps kinds that cannot be ordered apart
    open_now: dict[K, int] = {}
    begun: list[W] = []
    at: float | None = None
    for number, (begin, end, kind, what) in enumerate(intervals):
        while ends and ends[0][0] <= begin:
            until = ends[0][0]
            if at is not None and until > at:
                yield at, until, dict(open_now), begun
                at, begun = until, []
            _close(open_now, heapq.heappop(ends)[2])
        if at is not None and begin > at:
            yield at, begin, dict(open_now), begun
            begun = []
        at = begin if at is None else max(at, begin)
        if end > begin:
            heapq.heappush(ends, (end, number, kind))
            open_now[kind] = open_now.get(kind, 0) + 1
            begun.append(what)
    while ends:
        until = ends[0][0]
        assert at is not None
        if until > at:
            yield at, until, dict(open_now), begun
            at, begun = until, []
        _close(open_now, heapq.heappop(ends)[2])


def _close(open_now: dict[K, int], kind: K) -> None:
    open_now[kind] -= 1
    if not open_now[kind]:
        del open_now[kind]
