"""`kdtree_engine.reference.acceptance`: the walk, and the moves that follow from it."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.reference.acceptance import (
    accept_greedy,
    accept_sampled,
    apply_compaction,
    compaction_plan,
)
from kdtree_engine.reference.tree import DraftTree

#        0
#       / \
#  (7) 1   2 (8)
#      |   |
#  (8) 3   4 (9)
TREE = DraftTree(
    tokens=torch.tensor([5, 7, 8, 8, 9]),
    parents=torch.tensor([-1, 0, 0, 1, 2]),
    depths=torch.tensor([0, 1, 1, 2, 2]),
    log_weights=torch.zeros(5, dtype=torch.float64),
)


def test_the_walk_follows_the_target() -> None:
    accepted = accept_greedy(TREE, torch.tensor([8, 0, 9, 0, 6]))
    assert accepted.nodes == (0, 2, 4)
    assert accepted.drafted == (8, 9)
    assert accepted.bonus == 6
    assert accepted.tokens == (8, 9, 6)


def test_what_no_child_carries_is_the_bonus() -> None:
    # Node 3 carries 8 too, but under node 1: only the root's own children count.
    accepted = accept_greedy(TREE, torch.tensor([9, 8, 0, 0, 0]))
    assert accepted.nodes == (0,)
    assert accepted.tokens == (9,)


def test_sampling_follows_a_certain_target() -> None:
    probs = torch.zeros(5, 10)
    probs[torch.arange(5), torch.tensor([7, 8, 0, 4, 0])] = 1.0
    accepted = accept_sampled(TREE, probs, torch.Generator().manual_seed(0))
    assert accepted.nodes == (0, 1, 3)
    assert accepted.tokens == (7, 8, 4)


def test_sampling_is_the_generators() -> None:
    probs = torch.rand(5, 10, generator=torch.Generator().manual_seed(1))
    draws = [
        [accept_sampled(TREE, probs, generator).tokens for _ in range(20)]
        for generator in (torch.Generator().manual_seed(2), torch.Generator().manual_seed(2))
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 5


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (torch.ones(4, 10), r"target_probs: must be \[5, vocabulary\]"),
        (torch.ones(5, 10).index_fill_(0, torch.tensor(3), 0.0), "row of node 3"),
        (torch.full((5, 10), torch.nan), "row of node 0"),
        (-torch.ones(5, 10), "row of node 0"),
    ],
)
def test_what_is_no_distribution_is_refused(probs: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accept_sampled(TREE, probs, torch.Generator())
    with pytest.raises(ValueError, match="target_argmax"):
        accept_greedy(TREE, torch.zeros(4, dtype=torch.int64))


def test_accepted_rows_move_to_the_front() -> None:
    plan = compaction_plan([0, 2, 4], window=[30, 10, 20, 50, 40])
    assert plan.source == (20, 40)
    assert plan.destination == (10, 20)
    assert plan.kept == (30, 10, 20)
    assert plan.freed == (50, 40)


def test_overlapping_moves_read_before_they_write() -> None:
    """Slot 20 is read by the first move and written by the second."""
    pool = torch.arange(60)[:, None].repeat(1, 3)
    apply_compaction(pool, compaction_plan([0, 2, 4], window=[30, 10, 20, 50, 40]))
    assert pool[[30, 10, 20], 0].tolist() == [30, 20, 40]


def test_a_path_in_front_already_moves_nothing() -> None:
    plan = compaction_plan([0, 1, 2], window=[3, 4, 5, 6])
    assert plan.source == plan.destination == ()
    pool = torch.rand(8, 2)
    before = pool.clone()
    apply_compaction(pool, plan)
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("nodes", "window", "name"),
    [
        ([0, 1], [4, 4], "window"),
        ([1], [4, 5], "nodes"),
        ([0, 2, 1], [4, 5, 6], "nodes"),
        ([0, 5], [4, 5], "nodes"),
        ([], [4], "nodes"),
    ],
)
def test_impossible_paths_are_refused(nodes: list[int], window: list[int], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}:"):
        compaction_plan(nodes, window)
