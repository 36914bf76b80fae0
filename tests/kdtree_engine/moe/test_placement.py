"""Placements: cases by hand, and what holds of any loads."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.errors import ConfigError
from kdtree_engine.moe.placement import balanced, contiguous, loads_of_ranks


def test_contiguous_ranks_have_equal_runs_of_experts() -> None:
    assert contiguous(1, 4, 2).int().tolist() == [[[1, 1, 0, 0], [0, 0, 1, 1]]]
    with pytest.raises(ConfigError, match=r"4 experts .* 3 ranks"):
        contiguous(1, 4, 3)


def test_four_experts_on_two_ranks_are_balanced_without_copies() -> None:
    # 8 goes first, to rank 0; 5 and 4 to rank 1, which is then full; 1 to rank 0.
    hosts = balanced(torch.tensor([[8, 5, 4, 1]]), 2, 0)
    assert hosts.int().tolist() == [[[1, 0, 0, 1], [0, 1, 1, 0]]]
    assert loads_of_ranks(torch.tensor([[8, 5, 4, 1]]), hosts).tolist() == [[9, 9]]


def test_the_most_loaded_a_copy_is_copied_first() -> None:
    # 12 becomes 6 + 6 and then 7 is the most: 3.5 + 3.5. Both lie on both ranks.
    loads = torch.tensor([[12, 7, 2, 1]])
    hosts = balanced(loads, 2, 2)
    assert hosts.sum(1).tolist() == [[2, 2, 1, 1]]
    assert loads_of_ranks(loads, hosts).tolist() == [[11.5, 10.5]]


def test_no_rank_has_two_copies_and_none_more_than_its_room() -> None:
    hosts = balanced(torch.tensor([[100, 1, 1, 1]]), 2, 4)
    assert hosts.sum(1).tolist() == [[2, 2, 2, 2]], "a copy on each rank at most"
    assert balanced(torch.zeros(1, 4), 1, 0).int().tolist() == [[[1, 1, 1, 1]]]


@pytest.mark.parametrize(("ranks", "redundant"), [(2, 1), (3, 0), (2, 6), (2, -2)])
def test_copies_that_cannot_be_divided_are_refused(ranks: int, redundant: int) -> None:
    with pytest.raises(ConfigError, match="not to be divided"):
        balanced(torch.ones(1, 4), ranks, redundant)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("redundant", [0, 8, 24])
def test_balanced_is_never_worse_than_contiguous_on_its_own_loads(
    seed: int, redundant: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    loads = torch.rand(20, 48, generator=generator) ** (1 + seed) * 1000
    plain, hosts = contiguous(20, 48, 8), balanced(loads, 8, redundant)
    assert (hosts.sum(1) >= 1).all(), "every expert is somewhere"
    assert (hosts.sum(2) <= (48 + redundant) // 8).all()
    before, after = loads_of_ranks(loads, plain), loads_of_ranks(loads, hosts)
    assert torch.allclose(before.sum(1), after.sum(1))
    assert (after.amax(1) <= before.amax(1) + 1e-9).all()
    assert after.amax(1).mean() < before.amax(1).mean()


def test_a_layer_that_packing_would_make_worse_stays_contiguous() -> None:
    # Contiguous is perfect, 10 on each rank; greedy packing has 4 + 3 + 2 + 2 = 11 on one.
    loads = torch.tensor([[4, 3, 3, 0, 4, 2, 2, 2]])
    assert loads_of_ranks(loads, balanced(loads, 2, 0)).amax() == 10
