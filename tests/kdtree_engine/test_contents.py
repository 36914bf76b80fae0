"""What only the contents of index tensors and masks can tell, with the request and slot named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdtree_engine.contents import MaskRows, check_contents, checks_wanted


def contents(**changes: object) -> dict[str, Any]:
    """Two requests: 3 and 2 tree nodes, prefixes of 4 and 6 tokens, in a pool of 20 slots."""
    call: dict[str, Any] = {
        "num_tokens": 5,
        "num_slots": 20,
        "qo_indptr": torch.tensor([0, 3, 5]),
        "kv_indptr": torch.tensor([0, 4, 10]),
        "kv_indices": torch.arange(10),
        "draft_slots": torch.arange(10, 15),
        "mask": torch.ones(3 * 7 + 2 * 8, dtype=torch.uint8),
        "mask_indptr": torch.tensor([0, 21, 37]),
        "max_nodes": None,
    }
    return call | changes


def test_each_request_says_by_its_step_how_its_mask_lies() -> None:
    mask = torch.ones(9 + 2 * 8, dtype=torch.uint8)
    rows = check_contents(**contents(mask=mask, mask_indptr=torch.tensor([0, 9, 25])))[2]
    assert rows == [MaskRows(0, 3), MaskRows(9, 8)]


def test_good_contents_come_back_as_lists() -> None:
    assert check_contents(**contents()) == (
        [0, 3, 5],
        [0, 4, 10],
        [MaskRows(0, 7), MaskRows(21, 8)],
    )
    assert check_contents(**contents(mask=None, mask_indptr=None))[2] is None


def test_what_lies_beyond_the_offsets_is_not_looked_at() -> None:
    stale = torch.cat((torch.arange(10), torch.tensor([-1, 99])))
    check_contents(**contents(kv_indices=stale))
    padded = torch.cat((torch.arange(10, 15), torch.tensor([99])))
    check_contents(**contents(num_tokens=6, draft_slots=padded))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"qo_indptr": torch.tensor([0, 3, 2])},
            "qo_indptr: expected offsets that never fall, got 3 then 2 at request 1",
        ),
        (
            {"kv_indptr": torch.tensor([0, 11, 10])},
            "kv_indptr: expected offsets that never fall, got 11 then 10 at request 1",
        ),
        ({"qo_indptr": torch.tensor([1, 3, 5])}, "qo_indptr: expected offsets from 0 on, got 1"),
        ({"qo_indptr": torch.tensor([0, 3, 6])}, "qo_indptr: expected at most 5 tokens.*got 6"),
        (
            {"kv_indptr": torch.tensor([0, 4, 11])},
            "kv_indices: expected at least 11 slots, the end of kv_indptr, got 10",
        ),
        (
            {"kv_indices": torch.tensor([0, 1, 2, 3, 4, 5, 6, 20, 8, 9])},
            r"kv_indices: expected slots in 0..19.*got slot 20 at index 7, request 1",
        ),
        (
            {"draft_slots": torch.tensor([10, 11, -1, 13, 14])},
            "draft_slots: expected slots in 0..19.*got slot -1 at index 2, request 0",
        ),
        (
            {"kv_indices": None, "num_slots": 9},
            "kv_indptr: expected at most 9 rows, those of kv_pool, in a contiguous view, got 10",
        ),
        (
            {"max_nodes": 2},
            "max_nodes: expected at least the 3 tree nodes of request 0, got 2",
        ),
        (
            {"mask": torch.ones(36, dtype=torch.uint8)},
            r"mask: expected at least 37 elements for request 1 \(2 tree nodes, prefix 6\), "
            "got 36: it is too short",
        ),
        (
            {
                "mask": torch.ones(4, dtype=torch.int64),
                "mask_indptr": torch.tensor([0, 3, 5]),
            },
            "mask: expected at least 5 elements for request 1",
        ),
        (
            {"mask_indptr": torch.tensor([-1, 21, 37])},
            "mask_indptr: expected offsets of at least 0, got -1 at request 0",
        ),
        (
            {"mask": torch.ones(37, dtype=torch.uint8), "mask_indptr": torch.tensor([0, 20, 36])},
            r"mask_indptr: expected a step of 9 or 21 at request 0 \(3 tree nodes, prefix 4, "
            r"torch.uint8 mask\), got 20",
        ),
        (
            {"mask": torch.ones(37, dtype=torch.int64)},
            "mask_indptr: expected a step of 3 at request 0",
        ),
    ],
)
def test_each_fault_is_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_contents(**contents(**changes))


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_the_checks(
    monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool
) -> None:
    monkeypatch.setenv("KDTREE_CHECK", value)
    assert checks_wanted() is wanted
