"""Which rows of a KV pool to move, so that the requests that read them are in fewer runs.

What may move is given as parts: the slots that one holder has, in prefix order. A radix node is a
part that several requests may read; what a request holds alone is a part behind it. So parts form
the tree that the prefix cache is, and a run that goes from one part to the next is one run.

    runs of a reader    1 + the places along its prefix where the next slot is not the next number
    runs of all         the sum over readers: a break inside a shared part counts once for each

A move takes neighbouring pieces of one part (a piece is as much as lies in one run) to one run of
slots that are free now. So no move overwrites a source, and moves may be copied in any order. The
old slots are not free for later moves of the same plan: they are released after all is updated.

Moves are chosen one by one, that of the most runs removed per row first. Each is the best there is
at that time; together they need not be, as one may take the room of two others. Only the order of
the parts and numbers decide, so that ranks with equal parts make equal plans.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from kdtree_engine.fragmentation.free_runs import FreeRuns, Run

__all__ = ["WIDEST", "Move", "Part", "Plan", "plan_moves", "total_runs"]

WIDEST = 32
"""Most pieces of one move. One more removes at most 1/32 more runs, and costs time to look at."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one holder has. runs: of its slots in prefix order, not empty; touching runs are one.

    readers: live requests that have it in their prefix; of a part that none has, nothing moves.
    after: the number of the part before it in their prefix, a lower one; None at the beginning.
    room: slots that should be free behind its end, as its request grows there; a wish.
    """

    runs: Sequence[Run]
    readers: int
    after: int | None = None
    room: int = 0


@dataclasses.dataclass(frozen=True)
class Move:
    """Rows `first` to `first + count - 1` of part `part` go to `count` slots from `to`."""

    part: int
    first: int
    count: int
    to: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """removed: runs, summed over readers. rows: that are copied."""

    moves: Sequence[Move] = ()
    removed: int = 0
    rows: int = 0


def total_runs(parts: Sequence[Part]) -> int:
    """Runs of all readers, summed: what a plan removes some of."""
    total = 0
    for part in parts:
        end = None if part.after is None else sum(parts[part.after].runs[-1])
        for start, length in part.runs:
            total += part.readers * (start != end)
            end = start + length
    return total


def plan_moves(parts: Sequence[Part], free: FreeRuns, budget: int) -> Plan:
    """Moves of at most `budget` rows in all into runs of `free`, which is not changed.

    Each move's slots are one end of a free run once those before it are taken: `FreeRuns.claim`.
    Raises ValueError for a part that comes before the part it is after, or has no rows.
    """
    for number, part in enumerate(parts):
        if not part.runs or not (part.after is None or 0 <= part.after < number):
            raise ValueError(f"part {number} is empty or after a later one")
    planner = _Planner(parts, free.copy(), budget)
    chosen: list[_Found] = []
    while (found := planner.best()) is not None:
        planner.apply(found)
        chosen.append(found)
    return Plan(
        tuple(found.move for found in chosen),
        sum(found.gain for found in chosen),
        budget - planner.budget,
    )


@dataclasses.dataclass(slots=True)
class _Piece:
    """`length` rows from `start` on. A moved one stays: it is not at its source yet to move on."""

    start: int
    length: int
    moved: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A move of the pieces `low` to `high - 1` of its part that removes `gain` runs."""

    move: Move
    gain: int
    low: int
    high: int

    @property
    def key(self) -> tuple[float, int, int, int, int]:
        """The lowest is the best: runs per row, then runs, then where it comes first."""
        move = self.move
        return -self.gain / move.count, -self.gain, move.part, self.low, move.to


