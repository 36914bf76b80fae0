"""Which rows are moved: small cases by hand, drawn ones against every single move there is."""

from __future__ import annotations

import fractions
import itertools
import random

import pytest

from kdtree_engine.fragmentation.free_runs import FreeRuns, Run
from kdtree_engine.fragmentation.relocation import Move, Part, Plan, plan_moves, total_runs


def pool(*runs: Run) -> FreeRuns:
    free = FreeRuns(1, 0)
    for run in runs:
        free.give(*run)
    return free


def slots(part: Part) -> list[int]:
    return [slot for start, length in part.runs for slot in range(start, start + length)]


def moved(parts: list[Part], moves: tuple[Move, ...] | list[Move]) -> list[Part]:
    """The parts after the moves, slot by slot."""
    held = [slots(part) for part in parts]
    for move in moves:
        held[move.part][move.first : move.first + move.count] = range(move.to, move.to + move.count)
    return [
        Part([(slot, 1) for slot in each], part.readers, part.after)
        for part, each in zip(parts, held, strict=True)
    ]


def test_runs_are_counted_for_all_readers_and_across_parts() -> None:
    shared = Part([(10, 5), (20, 5)], readers=3)
    assert total_runs([shared]) == 6
    behind, elsewhere = Part([(25, 2)], 1, after=0), Part([(40, 2)], 1, after=0)
    assert total_runs([shared, behind, elsewhere]) == 7


def test_a_piece_goes_behind_what_precedes_it() -> None:
    """One run for one row: better than both pieces for three."""
    part = Part([(10, 2), (50, 1)], readers=1)
    assert plan_moves([part], pool((12, 4), (80, 9)), 100) == Plan((Move(0, 2, 1, 12),), 1, 1)


def test_a_piece_goes_before_what_follows_it() -> None:
    """Into the end of a free run, as the first piece is the shorter one."""
    part = Part([(10, 2), (50, 3)], readers=1)
    assert plan_moves([part], pool((40, 10)), 100) == Plan((Move(0, 0, 2, 48),), 1, 2)


def test_neighbours_go_into_the_shortest_run_that_has_them() -> None:
    part = Part([(10, 2), (20, 2), (30, 2)], readers=1)
    assert plan_moves([part], pool((60, 9), (80, 6)), 100) == Plan((Move(0, 0, 6, 80),), 2, 6)


def test_room_to_grow_is_wished_for_and_not_insisted_on() -> None:
    part = Part([(10, 2), (20, 2)], readers=1, room=4)
    assert plan_moves([part], pool((60, 8), (80, 4)), 100).moves == (Move(0, 0, 4, 60),)
    assert plan_moves([part], pool((80, 4)), 100).moves == (Move(0, 0, 4, 80),)


def test_what_many_read_is_moved_before_what_one_reads() -> None:
    """The budget has rows for one of them."""
    shared, own = Part([(10, 2), (20, 2)], readers=5), Part([(30, 2), (40, 2)], 1, after=0)
    plan = plan_moves([shared, own], pool((60, 4), (70, 4)), 4)
    assert plan == Plan((Move(0, 0, 4, 70),), 5, 4)


def test_a_part_goes_behind_the_part_before_it() -> None:
    shared, own = Part([(10, 8)], readers=2), Part([(40, 3)], 1, after=0)
    assert plan_moves([shared, own], pool((18, 3)), 100) == Plan((Move(1, 0, 3, 18),), 1, 3)


def test_moving_a_part_that_something_follows_in_place_costs_that_run() -> None:
    """Nothing is gained: two pieces would be one, but the reader behind would be torn off."""
    shared, own = Part([(10, 2), (20, 2)], readers=1), Part([(22, 1)], 1, after=0)
    assert plan_moves([shared, own], pool((60, 4)), 100) == Plan()


