"""The list of a batch's slots: each request's, in order, and where they begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdtree_engine.ops import fill_kv_indices
from kdtree_engine.ops.kv_indices import refill_kv_indices


def drawn_table(rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(rows * width, generator=generator).to(torch.int32)
    return table.view(rows, width)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_slots_of_each_request_one_after_the_other(seed: int, index: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = drawn_table(7, 40, seed)
    batch = 1 + seed
    requests = torch.randint(0, 7, (batch,), generator=generator).to(index)
    lengths = torch.randint(0, 41, (batch,), generator=generator).to(index)
    lengths[0] = (0, 40, 1)[seed % 3]
    total = int(lengths.sum())
    kv_indptr = torch.full((batch + 1,), 77, dtype=torch.int32)
    kv_indices = torch.full((total + 3,), -7)
    fill_kv_indices(table, requests, lengths, kv_indptr, kv_indices)
    wanted = [table[row, :length] for row, length in zip(requests, lengths, strict=True)]
    assert kv_indices[:total].tolist() == torch.cat(wanted).tolist()
    assert kv_indices[total:].tolist() == [-7] * 3, "what lies behind stays"
    assert kv_indptr.tolist() == [0, *lengths.cumsum(0).tolist()]


def test_no_request_and_requests_without_a_token() -> None:
    """SGLang's prefill lists the prefixes, of which there may be none, and then has no list."""
    table, nothing = drawn_table(3, 4, 1), torch.zeros(0, dtype=torch.int64)
    kv_indptr = torch.full((1,), 5, dtype=torch.int32)
    fill_kv_indices(table, nothing, nothing, kv_indptr, nothing)
    assert kv_indptr.tolist() == [0]
    kv_indptr = torch.full((3,), 5, dtype=torch.int32)
    rows, lengths = torch.tensor([2, 0]), torch.zeros(2, dtype=torch.int32)
    for fill in (fill_kv_indices, refill_kv_indices):
        fill(table, rows, lengths, kv_indptr, nothing)
        assert kv_indptr.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"req_to_token": torch.zeros(3, 4).long()}, TypeError, "req_to_token: expected dtype int"),
        ({"req_to_token": torch.zeros(4).int()}, ValueError, r"req_to_token: expected shape \[row"),
        (
            {"req_to_token": torch.zeros(4, 6).int()[:, ::2]},
            ValueError,
            "req_to_token: expected contiguous strides",
        ),
        ({"requests": torch.zeros(2)}, TypeError, "requests: expected dtype int64 or int32"),
        ({"lengths": torch.zeros(3).long()}, ValueError, r"lengths: expected shape \[2\], got \["),
        ({"kv_indptr": torch.zeros(2).int()}, ValueError, r"kv_indptr: expected shape \[3\], got"),
        ({"kv_indptr": torch.zeros(3).long()}, TypeError, "kv_indptr: expected dtype int32"),
        ({"kv_indices": torch.zeros(9).int()}, TypeError, "kv_indices: expected dtype int64"),
        (
            {"requests": torch.tensor([0, 3])},
            ValueError,
            r"requests\[1\]: expected 0\.\.2, a row of req_to_token, got 3",
        ),
        (
            {"lengths": torch.tensor([5, 0])},
            ValueError,
            r"lengths\[0\]: expected 0\.\.4, the width of req_to_token, got 5",
        ),
        ({"lengths": torch.tensor([0, -1])}, ValueError, r"lengths\[1\]: expected 0\.\.4"),
        (
            {"kv_indices": torch.zeros(4).long()},
            ValueError,
            "kv_indices: expected room for 5 slots, the sum of lengths, got 4",
        ),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], error: type, text: str) -> None:
    given: dict[str, Any] = {
        "req_to_token": drawn_table(3, 4, 1),
        "requests": torch.tensor([2, 0]),
        "lengths": torch.tensor([4, 1]),
        "kv_indptr": torch.zeros(3, dtype=torch.int32),
        "kv_indices": torch.zeros(9, dtype=torch.int64),
    }
    with pytest.raises(error, match=text):
        fill_kv_indices(**(given | change))
