"""Segments of overlapping intervals: no instant twice, none left out."""

from __future__ import annotations

import collections
import random
import time

from kdtree_engine.profiling.intervals import segments


def test_the_worked_example() -> None:
    given = [(0, 4, "a", 1), (2, 6, "b", 2), (3, 6, "b", 3), (8, 9, "c", 4)]
    assert list(segments(given)) == [
        (0, 2, {"a": 1}, [1]),
        (2, 3, {"a": 1, "b": 1}, [2]),
        (3, 4, {"a": 1, "b": 2}, [3]),
        (4, 6, {"b": 2}, []),
        (6, 8, {}, []),
        (8, 9, {"c": 1}, [4]),
    ]


def test_those_that_touch_or_have_no_length() -> None:
    assert list(segments([(0, 1, "a", 1), (1, 1, "point", 2), (1, 2, "b", 3)])) == [
        (0, 1, {"a": 1}, [1]),
        (1, 2, {"b": 1}, [3]),
    ]
    assert list(segments([(5, 5, "point", 1)])) == []
    nothing: list[tuple[float, float, str, int]] = []
    assert list(segments(nothing)) == []


def test_they_are_what_asking_every_instant_gives() -> None:
    draw = random.Random(1)
    for _ in range(200):
        begins = sorted(draw.randrange(40) for _ in range(draw.randrange(1, 12)))
        intervals = [(at, at + draw.randrange(8), n % 3, n) for n, at in enumerate(begins)]
        found = list(segments(intervals))
        instants = {
            at: kinds for begin, end, kinds, _ in found for at in range(int(begin), int(end))
        }
        first, last = intervals[0][0], max(end for _, end, _, _ in intervals)
        assert instants == {
            at: dict(collections.Counter(k for begin, end, k, _ in intervals if begin <= at < end))
            for at in range(first, last)
        }
        assert sum(end - begin for begin, end, _, _ in found) == last - first
        for begin, _, _, begun in found:
            assert begun == [n for at, end, _, n in intervals if at == begin and end > at]


def test_many_that_run_at_once_cost_no_more_than_as_many_one_by_one() -> None:
    """Thirty thousand of them: with each segment as long as all that are open it took minutes."""
    many = 30_000
    begun = time.process_time()
    found = list(segments((at, 2 * many - at, "a", at) for at in range(many)))
    assert time.process_time() - begun < 5
    assert len(found) == 2 * many - 1
    assert max(sum(kinds.values()) for _, _, kinds, _ in found) == many
