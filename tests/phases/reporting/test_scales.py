"""Places and ticks."""

from __future__ import annotations

import pytest

from phases.reporting.scales import Scale, linear_ticks, log_ticks, spaced


def test_a_logarithmic_scale_gives_each_decade_the_same_room() -> None:
    scale = Scale(1, 100, 0, 200, log=True)
    assert [scale(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert scale(1e9) == pytest.approx(200)


def test_a_linear_scale_may_run_downwards() -> None:
    assert Scale(0, 10, 300, 100)(2.5) == pytest.approx(250)


def test_ticks_thin_out_where_there_are_many_decades() -> None:
    assert log_ticks(8, 120) == [10, 20, 50, 100]
    assert log_ticks(1, 1e6, most=8) == pytest.approx([10.0**power for power in range(7)])


def test_linear_ticks_are_round() -> None:
    assert linear_ticks(0, 285) == [0, 50, 100, 150, 200, 250]
    assert linear_ticks(0, 1.0, most=5) == pytest.approx([0, 0.5, 1.0])


def test_labels_move_as_little_as_they_must() -> None:
    assert spaced([10, 50], 10, 0, 100) == [10, 50]
    assert spaced([12, 10, 50], 10, 0, 100) == pytest.approx([16, 6, 50])
    assert spaced([1, 2, 3], 10, 0, 100) == pytest.approx([0, 10, 20])
    assert spaced([98, 99], 10, 0, 100) == pytest.approx([90, 100])
    assert spaced([], 10, 0, 100) == []
