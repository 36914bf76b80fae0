"""Which runs are taken, and what is made of those that are freed."""

from __future__ import annotations

import pytest

from kdtree_engine.fragmentation.free_runs import FreeRuns, Run


def pool(*runs: Run) -> FreeRuns:
    free = FreeRuns(1, 0)
    for run in runs:
        free.give(*run)
    return free


def test_the_shortest_run_that_fits_is_taken() -> None:
    free = pool((10, 300), (1000, 120), (2000, 20))
    assert free.take(100) == [(1000, 100)]
    assert free.take(21) == [(10, 21)]
    assert free.take(20) == [(1100, 20)]


def test_the_longest_runs_where_none_fits() -> None:
    free = pool((10, 100), (1000, 70), (2000, 20))
    assert free.take(180) == [(10, 100), (1000, 70), (2000, 10)]
    assert free.runs() == [(2010, 10)]


def test_what_is_freed_merges_on_both_sides() -> None:
    free = pool((10, 5), (20, 5))
    free.give(15, 5)
    assert free.runs() == [(10, 15)]


def test_more_than_there_is_takes_nothing() -> None:
    free = pool((10, 5))
    with pytest.raises(ValueError, match="6 slots of 5"):
        free.take(6)
    assert free.runs() == [(10, 5)]


def test_a_slot_is_not_freed_twice() -> None:
    free = pool((10, 5))
    for again in ((10, 2), (13, 2)):
        with pytest.raises(ValueError, match="already"):
            free.give(*again)


def test_one_end_of_a_run_is_claimed() -> None:
    free = pool((10, 9), (30, 2))
    free.claim(10, 2)
    free.claim(17, 2)
    free.claim(30, 2)
    assert free.runs() == [(12, 5)]
    assert (free.length_at(12), free.length_before(17), free.longest(), free.free) == (5, 5, 5, 5)
    for start, count in ((13, 2), (12, 6), (30, 1), (12, 0)):
        with pytest.raises(ValueError, match=f"{count} slots from {start}"):
            free.claim(start, count)
