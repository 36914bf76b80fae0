"""The free slots of a pool as maximal runs (start, length), on the host.

Run-aware allocation needs to know where runs lie, and a free list on a device cannot be asked
without waiting for it. So runs are kept here, as Python integers: which slots an allocation gets is
known before any device sees them, and is the same on every rank that did the same operations, since
nothing but these operations decides.

A run is found by its start, by its end (to merge with what is freed beside it), and by its length:
one set for each short length, most recently freed first, and one list by (length, start) for the
others, of which a pool has at most size / SHORT.
"""

from __future__ import annotations

import bisect

__all__ = ["SHORT", "FreeRuns", "Run"]

Run = tuple[int, int]
"""start, length."""

SHORT = 64
"""Lengths below this have a set of their own each."""


class FreeRuns:
    """Free slots `first` to `first + count - 1`, until they are taken."""

    def __init__(self, first: int, count: int) -> None:
        self.free = 0
        """Slots in all runs."""
        self._length: dict[int, int] = {}  # of the run that starts there
        self._start: dict[int, int] = {}  # of the run that ends before there
        self._short: list[dict[int, None]] = [{} for _ in range(SHORT)]
        self._there = 0  # bit n: whether _short[n] has a run
        self._long: list[tuple[int, int]] = []
        if count:
            self.give(first, count)

    def __len__(self) -> int:
        """Runs."""
        return len(self._length)

    def runs(self) -> list[Run]:
        """By start."""
        return sorted(self._length.items())

    def copy(self) -> FreeRuns:
        """The same free slots, to try on what may be taken."""
        other = FreeRuns(0, 0)
        for run in self.runs():
            other.give(*run)
        return other

    def length_at(self, start: int) -> int:
        """Of the run that starts at `start`; 0 where none does."""
        return self._length.get(start, 0)

    def length_before(self, end: int) -> int:
        """Of the run that ends before slot `end`; 0 where none does."""
        return end - self._start.get(end, end)

    def longest(self) -> int:
        """Slots of the longest run."""
        return self._length[self._longest()] if self.free else 0

    def shortest_of(self, count: int) -> int | None:
        """Where the shortest run of `count` slots or more starts; None where there is none."""
        if count < SHORT and (there := self._there >> count):
            length = count + (there & -there).bit_length() - 1
            return next(reversed(self._short[length]))
        at = bisect.bisect_left(self._long, (count, 0))
        return self._long[at][1] if at < len(self._long) else None

    def give(self, start: int, length: int) -> None:
        """`length` slots from `start` are free from now on. ValueError where one end is already.

        A run freed twice is told apart where it touches the start or the end of a free one; to look
        at every slot would make freeing as dear as the slots are many.
        """
        if length < 1 or start in self._length or start + length in self._start:
            raise ValueError(f"{length} slots from {start} are free already, or none")
        self.free += length
        if (before := self._start.get(start)) is not None:
            length += start - before
            start = before
            self._remove(before)
        if start + length in self._length:
            after = start + length
            length += self._length[after]
            self._remove(after)
        self._insert(start, length)

    def take(self, count: int) -> list[Run]:
        """`count` slots: from the shortest run that has them, else the longest runs, whole.

        Raises ValueError where fewer are free; then nothing is taken.
        """
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} slots of {self.free}")
        taken: list[Run] = []
        while count:
            if (fits := self.shortest_of(count)) is not None:
                taken.append(self._cut(fits, count))
                break
            longest = self._longest()
            taken.append(self._cut(longest, self._length[longest]))
            count -= taken[-1][1]
        return taken

    def take_run(self, count: int) -> Run | None:
        """`count` slots in one run, the shortest that has them; None where there is none."""
        fits = self.shortest_of(count)
        return None if fits is None else self._cut(fits, count)

    def take_longest(self, most: int) -> Run | None:
        """The beginning of the longest run, no more than `most`; None where nothing is free."""
        if not self.free or most < 1:
            return None
        longest = self._longest()
        return self._cut(longest, min(most, self._length[longest]))

    def take_at(self, start: int, most: int) -> int:
        """As many slots from `start` on as are free there, at most `most`; 0 where no run starts.

        For a request whose last slot is `start - 1`: a free slot after one in use begins a run.
        """
        length = min(self._length.get(start, 0), most)
        if length > 0:
            self._cut(start, length)
        return max(length, 0)

    def claim(self, start: int, count: int) -> None:
        """Take these slots; ValueError where they are not at one end of a free run."""
        if count < 1:
            raise ValueError(f"{count} slots from {start}")
        if self.length_at(start) >= count:
            self._cut(start, count)
        elif self.length_before(start + count) >= count:
            whole = self._start[start + count]
            self._remove(whole)
            self._insert(whole, start - whole)
            self.free -= count
        else:
            raise ValueError(f"{count} slots from {start} are not at one end of a free run")

    def _longest(self) -> int:
        if self._long:
            return self._long[-1][1]
        return next(reversed(self._short[self._there.bit_length() - 1]))

    def _cut(self, start: int, count: int) -> Run:
        """Take the first `count` slots of the run at `start`."""
        length = self._length[start]
        self._remove(start)
        if length > count:
            self._insert(start + count, length - count)
        self.free -= count
        return start, count

    def _insert(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        if length < SHORT:
            self._short[length][start] = None
            self._there |= 1 << length
        else:
            bisect.insort(self._long, (length, start))

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start[start + length]
        if length < SHORT:
            del self._short[length][start]
            if not self._short[length]:
                self._there &= ~(1 << length)
        else:
            del self._long[bisect.bisect_left(self._long, (length, start))]