class _Planner:
    """The parts as they will be, and the free runs and the rows of the budget that are left."""

    def __init__(self, parts: Sequence[Part], free: FreeRuns, budget: int) -> None:
        self.parts = parts
        self.free = free
        self.budget = budget
        self.pieces = [[_Piece(*run) for run in part.runs] for part in parts]
        self.behind: list[list[int]] = [[] for _ in parts]
        for number, part in enumerate(parts):
            if part.after is not None and part.readers:
                self.behind[part.after].append(number)
        self.changed = [0] * len(parts)
        self.heap: list[tuple[tuple[float, int, int, int, int], int, _Found]] = []
        for number in range(len(parts)):
            self.look(number)

    def best(self) -> _Found | None:
        """The best move that the budget has rows for; None where none removes a run."""
        while self.heap:
            _, changed, found = heapq.heappop(self.heap)
            number, move = found.move.part, found.move
            if changed != self.changed[number]:
                continue  # it was looked at since
            # Free runs and the budget only get less, so what still fits is still the best.
            if move.count <= self.budget and self.fits(move.to, move.count):
                return found
            self.look(number)
        return None

    def apply(self, found: _Found) -> None:
        """Take the free slots, and look anew at the parts whose ends or neighbours changed."""
        move = found.move
        self.free.claim(move.to, move.count)
        self.budget -= move.count
        pieces = self.pieces[move.part]
        pieces[found.low : found.high] = [_Piece(move.to, move.count, moved=True)]
        after = self.parts[move.part].after
        for number in (move.part, *([] if after is None else [after]), *self.behind[move.part]):
            self.look(number)

    def look(self, number: int) -> None:
        """Find the best move of one part."""
        self.changed[number] += 1
        found = min(self.moves(number), key=lambda one: one.key, default=None)
        if found is not None:
            heapq.heappush(self.heap, (found.key, self.changed[number], found))

    def moves(self, number: int) -> Iterator[_Found]:
        """Those that remove runs, of windows of pieces that did not move yet."""
        part, pieces = self.parts[number], self.pieces[number]
        weight = part.readers
        if not weight:
            return
        most = min(self.budget, self.free.longest())
        done = 0
        for low, first in enumerate(pieces):
            left = pieces[low - 1].end if low else self.end_before(number)
            done_before = done
            done += first.length
            rows = inner = 0
            for high in range(low + 1, min(low + WIDEST, len(pieces)) + 1):
                last = pieces[high - 1]
                rows += last.length
                if last.moved or rows > most:
                    break
                inner += weight * (high - 1 > low and pieces[high - 2].end != last.start)
                followers = self.followers(number, high)
                now = weight * (left == first.start)
                now += sum(each for start, each in followers if start == last.end)
                room = part.room if high == len(pieces) else 0
                for to in self.places(left, followers, rows, room, anywhere=inner > now):
                    gain = inner - now + weight * (left == to)
                    gain += sum(each for start, each in followers if start == to + rows)
                    if gain > 0:
                        yield _Found(Move(number, done_before, rows, to), gain, low, high)

    def places(
        self,
        left: int | None,
        followers: Sequence[tuple[int, int]],
        rows: int,
        room: int,
        *,
        anywhere: bool,
    ) -> Iterator[int]:
        """Where `rows` would be behind what precedes them, before what follows, or in one run."""
        if left is not None and self.free.length_at(left) >= rows:
            yield left
        for start, _ in followers:
            if self.free.length_before(start) >= rows:
                yield start - rows
        if anywhere:
            at = self.free.shortest_of(rows + room)
            at = self.free.shortest_of(rows) if at is None else at
            if at is not None:
                yield at

    def end_before(self, number: int) -> int | None:
        """The slot behind what precedes a part."""
        after = self.parts[number].after
        return None if after is None else self.pieces[after][-1].end

    def followers(self, number: int, high: int) -> list[tuple[int, int]]:
        """The slots that follow the pieces before `high`, each with its readers."""
        pieces = self.pieces[number]
        if high < len(pieces):
            return [(pieces[high].start, self.parts[number].readers)]
        return [
            (self.pieces[each][0].start, self.parts[each].readers) for each in self.behind[number]
        ]

    def fits(self, to: int, count: int) -> bool:
        return self.free.length_at(to) >= count or self.free.length_before(to + count) >= count
