"""Slots for requests that grow: in place where that is free, and reserved ahead in chunks.

At page size 1 a decode step takes one slot for each of many requests. Taken from one list, they
interleave: each request's next slot lies as far from its last as there are requests. So a request
gets a chunk at a time, uses it up slot by slot, and gives the rest back.

A reserve is soft: its slots count as free, and all reserves are given back before an allocation
could fail for want of them. So no allocation fails that a plain list would serve, and a reserve
that nobody uses any more goes back with one of the next batches (`step`): requests end, leave, are
retracted, or take turns in pipelines, and none of them says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from kdtree_engine.fragmentation.free_runs import FreeRuns, Run

__all__ = ["AGE", "Growing", "Growth"]

AGE = 16
"""Batches after which a reserve that none of them was for goes back, at the latest half as many
later. More than pipelines have micro-batches in turn, and than prefills come between two steps."""

Growing = tuple[Hashable, int, int]
"""name, tokens held, slots wanted."""


@dataclasses.dataclass(slots=True)
class _Tail:
    """A request with `held` tokens ended before slot `next`; `ahead` slots are reserved there.

    used: the number of the last batch that it was in.
    """

    held: int
    next: int
    ahead: int
    used: int = 0


class Growth:
    """Allocates from `runs` for requests with a name. chunk: slots reserved at a time, or 0."""

    def __init__(self, runs: FreeRuns, chunk: int) -> None:
        if chunk < 0:
            raise ValueError(f"chunks of {chunk} slots")
        self.runs = runs
        self.chunk = chunk
        self.reserved = 0
        """Slots in reserves: neither in `runs` nor in use."""
        self._tails: dict[Hashable, _Tail] = {}
        self._batch = 0

    @property
    def free(self) -> int:
        """Slots that can be allocated: in runs and in reserves."""
        return self.runs.free + self.reserved

    def step(self) -> None:
        """The next batch asks for slots. Reserves that none of the last `AGE` was for go back."""
        self._batch += 1
        if self._batch % (AGE // 2) == 0:
            old = self._batch - AGE
            for name in [name for name, tail in self._tails.items() if tail.used <= old]:
                self._drop(name)

    def take(self, count: int) -> list[Run]:
        """`count` slots for nobody in particular. Raises ValueError where fewer are free."""
        if count > self.runs.free:
            self.give_back()
        return self.runs.take(count)

    def extend(self, name: Hashable, held: int, count: int) -> list[Run]:
        """`count` slots after the `held` tokens of a request; ValueError where fewer are free.

        Its reserve first, then what is free right behind it, then one run with room for the next
        chunk as well, then what there is. A request whose `held` is not what it ended with is not
        the one that the reserve was for, or was moved: it starts anew.
        """
        if count > self.free:
            raise ValueError(f"{count} slots of {self.free}")
        tail = self._tails.get(name)
        if tail is not None and tail.held != held:
            self._drop(name)
            tail = None
        taken: list[Run] = []
        need = count
        if tail is not None:
            used = min(need, tail.ahead)
            tail.ahead -= used
            self.reserved -= used
            if used < need:
                used += self.runs.take_at(tail.next + used, need - used)
            if used:
                taken.append((tail.next, used))
                tail.next += used
                need -= used
        if need:
            taken += self._elsewhere(name, need)
            tail = self._tails[name]
        assert tail is not None
        tail.held = held + count
        tail.used = self._batch
        if not tail.ahead:
            tail.ahead = self.runs.take_at(tail.next, self.chunk)
            self.reserved += tail.ahead
        return taken

    def extend_all(self, wanted: Sequence[Growing]) -> list[Run]:
        """`extend` for each, in order, but for those that want none.

        ValueError where fewer slots are free than all want.
        """
        total = sum(count for _, _, count in wanted)
        if total > self.free:
            raise ValueError(f"{total} slots of {self.free}")
        taken: list[Run] = []
        for name, held, count in wanted:
            tail = self._tails.get(name)
            if not count:  # a verify pass reserves ahead, and not for every request each time
                if tail is not None:
                    tail.used = self._batch
            elif tail is not None and tail.held == held and tail.ahead > count:
                # What nearly every request of a decode batch does, without a call of its own.
                taken.append((tail.next, count))
                tail.held += count
                tail.next += count
                tail.ahead -= count
                tail.used = self._batch
                self.reserved -= count
            else:
                taken += self.extend(name, held, count)
        return taken

    def forget(self) -> None:
        """No request grows any more: nothing is reserved, and nowhere that one ended is known."""
        self.give_back()
        self._tails.clear()

    def reserves(self) -> list[Run]:
        """The reserved slots, request by request."""
        return [(tail.next, tail.ahead) for tail in self._tails.values() if tail.ahead]

    def moved(self, name: Hashable, end: int) -> None:
        """The request's last token is now in slot `end - 1`: there it grows on, if that is free."""
        if (tail := self._tails.get(name)) is not None:
            self._give(tail)
            tail.next = end

    def give_back(self) -> None:
        """Give back every reserve. Where requests ended is kept: they may still grow in place."""
        for tail in self._tails.values():
            self._give(tail)

    def _elsewhere(self, name: Hashable, need: int) -> list[Run]:
        """`need` slots in a new place, with the tail that results. The old reserve is used up."""
        self._drop(name)
        if need > self.runs.free:
            self.give_back()
        room = self.runs.take_run(need + self.chunk)
        if room is None and need <= self.chunk:
            room = self.runs.take_longest(need + self.chunk)
        if room is not None and room[1] >= need:
            start, length = room
            self._tails[name] = _Tail(0, start + need, length - need)
            self.reserved += length - need
            return [(start, need)]
        if room is not None:
            self.runs.give(*room)
        taken = self.runs.take(need)
        self._tails[name] = _Tail(0, sum(taken[-1]), 0)
        return taken

    def _drop(self, name: Hashable) -> None:
        if (tail := self._tails.pop(name, None)) is not None:
            self._give(tail)

    def _give(self, tail: _Tail) -> None:
        if tail.ahead:
            self.runs.give(tail.next, tail.ahead)
            self.reserved -= tail.ahead
            tail.ahead = 0
