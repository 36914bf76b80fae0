"""`kdtree_engine.reference.masks`: who sees whom, in three layouts."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.reference.masks import (
    MaskLayout,
    chain_mask,
    mask_indptr,
    mask_layout,
    pack_masks,
    parents_from_mask,
    tree_mask,
    unpack_masks,
)

#     0
#    / \
#   1   2
#   |
#   3
PARENTS = torch.tensor([-1, 0, 0, 1])
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)


def test_a_node_sees_itself_and_its_ancestors() -> None:
    assert torch.equal(tree_mask(PARENTS), MASK)
    assert parents_from_mask(MASK).tolist() == PARENTS.tolist()


def test_a_chain_is_causal() -> None:
    assert torch.equal(tree_mask(torch.arange(5) - 1), chain_mask(5))


def test_an_empty_tree_has_an_empty_mask() -> None:
    assert tree_mask(torch.empty(0, dtype=torch.int64)).shape == (0, 0)


def test_the_full_layout_is_sglangs() -> None:
    flat, indptr = pack_masks([MASK], [2], MaskLayout.FULL)
    assert flat.dtype == torch.uint8
    assert indptr.tolist() == [0, 4 * (2 + 4)]
    assert flat.view(4, 6).tolist() == [[1, 1, *row] for row in MASK.int().tolist()]


def test_the_draft_layout_leaves_the_prefix_out() -> None:
    flat, indptr = pack_masks([MASK, MASK[:2, :2]], [2, 9], MaskLayout.DRAFT, torch.bool)
    assert flat.dtype == torch.bool
    assert indptr.tolist() == [0, 16, 20]
    assert torch.equal(flat[:16].view(4, 4), MASK)


def test_the_packed_layout_has_bit_j_for_node_j() -> None:
    flat, indptr = pack_masks([MASK], [2], MaskLayout.PACKED)
    assert flat.dtype == torch.int64
    assert indptr.tolist() == [0, 4]
    assert flat.tolist() == [0b0001, 0b0011, 0b0101, 0b1011]


def test_packed_rows_beyond_64_nodes_take_two_words() -> None:
    """Bit 63 is the sign; node 64 is bit 0 of the second word."""
    flat, indptr = pack_masks([chain_mask(65)], [0], MaskLayout.PACKED)
    assert indptr.tolist() == [0, 65 * 2]
    words = flat.view(65, 2)
    assert words[63].tolist() == [-1, 0]
    assert words[64].tolist() == [-1, 1]
    assert torch.equal(unpack_masks(flat, indptr, [65], [0])[0], chain_mask(65))


def test_device_code_needs_no_flag_for_the_byte_layouts() -> None:
    """With stride = step / T, node t sees node j iff mask[start + (t + 1) * stride - T + j]."""
    for layout in (MaskLayout.FULL, MaskLayout.DRAFT):
        flat, indptr = pack_masks([MASK[:2, :2], MASK], [7, 3], layout)
        start, step, nodes = int(indptr[1]), int(indptr[2] - indptr[1]), 4
        stride = step // nodes
        for node in range(nodes):
            end = start + (node + 1) * stride
            assert flat[end - nodes : end].bool().tolist() == MASK[node].tolist()


@pytest.mark.parametrize(
    ("dtype", "indptr", "layout"),
    [
        (torch.uint8, [0, 6 * 4, 6 * 4 + 9], MaskLayout.FULL),  # L = 0 fits either
        (torch.bool, [0, 16, 25], MaskLayout.DRAFT),
        (torch.uint8, [100, 116, 125], MaskLayout.DRAFT),
        (torch.int64, [0, 4, 7], MaskLayout.PACKED),
    ],
)
def test_the_layout_is_told_from_dtype_and_steps(
    dtype: torch.dtype, indptr: list[int], layout: MaskLayout
) -> None:
    assert mask_layout(dtype, indptr, tree_sizes=[4, 3], prefix_lengths=[2, 0]) is layout


def test_full_and_draft_are_the_same_bytes_without_a_prefix() -> None:
    full, draft = (pack_masks([MASK], [0], one) for one in (MaskLayout.FULL, MaskLayout.DRAFT))
    assert torch.equal(full[0], draft[0])
    assert torch.equal(full[1], draft[1])
    assert mask_layout(torch.uint8, [0, 16], [4], [0]) is MaskLayout.DRAFT


@pytest.mark.parametrize(
    ("dtype", "indptr", "message"),
    [
        (torch.uint8, [0, 17, 26], "request 0 has 4 nodes and 2 prefix tokens"),
        (torch.uint8, [0, 24, 33], "request 1 has 3 nodes and 5"),  # one full, one draft
        (torch.int64, [0, 16, 25], "request 0.*must be 4 .packed., got 16"),
        (torch.uint8, [0, 16], "must have 3 values for 2 requests"),
        (torch.uint8, [-1, 15, 24], r"mask_indptr\[0\]"),
        (torch.float32, [0, 16, 25], "mask: must be bool, uint8"),
    ],
)
def test_offsets_of_no_layout_are_refused(
    dtype: torch.dtype, indptr: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mask_layout(dtype, indptr, tree_sizes=[4, 3], prefix_lengths=[2, 5])


def test_indptr_of_each_layout() -> None:
    sizes, prefixes = [4, 0, 65], [10, 3, 0]
    assert mask_indptr(MaskLayout.FULL, sizes, prefixes) == [0, 56, 56, 56 + 65 * 65]
    assert mask_indptr(MaskLayout.DRAFT, sizes, prefixes) == [0, 16, 16, 16 + 65 * 65]
    assert mask_indptr(MaskLayout.PACKED, sizes, prefixes) == [0, 4, 4, 4 + 65 * 2]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.bool), "node 0 must see itself"),
        (torch.tensor([[1, 1], [0, 1]], dtype=torch.bool), "node 0 must see itself and no later"),
        (torch.eye(2, dtype=torch.bool), "node 1 does not descend from the root"),
        (torch.ones(2, 3, dtype=torch.bool), r"\[T, T\]"),
    ],
)
def test_what_is_no_trees_mask_is_refused(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parents_from_mask(mask)
