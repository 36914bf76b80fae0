"""Rows moved by `compact_kv`, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.ops.relocation import move_rows


@pytest.mark.parametrize("moves", [1, 2, 63, 64, 65, 200])
def test_rows_go_where_they_should_in_all_layers(moves: int) -> None:
    generator = torch.Generator().manual_seed(moves)
    pools = torch.randint(1 << 40, (3, 500, 1, 2), generator=generator)
    slots = torch.randperm(499, generator=generator)[: 2 * moves] + 1
    sources, destinations = slots[:moves].contiguous(), slots[moves:].contiguous()
    wanted = pools.clone()
    wanted[:, destinations] = pools[:, sources]
    move_rows(list(pools), sources, destinations)
    assert torch.equal(pools, wanted)


def test_a_slot_outside_of_the_pool_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected slots in 0\.\.9"):
        move_rows([torch.zeros(10, 2)], torch.tensor([3]), torch.tensor([10]))


def test_sources_and_destinations_are_as_many() -> None:
    with pytest.raises(ValueError, match="destinations"):
        move_rows([torch.zeros(10, 2)], torch.tensor([3, 4]), torch.tensor([5]))
