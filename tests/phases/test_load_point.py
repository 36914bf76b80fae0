"""Figures of a point, from ticks that were made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phases.load_client import DRAIN, MEASURED, RAMP, Tick
from phases.load_histogram import Histogram
from phases.load_point import Point, drift


def tick(stage: str = MEASURED, *, gap_s: float = 0.1, chunks: int = 5, **more: Any) -> Tick:
    """Half a second with chunks of four tokens."""
    found = Tick(0.5, stage, 0.5, tokens=4 * chunks, chunks=chunks, **more)
    for _ in range(chunks):
        found.chunk_gap.add(gap_s)
        found.inter_token.add(gap_s / 4, 4)
    return found


def a_point(*ticks: Tick, window_s: float = 0.0) -> Point:
    point = Point("kdtree_mla-9", 64, 4, 0.0, 32, window_s)
    for one in ticks:
        point.add(one)
    return point


def test_only_what_is_measured_makes_figures() -> None:
    point = a_point(tick(RAMP, chunks=50), tick(), tick(), tick(DRAIN, chunks=1))
    assert (point.seconds, point.tokens, point.chunks) == (1.0, 40, 10)
    assert point.tokens_per_second == 40.0
    assert point.chunk_gap.count == 10
    assert point.inter_token.count == 40
    assert point.inter_token.percentile(50) == pytest.approx(0.025, rel=0.005)


def test_errors_and_answers_count_whenever_they_come() -> None:
    late = tick(DRAIN, answers=2, produced=62, verified=10)
    late.answer.add(2.0)
    late.errors["closed"] += 1
    early = tick(RAMP)
    early.errors["http 500"] += 2
    early.said += ["http 500: out of memory"] * 9
    point = a_point(early, tick(), late)
    assert (point.answers, point.failed) == (2, 3)
    assert point.accept_length == 6.2
    assert point.request_tokens_per_second == 16.0
    assert len(point.said) == 5
    assert not point.right
    assert a_point(tick(answers=1)).right
    assert not a_point(tick()).right  # nothing was answered


def test_windows_show_what_drifts_and_what_stands() -> None:
    rates = (5, 5, 0, 5, 5, 3, 2, 3, 2)
    point = a_point(*(tick(chunks=one, gap_s=0.1 if one > 3 else 0.2) for one in rates),
                    window_s=0.5)  # fmt: skip
    assert [window.tokens for window in point.windows] == [4 * one for one in rates]
    found = drift(point.windows)
    assert found["tokens_per_second"] == pytest.approx((3 + 2 + 2) / (5 + 5 + 0))
    assert found["inter_token_p99"] == pytest.approx(2.0, rel=0.01)
    assert (found["silent"], found["longest_gap"]) == (1, 0.2)
    assert drift(point.windows[:2])["tokens_per_second"] is None
    assert drift([])["silent"] == 0


def test_a_window_is_whole_when_it_is_as_long_as_was_asked_for() -> None:
    point = Point("live", 64, 4, 0.0, 32, window_s=1.0)
    assert point.add(tick()) is None
    window = point.add(tick())
    assert window is not None
    assert window.seconds == 1.0
    assert point.add(tick(RAMP)) is None
    assert len(point.windows) == 1


def test_a_client_that_may_be_the_bound_is_told() -> None:
    assert a_point(tick(busy=0.5)).client_bound == ""
    assert "90% of a core" in a_point(tick(busy=0.9)).client_bound
    late = Histogram()
    late.add(0.05)
    assert "up to 50 ms late" in a_point(tick(late=late)).client_bound


def test_the_document_has_no_number_that_is_none() -> None:
    text = json.dumps([a_point().as_json(), a_point(tick(), window_s=1).as_json()], allow_nan=False)
    empty, one = json.loads(text)
    assert empty["inter_token_seconds"]["p99"] is None
    assert empty.keys() == one.keys()
    assert one["tokens_a_chunk"] == 4.0
    assert one["inter_token_seconds"]["p50"] == pytest.approx(0.025, rel=0.005)
    assert one["chunk_gap_seconds"]["p50"] == pytest.approx(0.1, rel=0.005)
    assert one["windows"][0].keys() >= {"tokens_per_second", "used_slots", "chunk_gap_seconds"}