@pytest.mark.parametrize(
    ("part", "free", "budget"),
    [
        (Part([(10, 2), (20, 2)], readers=0), pool((60, 9)), 100),
        (Part([(10, 2), (20, 2)], readers=1), pool((60, 3)), 100),
        (Part([(10, 2), (20, 2)], readers=1), pool((60, 9)), 3),
        (Part([(10, 4)], readers=1), pool((60, 9)), 100),
    ],
    ids=["nobody reads it", "no run has room", "the budget is short", "it is in one run"],
)
def test_nothing_moves(part: Part, free: FreeRuns, budget: int) -> None:
    assert plan_moves([part], free, budget) == Plan()


def test_a_part_before_the_one_it_is_after_is_refused() -> None:
    with pytest.raises(ValueError, match="part 0"):
        plan_moves([Part([(1, 1)], 1, after=0)], pool(), 1)


def drawn(seed: int, size: int = 24) -> tuple[list[Part], FreeRuns]:
    """A small pool: a tree of parts, and what is left as free runs."""
    random_ = random.Random(seed)
    order = list(range(1, size + 1))
    for _ in range(random_.randint(0, 12)):
        at, to = random_.randrange(size), random_.randrange(size)
        order[at], order[to] = order[to], order[at]
    parts: list[Part] = []
    used = 0
    for number in range(random_.randint(1, 4)):
        count = random_.randint(1, 6)
        after = random_.choice([None, *range(number)])
        held = order[used : used + count]
        used += count
        parts.append(Part([(slot, 1) for slot in held], random_.randint(0, 3), after))
    weighed = [part.readers for part in parts]
    for number in reversed(range(len(parts))):  # whoever reads a part reads those before it
        if (after := parts[number].after) is not None:
            weighed[after] += weighed[number]
    touching = [
        Part(joined(part.runs), readers, part.after)
        for part, readers in zip(parts, weighed, strict=True)
    ]
    return touching, pool(*joined([(slot, 1) for slot in sorted(order[used:])]))


def joined(runs: list[Run] | tuple[Run, ...]) -> list[Run]:
    found: list[Run] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def every_move(parts: list[Part], free: FreeRuns, budget: int) -> list[Move]:
    """Of any rows of any part, pieces or not, to any free slots in a row."""
    found = []
    for number, part in enumerate(parts):
        rows = len(slots(part))
        for first, last in itertools.combinations(range(rows + 1), 2):
            count = last - first
            for start, length in free.runs() if count <= budget and part.readers else ():
                found += [
                    Move(number, first, count, start + by) for by in range(length - count + 1)
                ]
    return found


@pytest.mark.parametrize("seed", range(150))
def test_the_first_move_is_the_best_that_there_is(seed: int) -> None:
    parts, free = drawn(seed)
    budget = 2 + seed % 7
    before = total_runs(parts)
    rates = [
        fractions.Fraction(before - total_runs(moved(parts, [move])), move.count)
        for move in every_move(parts, free, budget)
    ]
    best = max(rates, default=fractions.Fraction(0))
    plan = plan_moves(parts, free, budget)
    if not plan.moves:
        assert best <= 0
        return
    first = plan.moves[0]
    assert fractions.Fraction(before - total_runs(moved(parts, [first])), first.count) == best


@pytest.mark.parametrize("seed", range(150))
def test_a_plan_keeps_its_word(seed: int) -> None:
    parts, free = drawn(seed, size=60)
    budget = 1 + seed % 12
    before, was_free = total_runs(parts), free.runs()
    plan = plan_moves(parts, free, budget)
    assert free.runs() == was_free
    assert plan == plan_moves(parts, free.copy(), budget)
    assert plan.rows == sum(move.count for move in plan.moves) <= budget
    assert plan.removed == before - total_runs(moved(parts, plan.moves))
    sources = [
        slots(parts[move.part])[move.first + row]
        for move in plan.moves
        for row in range(move.count)
    ]
    destinations = [move.to + row for move in plan.moves for row in range(move.count)]
    assert len({*sources, *destinations}) == 2 * plan.rows
    for move in plan.moves:
        free.claim(move.to, move.count)  # raises where they are not free
