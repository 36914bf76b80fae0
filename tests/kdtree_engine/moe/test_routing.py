"""Counts of choices, and what makes them routing."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.routing import Routing, counts_of_choices, routing_of


def routing(*steps: list[list[int]]) -> Routing:
    """Of counts [layers, experts] of each step, top-1."""
    return routing_of(torch.tensor(steps), top_k=1, layers=None, source="test")


def test_choices_are_counted_by_expert_and_padding_is_not() -> None:
    choices = torch.tensor([[0, 3], [3, 1], [-1, -1]])
    assert counts_of_choices(choices, 4).tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("choices", [[[0, 4]], [[-2, 1]], [[2, 2]]])
def test_a_choice_that_cannot_be_is_refused(choices: list[list[int]]) -> None:
    with pytest.raises(ConfigError):
        counts_of_choices(torch.tensor(choices), 4)


def test_dense_layers_and_unused_steps_are_left_out_and_layers_keep_their_numbers() -> None:
    found = routing([[0, 0], [1, 2]], [[0, 0], [0, 0]], [[0, 0], [4, 0]])
    assert found.layers == (1,)
    assert found.tokens.tolist() == [3, 4]
    assert found.counts.tolist() == [[[1, 2]], [[4, 0]]]


@pytest.mark.parametrize(
    ("counts", "top_k", "said"),
    [
        ([[[1, 2], [1, 1]]], 1, "layers count 2 to 3 choices"),
        ([[[1, 2]]], 2, "not of tokens with 2 experts each"),
        ([[[3, 1]]], 2, "not of tokens with 2 experts each"),  # two tokens, one expert with three
        ([[[-1, 2]]], 1, "negative"),
        ([[[0, 0]]], 1, "no token"),
    ],
)
def test_counts_that_are_of_no_tokens_are_refused(
    counts: list[list[list[int]]], top_k: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        routing_of(torch.tensor(counts), top_k=top_k, layers=None, source="test")


def test_a_batch_is_different_steps_taken_together() -> None:
    found = routing([[1, 0]], [[0, 2]], [[4, 0]])
    counts, tokens = found.batches(3, 2, torch.Generator().manual_seed(1))
    assert counts.tolist() == [[[5, 2]]] * 2
    assert tokens.tolist() == [7, 7]
    with pytest.raises(ConfigError, match="3 steps to draw from, a batch of 4"):
        found.batches(4, 1, torch.Generator())


def test_the_counts_of_many_large_steps_fit() -> None:
    most = (1 << 24) - 1
    found = routing(*[[[most, 0]]] * 300)
    counts, tokens = found.batches(300, 1, torch.Generator().manual_seed(1))
    assert counts.tolist() == [[[300 * most, 0]]]
    assert tokens.tolist() == [300 * most]


def test_large_steps_can_be_left_out_and_the_rest_is_halved_in_order() -> None:
    found = routing([[1, 0]], [[0, 99]], [[4, 0]], [[2, 0]]).at_most(10)
    before, after = found.split()
    assert (before.tokens.tolist(), after.tokens.tolist()) == ([1], [4, 2])
    with pytest.raises(ConfigError, match="no step of 0 tokens"):
        found.at_most(0)
    with pytest.raises(ConfigError, match="one step"):
        before.split()
