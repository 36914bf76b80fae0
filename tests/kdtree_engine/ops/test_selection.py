"""Best-first selection by beams, and what follows from parents."""

from __future__ import annotations

import torch

from kdtree_engine.ops.selection import first_children, select_nodes, visible_nodes


def test_sums_that_round_to_the_same_value_go_by_tuple() -> None:
    """Beside 1e17 all that came before is nothing: (0, 0, 0), (0, 0, 1) and (0, 1) tie."""
    log_probs = torch.tensor([[[-1.0, -3.0], [-1.0, -1e17], [-1e17, -1e17]]], dtype=torch.float64)
    found = select_nodes(log_probs, 7)
    assert found.parents.tolist() == [[-1, 0, 1, 0, 3, 2, 2, 1]]
    assert found.ranks.tolist() == [[0, 0, 0, 1, 0, 0, 1, 1]]
    assert found.log_weights[0].tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, -1e17, -1e17, -1e17]


def test_equal_weights_go_by_tuple_and_a_prefix_before_its_extensions() -> None:
    found = select_nodes(torch.zeros(1, 2, 2, dtype=torch.float64), 6)
    # (0), (0, 0), (0, 1), (1), (1, 0), (1, 1)
    assert found.parents.tolist() == [[-1, 0, 1, 1, 0, 4, 4]]
    assert found.ranks.tolist() == [[0, 0, 0, 1, 1, 0, 1]]


def test_a_tree_that_runs_out_is_padded() -> None:
    log_probs = torch.tensor([[[-1.0, -torch.inf]], [[-1.0, -2.0]]], dtype=torch.float64)
    found = select_nodes(log_probs, 3)
    assert found.counts.tolist() == [2, 3]
    assert found.parents.tolist() == [[-1, 0, -1, -1], [-1, 0, 0, -1]]
    assert found.log_weights[:, -1].tolist() == [-torch.inf, -torch.inf]


def test_links_and_visible_nodes_follow_from_parents() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 0, -1]])  # the last is padding
    children, siblings = first_children(parents)
    assert children.tolist() == [[1, 3, -1, -1, -1, -1]]
    assert siblings.tolist() == [[-1, 2, 4, -1, -1, -1]]
    seen = [row.nonzero().flatten().tolist() for row in visible_nodes(parents, 2)[0]]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 4], [5]]
