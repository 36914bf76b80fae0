"""How many nodes of a draft tree are verified."""

from __future__ import annotations

import math

import pytest
import torch

from kdtree_engine.ops import build_draft_trees
from kdtree_engine.ops.tree_budget import WidthChooser, candidate_widths, expected_tokens


@pytest.mark.parametrize(
    ("block", "nodes", "expected"),
    [
        (8, 33, (9, 17, 33)),
        (16, 65, (17, 33, 65)),
        (8, 8, (8,)),
        (8, 15, (8, 15)),
        (2, 3, (2, 3)),
    ],
)
def test_widths_are_halves_and_none_is_below_the_chain(
    block: int, nodes: int, expected: tuple[int, ...]
) -> None:
    assert candidate_widths(block, nodes) == expected


def test_expected_tokens_are_the_probabilities_of_the_paths() -> None:
    """Two positions: 3/4 and 1/4, then 1/2 twice. The paths: .75, .375, .375, .25, .125, .125."""
    log_probs = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).log()
    weights = build_draft_trees(log_probs, 6).log_weights
    found = expected_tokens(weights, (1, 2, 4, 7))
    assert found.tolist() == pytest.approx([1, 1.75, 2.5, 3.0])


def test_expected_tokens_of_a_batch_are_their_mean_and_padding_gains_nothing() -> None:
    weights = torch.tensor([[0.0, math.log(0.5), -math.inf], [0.0, 0.0, math.log(0.25)]]).double()
    assert expected_tokens(weights, (2, 3)).tolist() == pytest.approx([1.75, 1.875])


def settled(chooser: WidthChooser, batch: int, seconds: dict[int, float], rounds: int = 40) -> int:
    """The width that is chosen once each was timed."""
    width = 0
    for _ in range(rounds):
        width = chooser.choose(batch)
        chooser.costs.measured(width, batch, seconds[width])
        chooser.costs.take_over(chooser.costs.told())
        chooser.gained([2.0, 3.0, 3.5])
    return width


def test_the_widest_tree_wins_where_nodes_are_free() -> None:
    chooser = WidthChooser((9, 17, 33))
    assert settled(chooser, 1, {9: 1.0, 17: 1.0, 33: 1.1}) == 33
    assert min(chooser.chosen.values()) >= 3, "each was timed"


def test_many_requests_fall_back_towards_the_chain() -> None:
    """A round's time grows with its nodes there: 2 / 1 > 3 / 1.9 > 3.5 / 3.7 tokens a second."""
    chooser = WidthChooser((9, 17, 33))
    assert settled(chooser, 64, {9: 1.0, 17: 1.9, 33: 3.7}) == 9
    assert settled(chooser, 1, {9: 1.0, 17: 1.0, 33: 1.0}) == 33, "each size has times of its own"
    assert chooser.choose(64) == 9


def test_times_that_change_are_noticed() -> None:
    chooser = WidthChooser((9, 17, 33))
    assert settled(chooser, 1, {9: 1.0, 17: 1.0, 33: 1.0}) == 33
    assert settled(chooser, 1, {9: 1.0, 17: 1.9, 33: 3.7}, rounds=2000) == 9


def test_a_slow_round_is_not_believed() -> None:
    """The first pass of a width may compile, and any other may be held up."""
    chooser = WidthChooser((9, 17))
    for seconds in (50.0, 1.0, 1.0, 1.0, 9.0, 1.0):
        chooser.costs.measured(17, 1, seconds)
    assert chooser.costs.told()[1] == [(0, 0.0), (6, 1.0)]


@pytest.mark.parametrize("held_up", range(60, 76))
def test_one_slow_round_does_not_cost_the_best_width(held_up: int) -> None:
    """As ranks take times over at every 16th round, its place there must not matter."""
    chooser = WidthChooser((9, 17, 33))
    taken = []
    for number in range(400):
        width = chooser.choose(1)
        taken.append(width)
        chooser.costs.measured(width, 1, 100.0 if number == held_up else 1.0)
        chooser.gained([2.0, 3.0, 3.5])
        if number % 16 == 0:
            chooser.costs.take_over(chooser.costs.told())
    assert taken[50:].count(33) >= 0.95 * len(taken[50:])


def test_a_width_that_became_cheap_again_is_found_by_its_probes() -> None:
    chooser = WidthChooser((9, 17, 33))
    assert settled(chooser, 1, {9: 1.0, 17: 1.9, 33: 3.7}) == 9
    assert settled(chooser, 1, {9: 1.0, 17: 1.0, 33: 1.0}, rounds=2000) == 33


def test_ranks_choose_alike_whatever_each_has_measured() -> None:
    """Rank 1's own times say the opposite; both go by rank 0's, taken over at the same rounds."""
    ranks = [WidthChooser((9, 17, 33)) for _ in range(2)]
    for number in range(400):
        widths = [rank.choose(4) for rank in ranks]
        assert widths[0] == widths[1], number
        for place, rank in enumerate(ranks):
            rank.costs.measured(widths[0], 4, (1.0, 9.0)[place] * widths[place] ** (1 - place))
            rank.gained([2.0, 3.0, 3.5])
        if number % 16 == 0:
            told = ranks[0].costs.told()
            for rank in ranks:
                rank.costs.take_over(told)
