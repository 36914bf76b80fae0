"""Slots of a paged pool of page size 1: who holds which, and in what order they are handed out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Hands out pool slots and counts their holders, as requests may share a prefix.

    Scattered (with a generator), each allocation is a random draw from the free slots, as in a
    pool that has churned for long. Contiguous (without), it is the lowest free run that is long
    enough, or the lowest free slots where there is none.
    """

    def __init__(self, slots: int, generator: torch.Generator | None = None) -> None:
        self._holders = [0] * slots
        self._generator = generator

    @property
    def free_slots(self) -> int:
        """How many slots nobody holds."""
        return self._holders.count(0)

    def take(self, count: int) -> list[int]:
        """`count` slots, held once. Raises ValueError where the pool has not that many."""
        free = [slot for slot, holders in enumerate(self._holders) if not holders]
        if self._generator is not None:
            order = torch.randperm(len(free), generator=self._generator)[:count].tolist()
            taken = [free[place] for place in order]
        else:
            taken = _first_run(free, count) or free[:count]
        if len(taken) < count:
            raise ValueError(f"count: the pool cannot give {count} slots, {len(free)} are free")
        for slot in taken:
            self._holders[slot] = 1
        return taken

    def share(self, slots: Iterable[int]) -> None:
        """One more holder for each of `slots`. Raises ValueError for a slot that nobody holds."""
        for slot in slots:
            self._require_held(slot)
            self._holders[slot] += 1

    def give(self, slots: Iterable[int]) -> None:
        """One holder less for each of `slots`. Raises ValueError for a slot that nobody holds."""
        for slot in slots:
            self._require_held(slot)
            self._holders[slot] -= 1

    def _require_held(self, slot: int) -> None:
        if not 0 <= slot < len(self._holders) or not self._holders[slot]:
            raise ValueError(f"slots: nobody holds slot {slot}")


def _first_run(free: list[int], count: int) -> list[int]:
    """The first `count` consecutive numbers of the rising list `free`, or nothing."""
    for start in range(len(free) - count + 1):
        if not count or free[start + count - 1] - free[start] == count - 1:
            return free[start : start + count]
    return []
