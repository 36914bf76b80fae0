"""What lies among points, and what does not."""

from __future__ import annotations

import itertools
import random

import pytest

from kdtree_engine.capacity.hull import inside

CROSS = ((-1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, -1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
"""Half of an octahedron: a pyramid."""


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((0.0, 0.0, 0.0), True),
        ((0.2, -0.3, 0.4), True),
        ((0.5, 0.5, 0.0), True),  # on an edge
        ((0.51, 0.5, 0.0), False),
        ((0.0, 0.0, 1.0), True),  # a corner
        ((0.0, 0.0, -0.01), False),
        ((0.4, 0.4, 0.3), False),
    ],
)
def test_a_pyramid(asked: tuple[float, ...], expected: bool) -> None:
    assert inside(asked, CROSS) == expected


def test_points_on_one_line_or_alone() -> None:
    line = ((0.0, 0.0, 0.0), (2.0, 2.0, 2.0), (1.0, 1.0, 1.0))
    assert inside((0.5, 0.5, 0.5), line)
    assert not inside((0.5, 0.5, 0.6), line)
    assert not inside((2.1, 2.1, 2.1), line)
    assert inside((2.0, 2.0, 2.0), line[1:2])
    assert not inside((2.0, 2.0, 2.1), line[1:2])
    assert not inside((0.0, 0.0, 0.0), ())


def test_means_of_drawn_points_are_among_them_and_what_a_plane_parts_is_not() -> None:
    draw = random.Random(1)
    for _ in range(20):
        points = tuple(tuple(draw.uniform(-5, 5) for _ in range(3)) for _ in range(9))
        weights = [draw.random() ** 3 for _ in points]
        mean = tuple(
            sum(w * one[axis] for w, one in zip(weights, points, strict=True)) / sum(weights)
            for axis in range(3)
        )
        assert inside(mean, points)
        way = tuple(draw.uniform(-1, 1) for _ in range(3))
        far = max(points, key=lambda one: sum(a * b for a, b in zip(one, way, strict=True)))
        beyond = tuple(a + 0.01 * b for a, b in itertools.zip_longest(far, way))
        assert not inside(beyond, points)
