"""What a DDTREE round computes around SGLang's passes; no SGLang is needed."""

from __future__ import annotations

import re
import types

import pytest
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.ops import DraftTrees, accept_trees, build_draft_trees
from kdtree_engine.sglang_ext import ddtree_round
from kdtree_engine.sglang_ext.ddtree_round import (
    best_of_all,
    full_mask,
    gained_tokens,
    path_rows,
    tree_shape,
)


def drawn_trees(budget: int = 6, *, seed: int = 5) -> DraftTrees:
    """Two requests behind 3 and 5 committed tokens, three positions, eight tokens."""
    print(f"seed {seed}")
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))
    return build_draft_trees(
        logits,
        budget,
        3,
        from_logits=True,
        root_tokens=torch.tensor([40, 50]),
        prefix_lengths=torch.tensor([3, 5]),
    )


def test_the_shape_is_the_budget_and_its_root() -> None:
    shape = tree_shape(block=8, budget=None, num_draft_tokens=None, top_k=8)
    assert (shape.budget, shape.nodes, shape.depth) == (32, 33, 7)
    assert tree_shape(block=8, budget=None, num_draft_tokens=17, top_k=8).budget == 16
    assert tree_shape(block=8, budget=16, num_draft_tokens=17, top_k=8).nodes == 17


@pytest.mark.parametrize(
    ("block", "budget", "num_draft_tokens", "expected"),
    [
        (8, 16, 9, "--speculative-num-draft-tokens 9 and a budget of 16, expected 17"),
        (1, 16, None, "the drafter's block is 1 positions, expected 2 to 17"),
        (18, 32, None, "the drafter's block is 18 positions"),
        (8, 6, None, "a budget of 6 nodes, expected 7"),
        (8, None, 1, "a budget of 0 nodes"),
        (8, None, 129, "a budget of 128 nodes, expected 7 (the positions of a draft, or its chain"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(
    block: int, budget: int | None, num_draft_tokens: int | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        tree_shape(block=block, budget=budget, num_draft_tokens=num_draft_tokens, top_k=8)


def test_the_first_nodes_are_the_tree_of_a_smaller_budget() -> None:
    whole, small = drawn_trees(12), drawn_trees(4)
    cut = whole.first(5)
    for field in (
        *("tokens", "parents", "depths", "positions", "log_weights", "counts", "draft_mask"),
        *("packed_mask", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"),
    ):
        assert torch.equal(getattr(cut, field), getattr(small, field)), field
    assert whole.first(13) is whole
    with pytest.raises(ValueError, match="nodes: expected"):
        whole.first(14)


def test_the_first_nodes_of_a_tree_with_several_mask_words() -> None:
    logits = torch.randn(1, 4, 30, generator=torch.Generator().manual_seed(1))
    whole = build_draft_trees(logits, 100, 30, from_logits=True)
    small = build_draft_trees(logits, 65, 30, from_logits=True)
    assert torch.equal(whole.first(66).packed_mask, small.packed_mask)
    assert torch.equal(whole.first(66).draft_mask, small.draft_mask)


def test_the_full_mask_has_the_prefix_and_the_tree() -> None:
    trees = drawn_trees()
    mask = full_mask(trees, reserved=3 + 5 + 4)
    nodes, begin = trees.nodes, 0
    for request, prefix in enumerate((3, 5)):
        end = begin + nodes * (prefix + nodes)
        part = mask[begin:end].view(nodes, prefix + nodes)
        assert part[:, :prefix].all()
        own = trees.draft_mask.view(2, nodes, nodes)[request]
        assert torch.equal(part[:, prefix:], own)
        begin = end
    assert mask.shape[0] == nodes * (12 + 2 * nodes)
    assert mask[begin:].all(), "room that no request has"


def test_gained_tokens_are_the_path_and_the_bonus() -> None:
    trees = drawn_trees()
    targets = torch.full((2, trees.nodes), 7)
    first = int(trees.tokens[0, 1])
    targets[0, 0] = first  # the target says what node 1 has, then something that no child has
    targets[0, 1] = 99
    paths = accept_trees(trees, target_tokens=targets)
    assert paths.counts[0] == 2
    gained = gained_tokens(trees, paths, 9)
    assert gained.shape == (2, 9)
    assert gained[0].tolist() == [first, 99, *([0] * 7)]
    rows = path_rows(paths, trees.nodes)
    assert rows[0].tolist() == [0, 1, 0, 0], "padded with the root's row"
    assert rows[1, 0] == trees.nodes
    assert (rows[1] >= trees.nodes).all()


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_sampled_tokens_are_of_each_request_s_own_distribution(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """All at once, or one request after the other, as where they would fill the memory."""
    monkeypatch.setattr(ddtree_round, "_VALUES_AT_ONCE", at_once)
    torch.manual_seed(4)
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(3, 4000, 3)
    sampling = types.SimpleNamespace(
        temperatures=torch.tensor([[1.0], [0.5], [1.0]]),
        top_ks=torch.tensor([3, 3, 1]),
        top_ps=None,
        min_ps=None,
        need_top_k_sampling=True,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
    )
    drawn = ddtree_round.sampled_tokens(logits, sampling, 3)
    assert drawn.shape == (3, 4000)
    for request, temperature in enumerate((1.0, 0.5)):
        expected = torch.softmax(logits[0, 0] / temperature, -1)
        found = drawn[request].bincount(minlength=3) / 4000
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    assert (drawn[2] == 2).all(), "a greedy request beside them"


class Ranks:
    """A group of ranks in one process: each gathers what all have put down."""

    def __init__(self, parts: list[list[torch.Tensor]]) -> None:
        self.parts = parts
        self.step = 0

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        self.step += 1
        return torch.cat(self.parts[self.step - 1], dim)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_parts_of_the_vocabulary_build_the_tree_of_the_whole(ranks: int) -> None:
    seed = 3
    print(f"seed {seed}")
    logits = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(seed))
    parts = logits.chunk(ranks, -1)
    size = parts[0].shape[-1]
    values = [part.topk(5, -1) for part in parts]
    put = [
        [found.values for found in values],
        [part.logsumexp(-1, keepdim=True) for part in parts],
        [found.indices + rank * size for rank, found in enumerate(values)],
    ]
    built = []
    for rank in range(ranks):
        scores, tokens = best_of_all(parts[rank], 5, rank * size, Ranks(put))
        built.append(build_draft_trees(scores, 20, 5, token_ids=tokens))
    whole = build_draft_trees(logits, 20, 5, from_logits=True)
    for trees in built:
        assert torch.equal(trees.tokens, built[0].tokens), "all ranks build one tree"
        assert torch.equal(trees.tokens, whole.tokens)
        assert torch.equal(trees.parents, whole.parents)
