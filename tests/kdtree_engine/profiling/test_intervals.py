"""Segments of overlapping intervals: no instant twice, none left out."""

from __future__ import annotations

import random

from kdtree_engine.profiling.intervals import segments


def test_the_worked_example() -> None:
    found = list(segments([(0, 4, "a"), (2, 6, "b"), (8, 9, "c")]))
    assert [(begin, end, sorted(what)) for begin, end, what in found] == [
        (0, 2, ["a"]),
        (2, 4, ["a", "b"]),
        (4, 6, ["b"]),
        (6, 8, []),
        (8, 9, ["c"]),
    ]


def test_those_that_touch_or_have_no_length() -> None:
    assert list(segments([(0, 1, "a"), (1, 1, "point"), (1, 2, "b")])) == [
        (0, 1, ["a"]),
        (1, 2, ["b"]),
    ]
    assert list(segments([(5, 5, "point")])) == []
    assert list(segments([])) == []


def test_they_are_what_asking_every_instant_gives() -> None:
    draw = random.Random(1)
    for _ in range(200):
        begins = [draw.randrange(40) for _ in range(draw.randrange(1, 12))]
        intervals = sorted((at, at + draw.randrange(8), n) for n, at in enumerate(begins))
        found = list(segments(intervals))
        instants = {
            at: sorted(what) for begin, end, what in found for at in range(int(begin), int(end))
        }
        first, last = intervals[0][0], max(end for _, end, _ in intervals)
        assert instants == {
            at: sorted(n for begin, end, n in intervals if begin <= at < end)
            for at in range(first, last)
        }
        assert sum(end - begin for begin, end, _ in found) == last - first
