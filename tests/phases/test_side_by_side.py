"""Context managers that are entered together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from phases.side_by_side import entered


@pytest.mark.parametrize("at_once", [False, True])
def test_each_gives_its_own_and_all_are_left(at_once: bool) -> None:
    left: list[int] = []

    @contextlib.contextmanager
    def one(number: int) -> Iterator[int]:
        try:
            yield number
        finally:
            left.append(number)

    with entered([one(n) for n in range(4)], at_once=at_once) as found:
        assert found == [0, 1, 2, 3]
        assert left == []
    assert sorted(left) == [0, 1, 2, 3]


def test_they_are_entered_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=20)

    @contextlib.contextmanager
    def one() -> Iterator[None]:
        barrier.wait()
        yield

    with entered([one() for _ in range(3)], at_once=True):
        pass


@pytest.mark.parametrize("at_once", [False, True])
def test_where_one_fails_those_that_were_entered_are_left(at_once: bool) -> None:
    inside: set[int] = set()

    @contextlib.contextmanager
    def one(number: int) -> Iterator[int]:
        if number == 2:
            raise RuntimeError("does not start")
        inside.add(number)
        try:
            yield number
        finally:
            inside.remove(number)

    with (
        pytest.raises(RuntimeError, match="does not start"),
        entered([one(n) for n in range(4)], at_once=at_once),
    ):
        raise AssertionError("it was gone on with")
    assert inside == set()


def test_none_is_nothing() -> None:
    with entered([], at_once=True) as found:
        assert found == []
