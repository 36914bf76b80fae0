"""Layouts have the runs that they say, by the measure that requests are measured with."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.fragmentation.layouts import lay_out, slots_needed
from kdtree_engine.fragmentation.measure import ROWS_PER_PAGE, Fragmentation, measure


def measured(slots: torch.Tensor) -> Fragmentation:
    return measure(slots[None], torch.tensor([len(slots)]))


@pytest.mark.parametrize("window", [None, 512, 4096])
@pytest.mark.parametrize("run_length", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_runs_are_as_many_and_as_long_as_asked(
    tokens: int, run_length: int, window: int | None
) -> None:
    slots = lay_out(tokens, run_length, 20_000, seed=3, window=window)
    assert (slots.dtype, slots.shape) == (torch.int64, (tokens,))
    assert 0 <= int(slots.min()) <= int(slots.max()) < 20_000
    assert len(slots.unique()) == tokens
    found = measured(slots)
    assert int(found.runs) == -(-tokens // run_length)
    steps = slots.diff()
    assert ((steps == 1) == (torch.arange(1, tokens) % run_length != 0)).all()


def test_a_contiguous_request_lies_anywhere() -> None:
    starts = set()
    for seed in range(30):
        slots = lay_out(100, 100, 2_000, seed=seed)
        assert int(measured(slots).runs) == 1
        starts.add(int(slots[0]))
    assert len(starts) > 10


def test_runs_lie_over_the_whole_pool_and_in_no_order() -> None:
    slots = lay_out(10_000, 1, 1_000_000, seed=1)
    counts = torch.histc(slots.double(), bins=10, min=0, max=1_000_000)
    assert counts.min() > 900
    rises = float((slots.diff() > 0).double().mean())
    assert 0.48 < rises < 0.52
    assert float(measured(slots).page_locality) < 0.01


def test_a_window_keeps_each_stretch_together_and_windows_apart() -> None:
    window, run_length = 4096, 8
    slots = lay_out(10_000, run_length, 1_000_000, seed=1, window=window)
    stretches = slots.split(window // 2)
    windows = [set((stretch // window).tolist()) for stretch in stretches]
    assert all(len(found) == 1 for found in windows)
    assert len(set.union(*windows)) == len(stretches) == 5


def test_a_window_below_a_page_has_the_locality_of_real_churn() -> None:
    """Plan 16's ledger: 0.98 where a mean run has ten slots."""
    near, far = (
        float(measured(lay_out(16_384, 8, 1_000_000, seed=1, window=window)).page_locality)
        for window in (512, 65_536)
    )
    assert far < 0.9 < 0.97 < near < 0.99
    assert ROWS_PER_PAGE > 512


def test_equal_arguments_give_equal_slots() -> None:
    first, again, other = (lay_out(50, 4, 1000, seed=seed, window=200) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("tokens", "run_length", "window", "needed"),
    [(100, 100, None, 101), (100, 1, None, 200), (100, 1, 64, 256), (100, 64, 65, 130)],
)
def test_the_smallest_pool_is_enough_and_one_slot_less_is_not(
    tokens: int, run_length: int, window: int | None, needed: int
) -> None:
    assert slots_needed(tokens, run_length, window) == needed
    assert len(lay_out(tokens, run_length, needed, seed=1, window=window)) == tokens
    with pytest.raises(ValueError, match=f"take a pool of {needed} slots, this one has"):
        lay_out(tokens, run_length, needed - 1, seed=1, window=window)


@pytest.mark.parametrize(
    ("tokens", "run_length", "window", "says"),
    [
        (0, 1, None, "both must be at least 1"),
        (5, 0, None, "both must be at least 1"),
        (100, 64, 64, "no run of 64 and the slot behind it fits 64 slots"),
    ],
)
def test_what_is_no_layout_is_refused(
    tokens: int, run_length: int, window: int | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        lay_out(tokens, run_length, 10_000, seed=1, window=window)
