"""The batched walk: the oracle's when greedy, the target's distribution when sampled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tree_cases import TreeCase, standard_cases

from kdtree_engine.ops import DraftTrees, accept_trees, build_draft_trees
from kdtree_engine.ops.acceptance import sample_tokens
from kdtree_engine.reference.acceptance import accept_greedy

CASE = TreeCase("plain", batch=3, depth=5, columns=12, budget=40, top_k=6, seed=7)


def trees_of(case: TreeCase) -> DraftTrees:
    roots = torch.arange(case.batch)
    return build_draft_trees(case.log_probs(), case.budget, case.top_k, root_tokens=roots)


def drawn_targets(trees: DraftTrees, seed: int) -> torch.Tensor:
    """A target that mostly agrees with some child of each node, so that walks go deep."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 12, trees.tokens.shape, generator=generator)
    for request, node in itertools.product(range(len(targets)), range(trees.nodes)):
        children = (trees.parents[request] == node).nonzero().flatten().tolist()
        if children and float(torch.rand(1, generator=generator)) < 0.8:
            chosen = int(torch.randint(len(children), (1,), generator=generator))
            targets[request, node] = trees.tokens[request, children[chosen]]
    return targets


@pytest.mark.parametrize("case", [CASE, *standard_cases()[::8]], ids=str)
def test_greedy_it_is_the_oracles_walk(case: TreeCase) -> None:
    trees = trees_of(case)
    targets = drawn_targets(trees, case.seed)
    found = accept_trees(trees, target_tokens=targets)
    for request in range(case.batch):
        tree = trees.tree(request)
        wanted = accept_greedy(tree, targets[request, : len(tree)])
        count = int(found.counts[request])
        path = found.nodes[request].tolist()
        assert tuple(path[:count]) == wanted.nodes
        assert set(path[count:]) <= {-1}
        assert int(found.bonus[request]) == wanted.bonus


def test_padding_is_never_accepted() -> None:
    """The target wants the root's token everywhere, which every padding node carries."""
    trees = build_draft_trees(torch.tensor([[[-1.0, -2.0]]]), 10, root_tokens=torch.tensor([9]))
    found = accept_trees(trees, target_tokens=torch.full((1, 11), 9))
    assert (found.nodes.tolist(), found.bonus.tolist()) == ([[0, -1]], [9])


def test_a_path_may_reach_the_deepest_node() -> None:
    trees = build_draft_trees(torch.full((2, 16, 1), -0.5), 16)
    found = accept_trees(trees, target_tokens=torch.zeros(2, 17, dtype=torch.int64))
    assert found.nodes.tolist() == [list(range(17))] * 2
    assert found.counts.tolist() == [17, 17]


def test_a_draw_picks_the_token_whose_share_it_falls_into() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    for draw, token in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (0.99999994, 3)):
        assert sample_tokens(probs, torch.tensor([draw])).tolist() == [token], draw


def test_weights_need_not_sum_to_one_and_the_order_of_rows_is_kept() -> None:
    probs = torch.rand(7, 4000, generator=torch.Generator().manual_seed(1)) / 100
    draws = torch.rand(7, generator=torch.Generator().manual_seed(2))
    found = sample_tokens(probs, draws)
    share = probs.double().cumsum(1) / probs.double().sum(1, keepdim=True)
    wanted = torch.searchsorted(share, draws.double()[:, None], right=True).squeeze(1)
    assert torch.equal(found, wanted)
    assert torch.equal(sample_tokens(probs[3:4], draws[3:4]), found[3:4])


def test_samples_have_the_targets_distribution() -> None:
    """Pearson's chi-square over 20 tokens, 200,000 draws."""
    generator = torch.Generator().manual_seed(4)
    probs = torch.randn(1, 20, generator=generator).softmax(-1)
    draws = torch.rand(200_000, generator=generator)
    found = sample_tokens(probs.expand(len(draws), -1).contiguous(), draws)
    expected = probs[0].double() * len(draws)
    statistic = ((found.bincount(minlength=20) - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor(19 / 2, dtype=torch.float64), statistic / 2)
    assert float(p_value) > 1e-3


def test_what_a_tree_gives_has_the_targets_joint_distribution() -> None:
    """Chains of two tokens, half drafted and half drawn, against p(first) * p(second | first)."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(4, generator=generator).softmax(-1)
    second = torch.randn(4, 4, generator=generator).softmax(-1)
    walks = 40_000
    draft = torch.randn(1, 1, 4, generator=generator).log_softmax(-1)
    trees = build_draft_trees(draft.expand(walks, -1, -1).contiguous(), 3)
    behind = torch.cat([first[None], second[trees.tokens[0, 1:]]])  # of each node
    draws = torch.rand(walks, 4, generator=generator)
    found = accept_trees(trees, target_probs=behind.expand(walks, -1, -1).contiguous(), draws=draws)
    drafted = found.counts == 2
    assert 0.2 < float(drafted.double().mean()) < 0.99
    took = trees.tokens.gather(1, found.nodes[:, 1:].clamp(min=0)).squeeze(1)
    # Where the walk ended at the root, the second token comes from the target alone.
    alone = torch.multinomial(second[found.bonus], 1, generator=generator).squeeze(1)
    pairs = torch.where(drafted, took * 4 + found.bonus, found.bonus * 4 + alone)
    expected = (first[:, None] * second).flatten().double() * walks
    statistic = ((pairs.bincount(minlength=16) - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor(15 / 2, dtype=torch.float64), statistic / 2)
    assert float(p_value) > 1e-3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"target_tokens": None}, ValueError, "target_tokens: expected either it or target_probs"),
        ({"draws": torch.zeros(3, 41)}, ValueError, "draws: expected a tensor where target_probs"),
        ({"target_tokens": torch.zeros(3, 40)}, TypeError, "target_tokens: expected dtype int64"),
        (
            {"target_tokens": torch.zeros(3, 40).long()},
            ValueError,
            r"target_tokens: expected shape \[3, 41\], got \[3, 40\]",
        ),
        (
            {"target_tokens": None, "target_probs": torch.zeros(3, 41, 5)},
            ValueError,
            "draws: expected a tensor where target_probs is given",
        ),
        (
            {
                "target_tokens": None,
                "target_probs": torch.zeros(3, 41, 5),
                "draws": torch.zeros(3, 41),
            },
            ValueError,
            "probs: row 0 is no distribution",
        ),
        (
            {
                "target_tokens": None,
                "target_probs": torch.ones(3, 41, 5),
                "draws": torch.ones(3, 41),
            },
            ValueError,
            r"draws\[0\]: expected a number in \[0, 1\), got 1\.0",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = {"target_tokens": torch.zeros(3, 41).long()} | change
    with pytest.raises(error, match=text):
        accept_trees(trees_of(CASE), **arguments)


def test_opcheck() -> None:
    trees = trees_of(CASE)
    paths = (torch.zeros(3, 6).long(), torch.zeros(3).long(), torch.zeros(3).long())
    torch.library.opcheck(
        torch.ops.kdtree_engine.accept_trees.default,
        (trees.tokens, trees.parents, torch.zeros(3, 41).long(), *paths),
    )
    torch.library.opcheck(
        torch.ops.kdtree_engine.sample_tokens.default,
        (torch.full((3, 5), 0.2), torch.tensor([0.0, 0.5, 0.9]), torch.zeros(3).long()),
    )
