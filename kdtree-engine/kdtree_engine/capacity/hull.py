"""Whether a point lies among others: within their convex hull, in a few dimensions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

__all__ = ["Point", "inside"]

Point = tuple[float, ...]

_NEAR = 1e-6
"""Of a coordinate: what rounding may move."""


@functools.lru_cache(maxsize=1024)
def inside(asked: Point, points: tuple[Point, ...]) -> bool:
    """Whether `asked` is in the convex hull of `points`, its border included.

    By Caratheodory's theorem it then is in that of d + 1 of them at most, in d dimensions: these
    are tried, which for the dozen points of a calibration is some hundred small systems.
    """
    known = sorted(set(points))
    most = min(len(known), len(asked) + 1)
    return any(
        _within(asked, corners)
        for size in range(1, most + 1)
        for corners in itertools.combinations(known, size)
    )


def _within(asked: Point, corners: Sequence[Point]) -> bool:
    """Whether it is in the simplex of the corners; False for one that is flat."""
    first, *others = corners
    edges = [[one - two for one, two in zip(other, first, strict=True)] for other in others]
    target = [one - two for one, two in zip(asked, first, strict=True)]
    gram = [[_dot(one, two) for two in edges] + [_dot(one, target)] for one in edges]
    shares = _solved(gram)
    if shares is None or min(shares, default=0.0) < -_NEAR or sum(shares) > 1 + _NEAR:
        return False
    reached = [sum(map(float.__mul__, shares, column)) for column in zip(*edges, strict=True)]
    reached = reached or [0.0] * len(target)
    return all(abs(one - two) <= _NEAR for one, two in zip(reached, target, strict=True))


def _dot(one: Sequence[float], two: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, two, strict=True))


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Of n equations, each n factors and its right side; None where they do not decide."""
    size = len(rows)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        if abs(rows[at][at]) < _NEAR:
            return None
        for row in range(size):
            if row != at:
                factor = rows[row][at] / rows[at][at]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[at], strict=True)]
    return [rows[at][size] / rows[at][at] for at in range(size)]
