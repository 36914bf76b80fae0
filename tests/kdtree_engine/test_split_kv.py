"""Partial and merge: what a split leaves, and how the splits of a request come together."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.contents import MaskRows
from kdtree_engine.reference.masks import MaskLayout, pack_masks, tree_mask
from kdtree_engine.split_kv import merge_partials, partial_attention, visible_nodes

SCALE = 192**-0.5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(q: torch.Tensor, kv: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    scores = (q.double() @ kv.double().T * SCALE).masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=1) @ kv[:, :512].double()


@pytest.mark.parametrize("cuts", [[], [1], [5], [1, 2, 3], [7, 30, 31]])
def test_any_cut_merges_to_the_whole(cuts: list[int]) -> None:
    q, kv = draw(6, 576), draw(32, 576)
    visible = draw(6, 32) > 0
    visible[:, -1] = True
    edges = [0, *cuts, 32]
    partials = [
        partial_attention(q, kv[begin:end], visible[:, begin:end], SCALE)
        for begin, end in itertools.pairwise(edges)
    ]
    out, lse = merge_partials(partials)
    torch.testing.assert_close(out.double(), whole(q, kv, visible), rtol=1e-5, atol=1e-6)
    scores = (q @ kv.T * SCALE).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(dim=1))


def test_a_split_that_a_row_cannot_see_leaves_no_trace() -> None:
    q, kv = draw(2, 576), draw(8, 576)
    seen = partial_attention(q, kv, None, SCALE)
    unseen = partial_attention(q, kv, torch.zeros(2, 8, dtype=torch.bool), SCALE)
    assert unseen.maximum.tolist() == [-torch.inf] * 2
    poisoned = dataclasses.replace(
        unseen, out=torch.full_like(unseen.out, torch.nan), total=torch.full((2,), torch.nan)
    )
    for order in ([seen, poisoned], [poisoned, seen]):
        out, lse = merge_partials(order)
        assert torch.equal(out, merge_partials([seen])[0])
        assert torch.equal(lse, merge_partials([seen])[1])


def test_a_row_that_sees_nothing_is_zero() -> None:
    nothing = torch.zeros(1, 8, dtype=torch.bool)
    partial = partial_attention(draw(1, 576), draw(8, 576), nothing, SCALE)
    out, lse = merge_partials([partial, partial])
    assert out.count_nonzero() == 0
    assert lse.tolist() == [-torch.inf]


def test_large_scores_do_not_overflow() -> None:
    q, kv = draw(3, 576) * 1e3, draw(16, 576) * 1e3
    halves = [partial_attention(q, kv[part], None, 1.0) for part in (slice(8), slice(8, 16))]
    out, lse = merge_partials(halves)
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("nodes", [1, 3, 9, 64, 65, 128])
@pytest.mark.parametrize("layout", list(MaskLayout))
def test_each_layout_reads_back(nodes: int, layout: MaskLayout) -> None:
    masks = [
        tree_mask(torch.tensor([-1, *(child // fan for child in range(nodes - 1))]))
        for fan in (1, 2)
    ]
    prefixes = [5, 0]
    packed, starts = pack_masks(masks, prefixes, layout)
    for request, mask in enumerate(masks):
        start = int(starts[request])
        stride = (int(starts[request + 1]) - start) // nodes
        found = visible_nodes(packed, MaskRows(start, stride), nodes)
        assert torch.equal(found, mask)


def test_no_mask_is_a_chain() -> None:
    assert torch.equal(visible_nodes(None, MaskRows(0, 0), 4), torch.ones(4, 4).tril().bool())


def test_a_row_that_is_nan_shows_where_it_is_seen() -> None:
    pool = torch.randn(2, 576, generator=torch.Generator().manual_seed(1))
    pool[0] = float("nan")
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, 1], [0], [1])]
    found = tree_verify_attention(
        torch.randn(1, 1, 576), pool, *numbers, sm_scale=0.1, return_lse=True
    )
    assert all(tensor.isnan().all() for tensor in found)
