"""Bytes of NCCL's collectives by its arguments, and which rank waited for which, by hand."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from traces import REDUCE, one_of_two_ranks

from kdtree_engine.profiling.collectives import link_bytes, waits
from kdtree_engine.profiling.summary import Profile, profile


def arguments(name: str, given: int, made: int, **changed: Any) -> dict[str, Any]:
    return {
        **{"Collective name": name, "In msg nelems": given, "Out msg nelems": made},
        **{"Group size": 8, "dtype": "BFloat16"},
        **changed,
    }


@pytest.mark.parametrize(
    ("name", "given", "made", "expected"),
    [
        ("allreduce", 1000, 1000, 3500),  # 2,000 bytes, 2 * 7 / 8 of them
        ("_allgather_base", 1000, 8000, 14_000),  # 7 / 8 of 16,000
        ("allgather_into_tensor_coalesced", 1000, 8000, 14_000),
        ("_reduce_scatter_base", 8000, 1000, 14_000),
        ("all_to_allv", 8000, 7000, 14_000),
        ("broadcast", 1000, 1000, 2000),
        ("send", 1000, 0, 2000),
        ("barrier", 1, 1, 0),
        ("a new one", 1000, 1000, 0),
    ],
)
def test_what_a_rank_sends(name: str, given: int, made: int, expected: int) -> None:
    assert link_bytes(arguments(name, given, made)) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "Quaternion"},
        {"dtype": None},
        {"Group size": 1},
        {"Group size": "8"},
        {"In msg nelems": -1},
        {"In msg nelems": 10**400},
        {"In msg nelems": True},
    ],
)
def test_arguments_that_say_nothing_count_nothing(changed: dict[str, Any]) -> None:
    assert link_bytes(arguments("allreduce", 1000, 1000, **changed)) == 0


def test_a_float_takes_four_bytes() -> None:
    assert link_bytes(arguments("allreduce", 1000, 1000, dtype="Float")) == 7000


def two_ranks(folder: pathlib.Path, *, told: bool = True) -> Profile:
    return profile(
        [
            one_of_two_ranks(rank, told=told).write(folder / f"1764-TP-{rank}.trace.json")
            for rank in (0, 1)
        ]
    )


def test_the_rank_that_comes_last_waits_least(tmp_path: pathlib.Path) -> None:
    """Rank 0 waits 20 us in the first all-reduce of a step, rank 1 two in the second."""
    first, second = two_ranks(tmp_path).ranks
    assert (first.rank, second.rank) == ("TP0", "TP1")
    assert (first.steps, first.step_us) == (second.steps, second.step_us) == (2, 100)
    assert (first.wait_us, second.wait_us) == (20, 2)
    reduced = [rank.class_of("communication") for rank in (first, second)]
    assert [one.kernel_us for one in reduced if one] == [40, 22]


def test_bytes_of_collectives_are_of_a_step_and_of_the_kernels_that_tell_them(
    tmp_path: pathlib.Path,
) -> None:
    found = two_ranks(tmp_path)
    assert found.wait_us == 11
    (one,) = (one for one in found.classes if one.name == "communication")
    assert (one.count, one.counted) == (2, 2)
    assert one.bytes == 2 * 18_432  # two ranks: 2 * 1 / 2 of a message
    assert one.gb_s == pytest.approx(2 * 18_432 / 31e3)
    (without,) = (
        one for one in two_ranks(tmp_path, told=False).classes if one.name == "communication"
    )
    assert (without.count, without.counted, without.bytes, without.gb_s) == (2, 0, 0, None)


STEPS = [[("reduce", 5.0), ("gather", 9.0)], [("reduce", 3.0)]]
OTHER = [[("reduce", 6.0), ("gather", 2.0)], [("reduce", 3.0)]]


def test_waits_by_hand() -> None:
    assert waits(["TP0", "TP1"], [STEPS, OTHER]) == [7, 1]
    assert waits(["TP0", "TP1", "TP2"], [STEPS, OTHER, OTHER]) == [7, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (["TP0"], [STEPS]),
        (["TP0", "TP1"], [STEPS, STEPS[:1]]),
        (["TP0", "TP1"], [STEPS, [STEPS[0][:1], STEPS[1]]]),
        (["TP0", "TP1"], [STEPS, [[("reduce", 5.0), (REDUCE, 9.0)], STEPS[1]]]),
        (["TP0-DP0", "TP1-DP1"], [STEPS, OTHER]),
        (["TP0", "TP1"], [[[]], [[]]]),
        (["TP0-PP0", "TP0-PP1"], [STEPS, OTHER]),
    ],
)
def test_ranks_that_do_not_meet_alike_are_not_compared(ranks: list[str], told: list[Any]) -> None:
    assert waits(ranks, told) == [None] * len(ranks)


def test_stages_of_a_pipeline_are_compared_each_for_itself() -> None:
    ranks = ["TP0-PP0", "TP1-PP0", "TP0-PP1", "TP1-PP1"]
    assert waits(ranks, [STEPS, OTHER, STEPS, STEPS]) == [7, 1, 0, 0]
