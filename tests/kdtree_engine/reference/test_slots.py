"""`kdtree_engine.reference.slots`: who holds which pool slot."""

from __future__ import annotations

import pytest
import torch

from kdtree_engine.reference.slots import SlotAllocator


def test_contiguous_takes_the_lowest_run() -> None:
    slots = SlotAllocator(10)
    first = slots.take(3)
    assert first == [0, 1, 2]
    assert slots.take(2) == [3, 4]
    slots.give(first)
    assert slots.take(4) == [5, 6, 7, 8]
    assert slots.take(4) == [0, 1, 2, 9]  # no run is left that is long enough


def test_the_last_run_is_a_run_too() -> None:
    slots = SlotAllocator(8)
    slots.take(8)
    slots.give([1, 5, 6, 7])
    assert slots.take(3) == [5, 6, 7]


def test_scattered_is_drawn_from_the_generator() -> None:
    taken = SlotAllocator(100, torch.Generator().manual_seed(0)).take(20)
    assert len(set(taken)) == 20
    assert taken != sorted(taken)


def test_a_shared_slot_is_free_when_its_last_holder_gives_it() -> None:
    slots = SlotAllocator(2)
    held = slots.take(2)
    slots.share(held[:1])
    slots.give(held)
    assert slots.free_slots == 1
    slots.give(held[:1])
    assert slots.free_slots == 2


def test_what_nobody_holds_cannot_be_given() -> None:
    slots = SlotAllocator(3)
    with pytest.raises(ValueError, match="nobody holds slot 1"):
        slots.give([1])
    with pytest.raises(ValueError, match="nobody holds slot 9"):
        slots.share([9])
    with pytest.raises(ValueError, match="cannot give 4 slots, 3 are free"):
        slots.take(4)
