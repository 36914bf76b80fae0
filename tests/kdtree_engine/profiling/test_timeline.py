"""From a trace's events to what each GPU did, and who launched it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from traces import GEMM, NORM, Trace, two_rounds

from kdtree_engine.errors import ConfigError
from kdtree_engine.profiling.rules import load_rules
from kdtree_engine.profiling.timeline import Timeline, read_timelines


def timelines(trace: Trace, path: pathlib.Path) -> list[Timeline]:
    return read_timelines(trace.write(path), load_rules())


def test_activities_come_in_order_of_time_whatever_the_order_of_the_file(
    tmp_path: pathlib.Path,
) -> None:
    trace = Trace()
    trace.kernel(NORM, 20, 5)
    trace.kernel(GEMM, 10, 5, stream=9)
    (found,) = timelines(trace, tmp_path / "trace.json")
    assert [(one.begin, one.end, one.name) for one in found] == [(10, 15, GEMM), (20, 25, NORM)]


def test_a_launch_knows_its_thread_and_whether_it_was_a_graph(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.span("step[VERIFY bs=1]", 0, 100, thread=1)
    for launch in (
        trace.launch(10, graph=True),
        trace.launch(10, graph=True, thread=2),
        trace.launch(200),
        -1,
    ):
        trace.kernel(GEMM, 300, 5, launch)
    (found,) = timelines(trace, tmp_path / "trace.json")
    launches = [found.launch(one) for one in found]
    assert [found.stage(launch) for launch in launches] == ["verify", "replay", None, None]
    assert [launch.graph if launch else None for launch in launches] == [True, True, False, None]


@pytest.mark.parametrize(
    ("name", "more", "rank"),
    [
        ("1764500000.5-TP-3-DP-1.trace.json.gz", {}, "TP3-DP1"),
        ("some.json", {"distributedInfo": {"rank": 5}}, "rank 5"),
        ("decode.trace.json", {}, "decode"),
    ],
)
def test_a_rank_is_named_by_its_file_or_by_the_trace(
    tmp_path: pathlib.Path, name: str, more: dict[str, Any], rank: str
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({**more, "traceEvents": two_rounds().events}))
    (found,) = read_timelines(path, load_rules())
    assert found.rank == rank


def test_several_gpus_of_one_process_are_several_timelines(tmp_path: pathlib.Path) -> None:
    trace = Trace("[TP00]")
    trace.kernel(GEMM, 0, 5)
    trace.kernel(GEMM, 3, 5)
    trace.events[1]["args"]["device"] = 1
    found = timelines(trace, tmp_path / "trace.json")
    assert [(one.rank, len(one)) for one in found] == [("TP00 GPU 0", 1), ("TP00 GPU 1", 1)]


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("ts", None, "has a bad event 'nvjet_tst_64x8_64x16_2x1_v_bz_TNT' (no 'ts')"),
        ("dur", None, "(no 'dur')"),
        ("dur", -1, "it lasts from 0.0 to -1.0"),
        ("ts", float("nan"), "it lasts from nan to nan"),
        ("ts", "soon", "could not convert string to float"),
        ("args", {"correlation": "x"}, "invalid literal for int"),
        ("args", {"correlation": float("inf")}, "cannot convert float infinity"),
        ("args", {"bytes": 2**70}, "too big"),
        ("ts", 10**400, "too large"),
        ("ts", 1.7e308, "it lasts from 1.7e+308"),
        ("dur", 1e300, "it lasts from 0.0 to 1e+300"),
    ],
)
def test_an_event_without_its_time_is_one_line_with_its_place(
    tmp_path: pathlib.Path, field: str, value: object, complaint: str
) -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 5)
    if value is None:
        del trace.events[0][field]
    else:
        trace.events[0][field] = value
    path = trace.write(tmp_path / "trace.json")
    with pytest.raises(ConfigError) as caught:
        read_timelines(path, load_rules())
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)
    assert ", line " in str(caught.value)


def test_a_name_cannot_reach_the_terminal_or_break_a_row(tmp_path: pathlib.Path) -> None:
    trace = Trace()
    trace.kernel("a\x1b]0;owned\x07\nfake row\ud800", 0, 5)
    (found,) = timelines(trace, tmp_path / "trace.json")
    assert [one.name for one in found] == ["a?]0;owned??fake row?"]
