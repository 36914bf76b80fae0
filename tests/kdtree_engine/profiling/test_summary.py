"""Figures of small traces that can be checked by hand."""

from __future__ import annotations

import pathlib
import random

import pytest
from traces import GEMM, NORM, REDUCE, VERIFY, Trace, two_rounds

from kdtree_engine.errors import ConfigError
from kdtree_engine.profiling.host import ELSEWHERE
from kdtree_engine.profiling.summary import Profile, profile


def by_class(found: Profile) -> dict[str, float]:
    return {one.name: one.us for one in found.classes}


def test_a_step_is_shared_out_among_what_runs_and_what_the_gpu_waits_for(
    tmp_path: pathlib.Path,
) -> None:
    found = profile([two_rounds().write(tmp_path / "trace.json")])
    assert by_class(found) == pytest.approx(
        {
            "verify attention": 90,  # 80 alone, and half of 20 beside the all-reduce
            "communication": 10,
            "dense GEMM": 30,
            "tree build": 10,
            "unknown": 10,
            "host scheduling": 25,  # 140..160 and 190..195
            "idle gaps": 25,  # 100..110, 160..170 and 195..200
        }
    )
    (rank,) = found.ranks
    assert (rank.steps, rank.told_by, rank.left_out) == (2, "ranges", 0)
    assert (rank.step_us, rank.median_us, rank.longest_us) == (200, 200, 200)
    assert rank.busy_us == pytest.approx(150)
    assert rank.outside_us == 100  # the third round's
    assert sum(one.share for one in found.classes) == pytest.approx(1)


def test_the_wait_for_the_host_is_told_by_what_the_host_did(tmp_path: pathlib.Path) -> None:
    trace = two_rounds()  # the GPU waits for the host at 140..160 and 190..195
    for at in (1000, 1200):
        trace.span("scheduler.process_batch_result", at + 100, at + 152)
        trace.span("scheduler.run_batch", at + 155, at + 193)
    found = profile([trace.write(tmp_path / "trace.json")])
    assert {one.name: one.us for one in found.host} == pytest.approx(
        {
            "scheduler.process_batch_result": 12,
            "scheduler.run_batch": 5 + 3,
            ELSEWHERE: 3 + 2,
        }
    )
    assert sum(one.us for one in found.host) == pytest.approx(by_class(found)["host scheduling"])


def test_durations_are_also_summed_as_they_are(tmp_path: pathlib.Path) -> None:
    found = profile([two_rounds().write(tmp_path / "trace.json")])
    sums = {one.name: (one.kernel_us, one.count) for one in found.classes}
    assert sums["verify attention"] == (100, 1)
    assert sums["communication"] == (20, 1)
    assert [(one.name, one.count) for one in found.unknown] == [("mystery_kernel", 1)]
    assert found.kernels[0].name == VERIFY


def test_only_copies_have_bytes(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.copy(0, 10, 2_000_000)
    trace.kernel(GEMM, 10, 10)
    found = profile([trace.write(tmp_path / "trace.json")])
    rates = {one.name: one.gb_s for one in found.classes}
    assert rates == {"memory copies": pytest.approx(200), "dense GEMM": None}


def test_ranks_are_files_or_parts_of_a_merged_one_and_are_averaged(tmp_path: pathlib.Path) -> None:
    slow, fast = two_rounds(reduce_us=40), two_rounds(reduce_us=20)
    found = profile(
        [
            fast.write(tmp_path / "1764-TP-0.trace.json.gz"),
            slow.write(tmp_path / "1764-TP-1.trace.json.gz"),
        ]
    )
    assert [rank.rank for rank in found.ranks] == ["TP0", "TP1"]
    assert by_class(found)["communication"] == pytest.approx((10 + 20) / 2)
    merged = Trace()
    for prefix, reduce_us in (("[TP00]", 20.0), ("[TP01]", 40.0)):
        merged.events += two_rounds(prefix, reduce_us).events
    again = profile([merged.write(tmp_path / "merged.json", bare=True)])
    assert [rank.rank for rank in again.ranks] == ["TP00", "TP01"]
    assert by_class(again) == pytest.approx(by_class(found))


def test_whatever_overlaps_the_classes_add_up_to_the_step(tmp_path: pathlib.Path) -> None:
    """Drawn traces, with kernels of no length, without launches and across the edges of steps."""
    draw = random.Random(1)
    names = (VERIFY, GEMM, NORM, REDUCE, "mystery_kernel")
    for number in range(40):
        trace = Trace()
        for step in range(draw.randrange(2, 5)):
            trace.span("step[VERIFY bs=1]", 100 * step, 100 * step + 20)
            trace.kernel(VERIFY, 100 * step + 30, draw.randrange(9), trace.launch(100 * step + 10))
        for _ in range(draw.randrange(40)):
            at = draw.randrange(350)
            launch = trace.launch(max(0, at - draw.randrange(40)), thread=2)
            known = draw.random() < 0.8
            trace.kernel(
                draw.choice(names), at, draw.randrange(30), launch if known else -1, at % 3
            )
        found = profile([trace.write(tmp_path / f"{number}.json")])
        (rank,) = found.ranks
        assert rank.told_by == "ranges"
        assert sum(one.us for one in rank.classes) == pytest.approx(rank.step_us)
        assert rank.step_us == pytest.approx(100)
        total = sum(event["dur"] for event in trace.events if event["cat"] == "kernel")
        inside = rank.steps * sum(one.kernel_us for one in rank.classes)
        assert inside + rank.outside_us == pytest.approx(total)


def test_a_trace_without_a_gpu_says_so(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.span("step[DECODE bs=1]", 0, 10)
    with pytest.raises(ConfigError, match="no activity of a GPU"):
        profile([trace.write(tmp_path / "cpu.json")])


def test_a_file_that_is_named_twice_is_no_second_rank(tmp_path: pathlib.Path) -> None:
    path = two_rounds().write(tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="is named twice"):
        profile([path, tmp_path / "." / "trace.json"])
    (link := tmp_path / "other.json").symlink_to(path)
    with pytest.raises(ConfigError, match="are one file"):
        profile([path, link])


def test_two_files_of_one_rank_are_no_two_ranks(tmp_path: pathlib.Path) -> None:
    """Of two loads, say: their mean would be of neither."""
    one = two_rounds().write(tmp_path / "1764-TP-0.trace.json")
    other = two_rounds().write(tmp_path / "1765-TP-0.trace.json")
    with pytest.raises(ConfigError, match=r"1764-TP-0\S+ and 1765-TP-0\S+ are both of TP0"):
        profile([one, other])
    merged = two_rounds("[TP00]").write(tmp_path / "merged.json", bare=True)
    with pytest.raises(ConfigError, match="are both of TP00"):
        profile([one, merged])
