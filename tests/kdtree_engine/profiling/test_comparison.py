"""Two profiles beside each other."""

from __future__ import annotations

import pathlib

import pytest
from traces import GEMM, Trace, two_rounds

from kdtree_engine.profiling.comparison import compare
from kdtree_engine.profiling.summary import profile


def test_two_profiles_differ_class_by_class(tmp_path: pathlib.Path) -> None:
    before = profile([two_rounds(reduce_us=40).write(tmp_path / "before.json")])
    other = two_rounds()
    other.copy(1191, 4, 1000)
    other.copy(1391, 4, 1000)
    after = profile([other.write(tmp_path / "after.json")])
    changes = {one.name: one.change_us for one in compare(before, after)}
    assert changes["verify attention"] == pytest.approx(10)
    assert changes["communication"] == pytest.approx(-10)
    assert changes["memory copies"] == pytest.approx(4)
    assert sum(changes.values()) == pytest.approx(after.step_us - before.step_us)
    sizes = [abs(one.change_us) for one in compare(before, after)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_class_that_one_side_lacks_is_nothing_there(tmp_path: pathlib.Path) -> None:
    copies, gemms = Trace(), Trace()
    copies.copy(0, 10, 1)
    gemms.kernel(GEMM, 0, 7)
    before = profile([copies.write(tmp_path / "before.json")])
    after = profile([gemms.write(tmp_path / "after.json")])
    assert {one.name: (one.before_us, one.after_us) for one in compare(before, after)} == {
        "memory copies": (10, 0),
        "dense GEMM": (0, 7),
    }
