"""Percentiles of times, on numbers that can be counted by hand."""

from __future__ import annotations

import json
import random

import pytest

from phases.load_histogram import Histogram


def of(*seconds: float) -> Histogram:
    found = Histogram()
    for one in seconds:
        found.add(one)
    return found


def test_the_nearest_rank_of_ten_times() -> None:
    ten = of(*(one / 10 for one in range(1, 11)))
    assert ten.percentile(50) == pytest.approx(0.5, rel=0.005)
    assert ten.percentile(90) == pytest.approx(0.9, rel=0.005)
    assert ten.percentile(91) == ten.percentile(99) == 1.0
    assert ten.percentile(1) == pytest.approx(0.1, rel=0.005)
    assert ten.mean == pytest.approx(0.55)
    assert (ten.least, ten.largest, ten.count) == (0.1, 1.0, 10)


def test_a_single_time_is_exact_at_every_percentile() -> None:
    one = of(0.0123456)
    assert one.percentile(50) == one.percentile(99) == 0.0123456


def test_a_weight_counts_as_so_many() -> None:
    found = Histogram()
    found.add(0.010, weight=98)
    found.add(1.0, weight=2)
    assert found.percentile(98) == pytest.approx(0.010, rel=0.005)
    assert found.percentile(99) == 1.0
    assert found.mean == pytest.approx((0.98 + 2) / 100)


def test_no_time_has_no_percentile() -> None:
    nothing = Histogram().as_json()
    assert nothing == {**dict.fromkeys(("mean", "p50", "p90", "p99", "max")), "count": 0}
    assert json.loads(json.dumps(nothing, allow_nan=False)) == nothing


def test_no_time_at_all_between_two_chunks_is_a_time() -> None:
    found = of(0.0, 0.0, 0.5)
    assert found.percentile(50) == pytest.approx(0.0, abs=1e-6)
    assert found.largest == 0.5


def test_merged_is_as_if_counted_together() -> None:
    draw = random.Random(1)
    some = [draw.lognormvariate(-4, 1) for _ in range(2000)]
    one, other = of(*some[:700]), of(*some[700:])
    one.merge(other)
    one.merge(Histogram())
    whole = of(*some)
    assert one.counts == whole.counts
    assert one.as_json() == {**whole.as_json(), "mean": pytest.approx(whole.mean)}
    for percent in (50, 90, 99):
        exact = sorted(some)[percent * 20 - 1]
        assert one.percentile(percent) == pytest.approx(exact, rel=0.006)
