"""`kdtree_engine.reference.attention`: the definition that every kernel is judged by."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kdtree_engine.reference import attention as module
from kdtree_engine.reference import tree_verify_attention
from kdtree_engine.reference.masks import MaskLayout, pack_masks, tree_mask

SEED = 20262


def arguments(**changes: Any) -> dict[str, Any]:
    """Two requests: 3 nodes behind a prefix of 2, and 1 node behind none; 2 heads, rows of 6."""
    generator = torch.Generator().manual_seed(SEED)
    masks = [tree_mask(torch.tensor([-1, 0, 0])), tree_mask(torch.tensor([-1]))]
    mask, starts = pack_masks(masks, [2, 0], MaskLayout.FULL)
    return {
        "q": torch.randn(4, 2, 6, generator=generator, dtype=torch.float64),
        "kv_pool": torch.randn(10, 6, generator=generator, dtype=torch.float64),
        "qo_indptr": torch.tensor([0, 3, 4]),
        "kv_indptr": torch.tensor([0, 2, 2]),
        "kv_indices": torch.tensor([7, 2]),
        "draft_slots": torch.tensor([5, 1, 9, 0]),
        "mask": mask,
        "mask_indptr": starts,
        "sm_scale": 0.5,
        "v_head_dim": 4,
    } | changes


def test_the_formula_by_hand() -> None:
    """Node 2 of request 0 sees the prefix (slots 7, 2), the root (5) and itself (9), not node 1."""
    given = arguments()
    out, lse = tree_verify_attention(**given, return_lse=True)
    pool, q = given["kv_pool"].tolist(), given["q"].tolist()
    for head in range(2):
        scores = [
            0.5 * sum(a * b for a, b in zip(q[2][head], pool[slot], strict=True))
            for slot in (7, 2, 5, 9)
        ]
        total = sum(map(math.exp, scores))
        wanted = [
            sum(
                math.exp(score) * pool[slot][column]
                for score, slot in zip(scores, (7, 2, 5, 9), strict=True)
            )
            / total
            for column in range(4)
        ]
        assert out[2, head].tolist() == pytest.approx(wanted, rel=1e-13)
        assert float(lse[2, head]) == pytest.approx(math.log(total), rel=1e-13)


def test_a_lone_node_sees_itself() -> None:
    out = tree_verify_attention(**arguments())
    assert torch.equal(out[3, 0], arguments()["kv_pool"][0, :4])


def test_without_a_mask_nodes_are_a_chain() -> None:
    chain = [tree_mask(torch.tensor([-1, 0, 1])), tree_mask(torch.tensor([-1]))]
    mask, starts = pack_masks(chain, [2, 0], MaskLayout.PACKED)
    given = arguments()
    assert torch.equal(
        tree_verify_attention(**given | {"mask": None, "mask_indptr": None}),
        tree_verify_attention(**given | {"mask": mask, "mask_indptr": starts}),
    )


@pytest.mark.parametrize("layout", list(MaskLayout))
def test_every_layout_means_the_same(layout: MaskLayout) -> None:
    masks = [tree_mask(torch.tensor([-1, 0, 0])), tree_mask(torch.tensor([-1]))]
    mask, starts = pack_masks(masks, [2, 0], layout)
    given = arguments(mask=mask, mask_indptr=starts.int())
    assert torch.equal(tree_verify_attention(**given), tree_verify_attention(**arguments()))


def test_a_row_that_sees_nothing_is_zero() -> None:
    """By its mask, with no prefix; and the rows behind the last request."""
    given = arguments(mask=torch.zeros(10, dtype=torch.uint8), mask_indptr=torch.tensor([0, 9, 10]))
    given |= {"kv_indptr": torch.tensor([0, 0, 0])}
    out, lse = tree_verify_attention(**given, return_lse=True)
    assert not out.any()
    assert lse.eq(-math.inf).all()

    padded = arguments(qo_indptr=torch.tensor([0, 3, 3]), mask=None, mask_indptr=None)
    out, lse = tree_verify_attention(**padded, return_lse=True)
    assert out[:3].any()
    assert not out[3].any()
    assert lse[3].eq(-math.inf).all()


def test_unused_slots_are_not_read() -> None:
    given = arguments()
    used = [7, 2, 5, 1, 9, 0]
    poisoned = torch.full_like(given["kv_pool"], math.nan)
    poisoned[used] = given["kv_pool"][used]
    assert torch.equal(
        tree_verify_attention(**given), tree_verify_attention(**given | {"kv_pool": poisoned})
    )


def test_a_contiguous_view_needs_no_indices() -> None:
    view = arguments(kv_indices=None)
    assert torch.equal(
        tree_verify_attention(**view),
        tree_verify_attention(**arguments(kv_indices=torch.tensor([0, 1]))),
    )


def test_out_is_written_in_its_own_dtype() -> None:
    out = torch.full((4, 2, 4), math.nan, dtype=torch.bfloat16)
    result = tree_verify_attention(**arguments(out=out))
    assert result is out
    assert torch.equal(out, tree_verify_attention(**arguments()).bfloat16())


def test_bfloat16_inputs_are_computed_in_float64() -> None:
    given = arguments()
    rounded = {name: given[name].bfloat16() for name in ("q", "kv_pool")}
    exact = {name: tensor.double() for name, tensor in rounded.items()}
    assert torch.equal(
        tree_verify_attention(**given | rounded), tree_verify_attention(**given | exact)
    )


def test_long_requests_are_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree_verify_attention(**arguments())
    monkeypatch.setattr(module, "_MOST_SCORES", 1)
    torch.testing.assert_close(tree_verify_attention(**arguments()), whole, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 12)}, "q: must be floating"),
        ({"kv_pool": torch.zeros(10, 5, dtype=torch.float64)}, "kv_pool: must be"),
        ({"kv_pool": torch.zeros(10, 6)}, "kv_pool: must be"),
        ({"v_head_dim": 7}, "v_head_dim: must be in 1..6"),
        ({"qo_indptr": torch.tensor([1, 3, 4])}, "qo_indptr: must start at 0"),
        ({"qo_indptr": torch.tensor([0, 3, 2])}, "qo_indptr: falls at request 1"),
        ({"qo_indptr": torch.tensor([0, 3, 5])}, "qo_indptr: ends at 5"),
        ({"qo_indptr": torch.tensor([0.0, 3.0, 4.0])}, "qo_indptr: must be int32 or int64"),
        ({"kv_indptr": torch.tensor([0, 2])}, "kv_indptr: must have 3 values"),
        ({"kv_indptr": torch.tensor([0, 2, 3])}, "kv_indptr: ends at 3"),
        ({"kv_indices": torch.tensor([7, 10])}, r"kv_indices\[1\]: slot 10"),
        ({"draft_slots": torch.tensor([5, -1, 9, 0])}, r"draft_slots\[1\]: slot -1"),
        ({"draft_slots": torch.tensor([5])}, "draft_slots: must have 4 values"),
        ({"mask": None}, "mask_indptr: must be given where mask is"),
        ({"mask": torch.ones(15, dtype=torch.uint8)}, "mask: too short"),
        ({"max_nodes": 2}, "max_nodes: is 2, but request 0 has 3 nodes"),
        ({"out": torch.zeros(4, 2, 6)}, "out: must be floating"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_verify_attention(**arguments(**changes))
