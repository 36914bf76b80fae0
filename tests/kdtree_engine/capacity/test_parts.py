"""Components and their sums."""

from __future__ import annotations

from kdtree_engine.capacity.parts import Component, by_bound, weakest

READ = Component("read", {"latency": 1, "bytes": 3}, "calibrated")
SENT = Component("sent", {"latency": 2, "link": 1}, "prediction")
NONE = Component("none", {}, "prediction")


def test_a_component_is_the_sum_of_its_parts_and_bound_by_the_largest() -> None:
    assert (READ.seconds, READ.bound) == (4, "bytes")
    assert (SENT.seconds, SENT.bound) == (3, "latency")
    assert NONE.seconds == 0


def test_a_step_is_shared_out_by_what_bounds_it() -> None:
    assert by_bound([READ, SENT]) == {"bytes": 3, "flops": 0, "latency": 3, "link": 1}


def test_a_sum_rests_on_its_weakest_part() -> None:
    assert weakest([READ, SENT]) == "prediction"
    assert weakest([READ, Component("told", {"latency": 1}, "given")]) == "calibrated"
    assert weakest([READ, NONE]) == "calibrated", "what takes no time has no say"
