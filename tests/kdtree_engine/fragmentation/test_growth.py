"""Requests that grow in place, and 100,000 random operations against a set of slots."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from kdtree_engine.fragmentation.free_runs import FreeRuns, Run
from kdtree_engine.fragmentation.growth import AGE, Growing, Growth


def slots(runs: list[Run]) -> list[int]:
    return [slot for start, length in runs for slot in range(start, start + length)]


def test_growth_stays_in_place() -> None:
    growth = Growth(FreeRuns(1, 1000), chunk=8)
    rows: dict[str, list[int]] = {"a": slots(growth.extend("a", 0, 20))}
    rows["b"] = slots(growth.extend("b", 0, 20))
    for _ in range(40):
        for name, row in rows.items():
            row += slots(growth.extend(name, len(row), 1))
    for row in rows.values():
        breaks = sum(after != before + 1 for before, after in itertools.pairwise(row))
        assert breaks <= 40 / 8
    assert growth.free == 1000 - 120


def test_reserves_are_given_back_before_an_allocation_fails() -> None:
    growth = Growth(FreeRuns(1, 100), chunk=64)
    growth.extend("a", 0, 10)
    assert growth.reserved
    assert growth.free == 90
    assert sorted(slots(growth.take(90))) == list(range(11, 101))
    assert growth.free == growth.reserved == 0


def test_a_reserve_that_no_batch_is_for_goes_back() -> None:
    """Of a request that ended, or left, or was retracted: nobody says which."""
    growth = Growth(FreeRuns(1, 1000), chunk=16)
    growth.extend("ended", 0, 10)
    held = 0
    for batch in range(AGE + AGE // 2):
        growth.step()
        growth.extend_all([("lives", held, 1)])
        held += 1
        if batch < AGE - 2:
            assert (11, 16) in growth.reserves()
    assert (11, 16) not in growth.reserves()
    assert growth.free == 1000 - 10 - held


def test_requests_that_take_turns_keep_their_reserves() -> None:
    """As micro-batches in a pipeline, and prompts in chunks between decode steps, do."""
    growth = Growth(FreeRuns(1, 100_000), chunk=64)
    turns = [[f"r{turn}.{number}" for number in range(4)] for turn in range(4)]
    rows: dict[str, list[int]] = {name: [] for names in turns for name in names}
    for step in range(4 * 256):
        growth.step()
        for name in turns[step % 4]:
            rows[name] += slots(growth.extend_all([(name, len(rows[name]), 1)]))
    for row in rows.values():
        breaks = sum(after != before + 1 for before, after in itertools.pairwise(row))
        assert breaks <= 256 / 64


def test_a_stream_of_single_tokens_reserves_no_more_than_a_few_batches_do() -> None:
    growth = Growth(FreeRuns(1, 100_000), chunk=64)
    for number in range(2000):
        growth.step()
        growth.extend_all([(f"r{number}", 0, 20)])
        growth.runs.give(*growth.runs.take(1)[0])
        assert growth.reserved <= 64 * (AGE + AGE // 2 + 1)
    growth.forget()
    assert growth.reserved == 0
    assert growth.reserves() == []


def test_a_moved_request_grows_where_it_is_now() -> None:
    growth = Growth(FreeRuns(1, 100), chunk=16)
    growth.extend("a", 0, 10)
    assert growth.reserves() == [(11, 16)]
    growth.runs.claim(27, 10)
    growth.moved("a", 37)
    assert growth.reserves() == []
    assert growth.extend("a", 10, 1) == [(37, 1)]


def test_a_batch_gets_its_slots_in_the_order_of_its_requests() -> None:
    """As a verify pass reserves: some want several, some none; a reserve is used, then renewed."""
    growth = Growth(FreeRuns(1, 1000), chunk=8)
    rows = {name: slots(growth.extend(name, 0, 10)) for name in "abc"}
    wanted: list[Growing] = [("a", 10, 3), ("b", 10, 0), ("c", 10, 12)]
    given = slots(growth.extend_all(wanted))
    assert len(given) == 15
    assert given[:3] == list(range(rows["a"][-1] + 1, rows["a"][-1] + 4))
    assert given[3:11] == list(range(rows["c"][-1] + 1, rows["c"][-1] + 9))
    assert slots(growth.extend_all([("b", 10, 1)])) == [rows["b"][-1] + 1]
    assert growth.extend_all([("a", 13, 0)]) == []
    assert growth.free == 1000 - 30 - 16


def test_ranks_that_do_the_same_get_the_same_slots() -> None:
    """Names are what differs least between ranks, and their order in a set is not the same."""

    def rank(names: list[str]) -> list[list[Run]]:
        random_, growth = random.Random(5), Growth(FreeRuns(1, 5000), chunk=16)
        held = dict.fromkeys(range(12), 0)
        given = []
        for _ in range(400):
            number = random_.randrange(12)
            count = random_.randint(0, 9)
            wanted: list[Growing] = [(names[number], held[number], count)]
            held[number] += count
            given.append(growth.extend_all(wanted))
            growth.step()
            if random_.random() < 0.1:
                growth.give_back()
        return given

    assert rank([f"r{n}" for n in range(12)]) == rank([f"{n:x}-{n * 7919}" for n in range(12)])


@pytest.mark.parametrize("chunk", [0, 5, 64])
def test_random_operations_partition_the_pool(chunk: int) -> None:
    seed, size = 20261130 + chunk, 3000
    random_ = random.Random(seed)
    growth = Growth(FreeRuns(1, size), chunk)
    rows: dict[int, list[int]] = {}
    free = set(range(1, size + 1))
    for step in range(34_000):
        act = random_.random()
        if act < 0.55 and rows:
            name = random_.choice(list(rows))
            count = random_.choice((1, 1, 1, 7))
            serves = count <= len(free)
            if serves:
                given = slots(growth.extend(name, len(rows[name]), count))
                rows[name] += given
        elif act < 0.75:
            name, count = step, random_.randint(1, 300)
            serves = count <= len(free)
            if serves:
                rows[name] = given = slots(growth.extend(name, 0, count))
        elif act < 0.95 and rows:
            row = rows.pop(random_.choice(list(rows)))
            random_.shuffle(row)
            for slot in row:
                growth.runs.give(slot, 1)
            free |= set(row)
            given, count = [], 0
        else:
            growth.step()
            given, count = [], 0
        assert len(given) == count or not serves, (seed, step)
        assert set(given) <= free, (seed, step)
        free -= set(given)
        assert growth.free == len(free), (seed, step)
        given, count = [], 0
        if step % 500 == 0:
            growth.give_back()
            assert set(slots(growth.runs.runs())) == free, (seed, step)


def test_an_allocation_of_a_large_churned_pool_is_fast() -> None:
    """4,000,000 slots in 100,000 runs; the gate measures it on its own, this keeps it thinkable."""
    growth = Growth(FreeRuns(1, 0), 64)
    random_ = random.Random(1)
    for start in range(1, 4_000_000, 40):
        growth.runs.give(start, random_.randint(1, 39))
    took = []
    for step in range(2000):
        began = time.perf_counter()
        growth.extend(step % 64, step // 64, 1)
        took.append(time.perf_counter() - began)
    assert sorted(took)[1000] < 50e-6
