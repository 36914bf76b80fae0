"""What the report shows of a service under load."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from kept_evidence import CPU, read

from phases.bench_load import LoadBench, Plan, _document
from phases.load_client import MEASURED, TOO_MANY, Tick
from phases.load_point import Point
from phases.reporting.load import load_blocks
from phases.reporting.model import Block, Missing, Table, Tone


def point(**changed: Any) -> Point:
    """16 requests in flight for two seconds, a token each 10 ms in chunks of four."""
    found = Point("kdtree_mla-9", 1024, 16, 0.0, 64, **changed)
    tick = Tick(2.0, MEASURED, seconds=2.0, tokens=200, chunks=50, answers=5)
    for _ in range(50):
        tick.chunk_gap.add(0.04)
        tick.inter_token.add(0.01, 4)
    tick.first_token.add(0.2)
    tick.forms.append((0, (1, 2, 3)))
    found.add(tick)
    return found


def written(bench: LoadBench) -> dict[str, Any]:
    return _document(bench, {"machine": CPU.as_json(), "revision": "e" * 40})


@pytest.fixture
def bench() -> LoadBench:
    plan = Plan((1024,), concurrency=(16,))
    found = LoadBench(plan, "cpu", 9, False, ("kdtree_mla-9",), 0.1)
    found.points.append(point())
    return found


def blocks(folder: pathlib.Path, document: dict[str, Any]) -> list[Block]:
    (folder / "serve").mkdir(exist_ok=True)
    (folder / "serve/cpu-load.json").write_text(json.dumps(document))
    return load_blocks(read(folder), "serve")


def row(folder: pathlib.Path, document: dict[str, Any]) -> tuple[Any, ...]:
    (table,) = blocks(folder, document)
    assert isinstance(table, Table)
    (cells,) = table.rows
    return cells


def test_a_point_is_a_row_with_its_percentiles(tmp_path: pathlib.Path, bench: LoadBench) -> None:
    cells = row(tmp_path, written(bench))
    assert [cell.text for cell in cells[:8]] == [
        *("kdtree_mla-9", "16 in flight", "1,024", "100", "200 / 200"),
        *("10.0 / 10.0", "40.0 / 40.0", "5"),
    ]
    assert (cells[8].text, cells[8].tone) == ("not compared", Tone.WARN)
    (table,) = blocks(tmp_path, written(bench))
    assert isinstance(table, Table)
    assert table.source is not None
    assert table.source.where == "CPU"


@pytest.mark.parametrize(
    ("changed", "said", "tone"),
    [
        ({"answers_judged": 3}, "3 equal", Tone.GOOD),
        (
            {"answers_judged": 3, "differences": [{"near_tie": True}]},
            "1 near-ties of 3",
            Tone.PLAIN,
        ),
        (
            {"answers_judged": 3, "differences": [{"near_tie": False}]},
            "1 of 3 different answers wrong",
            Tone.BAD,
        ),
        ({"errors": {"short": 2}}, "failed: 2 short", Tone.BAD),
        ({"ended_early": "stopped"}, "ended early: stopped", Tone.BAD),
        ({"right": False}, "not right", Tone.BAD),
    ],
)
def test_what_answers_are_worth(
    tmp_path: pathlib.Path, bench: LoadBench, changed: dict[str, Any], said: str, tone: Tone
) -> None:
    document = written(bench)
    document["points"][0] |= changed | {"answers_not_judged": {TOO_MANY: 2}}
    cell = row(tmp_path, document)[8]
    assert (cell.text, cell.tone, cell.note) == (said, tone, "2 not judged")


def test_servers_that_failed_and_files_without_points_are_named(
    tmp_path: pathlib.Path, bench: LoadBench
) -> None:
    bench.points.clear()
    (empty,) = blocks(tmp_path, written(bench))
    assert isinstance(empty, Missing)
    assert empty.why == "no load was measured in it"
    bench.failed["triton-9"] = "trace\nout of memory"
    (failed,) = blocks(tmp_path, written(bench))
    assert isinstance(failed, Missing)
    assert failed.why == "it could not be measured: out of memory"
    (broken,) = blocks(tmp_path, {"kind": "load", "right": "perhaps"})
    assert isinstance(broken, Missing)
    assert broken.label == "Not shown"
