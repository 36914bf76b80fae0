"""`kdtree_engine.reference.tree`: DDTree's best-first draft tree."""

from __future__ import annotations

import math

import pytest
import torch

from kdtree_engine.reference.tree import DraftTree, build_draft_tree, positions, validate_parents


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def nodes(tree: DraftTree) -> list[tuple[int, int, int]]:
    """(token, parent, depth) of each node."""
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True))


def test_the_best_nodes_come_first() -> None:
    # Depth 1: tokens 0 (0.6), 1 (0.4). Depth 2: token 1 (0.9), 0 (0.1).
    tree = build_draft_tree(logs([0.6, 0.4], [0.1, 0.9]), budget=4, root_token=5)
    assert nodes(tree) == [
        (5, -1, 0),
        (0, 0, 1),  # 0.6
        (1, 1, 2),  # 0.6 * 0.9 = 0.54
        (1, 0, 1),  # 0.4
        (1, 3, 2),  # 0.4 * 0.9 = 0.36, ahead of 0.6 * 0.1
    ]
    assert tree.log_weights.exp().tolist() == pytest.approx([1.0, 0.6, 0.54, 0.4, 0.36])
    assert [tensor.dtype for tensor in (tree.tokens, tree.parents, tree.depths)] == [
        torch.int64
    ] * 3


def test_one_certain_path_becomes_a_chain() -> None:
    tree = build_draft_tree(logs([1.0, 0.0], [0.0, 1.0], [1.0, 0.0]), budget=10)
    assert nodes(tree) == [(-1, -1, 0), (0, 0, 1), (1, 1, 2), (0, 2, 3)]


@pytest.mark.parametrize("budget", [0, 1, 5, 6, 7, 100])
def test_a_budget_beyond_the_tree_gives_the_whole_tree(budget: int) -> None:
    tree = build_draft_tree(logs([0.5, 0.5], [0.3, 0.7]), budget)
    assert len(tree) == 1 + min(budget, 6)


def test_ties_fall_to_the_smaller_rank_tuple() -> None:
    # All four leaves and both inner nodes of a level weigh the same: with probability 1 everywhere
    # the order is that of the rank tuples: (0), (0,0), (0,1), (1), (1,0), (1,1).
    tree = build_draft_tree(torch.zeros(2, 2), budget=6)
    assert nodes(tree)[1:] == [(0, 0, 1), (0, 1, 2), (1, 1, 2), (0 + 1, 0, 1), (0, 4, 2), (1, 4, 2)]


def test_equal_tokens_are_ranked_by_column() -> None:
    tree = build_draft_tree(logs([0.2, 0.3, 0.2, 0.3]), budget=4)
    assert tree.tokens.tolist()[1:] == [1, 3, 0, 2]


def test_top_k_limits_the_children_of_each_node() -> None:
    tree = build_draft_tree(logs([0.4, 0.3, 0.3], [0.4, 0.3, 0.3]), budget=100, top_k=2)
    assert len(tree) == 1 + 2 + 4
    assert max(len(tree.children(node)) for node in range(len(tree))) == 2


def test_token_ids_name_preselected_columns() -> None:
    ids = torch.tensor([[70, 71], [80, 81]], dtype=torch.int32)
    tree = build_draft_tree(logs([0.6, 0.4], [0.1, 0.9]), budget=2, token_ids=ids)
    assert tree.tokens.tolist() == [-1, 70, 81]


def test_depth_zero_is_the_root_alone() -> None:
    assert nodes(build_draft_tree(torch.zeros(0, 5), budget=3)) == [(-1, -1, 0)]


def test_paths_and_ancestors() -> None:
    tree = build_draft_tree(logs([0.6, 0.4], [0.1, 0.9]), budget=4)
    assert tree.path(4) == [0, 3, 4]
    assert tree.ancestors(4) == [3, 0]
    assert tree.path(0) == [0]
    assert tree.children(0) == [1, 3]
    with pytest.raises(ValueError, match="node: 5"):
        tree.path(5)


def test_siblings_share_a_position() -> None:
    assert positions(torch.tensor([0, 1, 1, 2]), 10).tolist() == [10, 11, 11, 12]
    with pytest.raises(ValueError, match="prefix_length"):
        positions(torch.tensor([0]), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_summed_in_float64(dtype: torch.dtype) -> None:
    log_probs = torch.full((3, 1), -0.1, dtype=dtype)
    tree = build_draft_tree(log_probs, budget=3)
    step = float(log_probs[0, 0])
    assert tree.log_weights.tolist() == [0.0, step, step + step, step + step + step]


@pytest.mark.parametrize(
    ("entry", "what"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (0.25, "above 0")]
)
def test_what_is_no_log_probability_is_refused(entry: float, what: str) -> None:
    log_probs = torch.full((2, 3), -1.0)
    log_probs[1, 2] = entry
    with pytest.raises(ValueError, match=rf"log_probs\[1, 2\].*{what}"):
        build_draft_tree(log_probs, budget=1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"budget": -1}, "budget"),
        ({"budget": 1, "top_k": 0}, "top_k"),
        ({"budget": 1, "token_ids": torch.zeros(2, 2, dtype=torch.int64)}, "token_ids"),
        ({"budget": 1, "token_ids": torch.tensor([[4, 4, 5]])}, "token 4 stands there twice"),
        ({"budget": 1, "token_ids": torch.tensor([[4, 5, 5]])}, "token 5 stands there twice"),
        ({"budget": 1, "token_ids": torch.tensor([[6, 4, 6]])}, "token 6 stands there twice"),
        ({"budget": 1, "token_ids": torch.zeros(1, 3)}, "token_ids"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build_draft_tree(torch.full((1, 3), -1.0), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("log_probs", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)])
def test_log_probs_must_be_a_floating_matrix(log_probs: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="log_probs: must be floating"):
        build_draft_tree(log_probs, budget=1)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 0, -1], [-1, 5]])
def test_parents_precede_children(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents"):
        validate_parents(parents)
