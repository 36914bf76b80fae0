"""Rows made by hand, and rows drawn against the definition read out word by word."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdtree_engine.fragmentation.measure import ROWS_PER_PAGE, Fragmentation, measure, steps_of

EDGE = ROWS_PER_PAGE


@pytest.mark.parametrize(
    ("slots", "runs", "length", "locality"),
    [
        ([], 0, 0.0, 1.0),
        ([7], 1, 1.0, 1.0),
        ([1, 2, 3, 4], 1, 4.0, 1.0),
        ([4, 3, 2, 1], 4, 1.0, 1.0),
        ([1, 2, 9, 10, 11, 5], 3, 2.0, 1.0),
        ([8, 8, 8], 3, 1.0, 1.0),
        ([EDGE - 2, EDGE - 1, EDGE, EDGE + 1], 1, 4.0, 2 / 3),
        ([1, EDGE + 1, 2, EDGE + 2], 4, 1.0, 0.0),
    ],
)
def test_rows_made_by_hand(slots: list[int], runs: int, length: float, locality: float) -> None:
    padded = torch.tensor([[*slots, 99, 100]], dtype=torch.int32)  # what follows is not read
    found = measure(padded, torch.tensor([len(slots)]))
    assert found.runs.tolist() == [runs]
    assert found.mean_run_length.tolist() == [length]
    assert found.page_locality.tolist() == [pytest.approx(locality)]


def by_definition(slots: list[int]) -> tuple[int, float]:
    steps = list(itertools.pairwise(slots))
    runs = 1 + sum(after != before + 1 for before, after in steps) if slots else 0
    near = sum(before // EDGE == after // EDGE for before, after in steps)
    return runs, near / len(steps) if steps else 1.0


@given(st.lists(st.lists(st.integers(1, 3 * EDGE), max_size=12), max_size=5))
def test_a_batch_is_its_rows(batch: list[list[int]]) -> None:
    width = max(map(len, batch), default=0)
    rows = torch.tensor([row + [0] * (width - len(row)) for row in batch]).view(len(batch), width)
    found = measure(rows, torch.tensor([len(row) for row in batch], dtype=torch.int64))
    assert found.runs.tolist() == [by_definition(row)[0] for row in batch]
    assert found.page_locality.tolist() == pytest.approx([by_definition(r)[1] for r in batch])


@given(st.permutations(range(1, 40)))
def test_bounds(slots: list[int]) -> None:
    found = measure(torch.tensor([slots]), torch.tensor([len(slots)]))
    assert 1 <= found.runs.item() <= len(slots)
    assert found.mean_run_length.item() * found.runs.item() == pytest.approx(len(slots))
    assert (found.runs.item() == 1) == (list(slots) == sorted(slots))


def test_a_summary_weighs_requests_and_names_the_worst() -> None:
    rows = torch.tensor([[1, 2, 3, 4]] * 9 + [[4, 3, 2, 1]])
    found = measure(rows, torch.full((10,), 4)).summary()
    assert (found.requests, found.mean_tokens) == (10, 4.0)
    assert found.mean_runs == pytest.approx(1.3)
    assert found.worst_decile_runs == 4.0
    assert found.mean_run_length == pytest.approx(40 / 13)


def test_nothing_live_is_no_division_by_zero() -> None:
    nothing = measure(torch.zeros(0, 8, dtype=torch.int32), torch.zeros(0)).summary()
    assert (nothing.requests, nothing.mean_runs, nothing.page_locality) == (0, 0.0, 1.0)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths"):
        measure(torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(slots=st.lists(st.integers(1, 3 * EDGE), max_size=12))
def test_one_row_without_its_length(dtype: torch.dtype, slots: list[int]) -> None:
    """What a server measures, row by row, is what `measure` finds of them."""
    steps = steps_of(torch.tensor(slots, dtype=dtype))
    breaks, near = steps[None].unbind(1)
    found = Fragmentation.of(torch.tensor([len(slots)]), breaks, near)
    runs, locality = by_definition(slots)
    assert found.runs.tolist() == [runs]
    assert found.page_locality.tolist() == [pytest.approx(locality)]
