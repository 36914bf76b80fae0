"""What the host was at, piece by piece."""

from __future__ import annotations

from kdtree_engine.profiling.host import ELSEWHERE, HostWork
from kdtree_engine.profiling.timeline import Span


def span(begin: float, end: float, label: str | None) -> Span:
    return Span(begin, end, None, None, label)


def test_the_innermost_range_counts_and_the_pieces_add_up() -> None:
    work = HostWork(
        [
            span(0, 100, "outer"),
            span(20, 30, "inner"),
            span(40, 50, "inner"),
            span(42, 48, None),  # one that says nothing about the host
            span(120, 130, "later"),
        ]
    )
    assert list(work.during(10, 140)) == [
        ("outer", 10),
        ("inner", 10),
        ("outer", 10),
        ("inner", 10),
        ("outer", 50),
        (ELSEWHERE, 20),
        ("later", 10),
        (ELSEWHERE, 10),
    ]
    assert list(work.during(22, 25)) == [("inner", 3)]
    assert list(work.during(5, 5)) == []


def test_without_ranges_it_is_all_elsewhere() -> None:
    assert list(HostWork([]).during(0, 7)) == [(ELSEWHERE, 7)]
