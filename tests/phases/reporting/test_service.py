"""Speeds of servers, from kept benchmarks and from gates that timed servers."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from kept_evidence import H200, blocked, ended, keep, read

from phases.gate import Unit
from phases.reporting.model import Lines, Missing, Standing
from phases.reporting.service import service_headline, service_section, speed_runs


def server(name: str, *speeds: tuple[int, float, float, float]) -> dict[str, Any]:
    keys = ("length", "tokens_per_second", "accept_length", "step_us")
    return {"name": name, "speeds": [dict(zip(keys, one, strict=True)) for one in speeds]}


BENCH = {
    "graphs": True,
    "layers": 4,
    "nodes": 9,
    "right": True,
    "started": "2026-11-30T02:20:58+00:00",
    "servers": [
        server("kdtree_mla-9", (1024, 3000.0, 8.0, 2000.0), (65536, 4000.0, 8.0, 2000.0)),
        server("triton-plain", (1024, 900.0, 0.0, 0.0), (65536, 800.0, 0.0, 0.0)),
        server("triton-9", (1024, 1000.0, 4.0, 3000.0), (65536, 200.0, 8.0, 40000.0)),
    ],
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve/h200.json").write_text(json.dumps(BENCH))
    return tmp_path


def test_a_benchmark_is_a_plot_with_its_table(folder: pathlib.Path) -> None:
    plot = service_section(read(folder)).blocks[0]
    assert isinstance(plot, Lines)
    assert [line.name for line in plot.lines] == [
        *("kernel, trees of 9", "Triton, no speculation", "Triton, trees of 9"),
    ]
    rows = [[cell.text for cell in row] for row in plot.table().rows]
    assert rows[2] == ["1,024", "Triton, trees of 9", "1,000", "3.00x", "1.50x", "4.00", "3.00"]
    assert rows[-1] == ["65,536", "Triton, trees of 9", "200", "20.0x", "20.0x", "8.00", "40.0"]


def test_the_headline_is_against_tritons_trees_at_the_longest_context(folder: pathlib.Path) -> None:
    headline = service_headline(read(folder))
    assert headline is not None
    assert headline.figure == "20.0x"
    assert headline.what == "Triton's trees in the service, at 65,536 tokens"


def test_a_gate_that_timed_servers_is_shown_with_its_failure(tmp_path: pathlib.Path) -> None:
    figures = (
        ("times triton at 1024", 1.2, Unit.SPEEDUP),
        ("kdtree_mla-9 at 1024", 770.0, Unit.TOKENS_PER_SECOND),
        ("kdtree_mla-9 step at 1024", 11500.0, Unit.MICROSECONDS),
        ("triton-9 at 1024", 618.0, Unit.TOKENS_PER_SECOND),
        ("triton-9 accepts at 1024", 3.9, Unit.RATIO),
    )
    entry = ended("eager-speed", figures, machine=H200, failed="too slow", stale=True)
    keep(tmp_path, "h200", entry, machine=H200)
    ((run,), _) = speed_runs(read(tmp_path))
    assert run.name == "gate eager-speed"
    assert run.times("triton-", 1024) == pytest.approx(770 / 618)
    assert run.times("triton-plain", 1024) is None
    assert (run.source.standing, run.source.remark) == (Standing.STALE, "the gate failed")


def test_a_benchmark_of_another_kind_is_named(folder: pathlib.Path) -> None:
    (folder / "serve/odd.json").write_text('{"version": 1, "kind": "odd"}')
    runs, (gap,) = speed_runs(read(folder))
    assert len(runs) == 1
    assert gap.what.endswith("odd.json")


def test_a_benchmark_with_wrong_tokens_says_so(folder: pathlib.Path) -> None:
    (folder / "serve/h200.json").write_text(json.dumps(BENCH | {"right": False}))
    ((run,), _) = speed_runs(read(folder))
    assert "not every server gave the right tokens" in run.name
    assert service_headline(read(folder)) is None


def test_a_benchmark_that_timed_no_server_is_named(folder: pathlib.Path) -> None:
    (folder / "serve/h200.json").write_text(json.dumps(BENCH | {"servers": [server("triton-9")]}))
    runs, (gap,) = speed_runs(read(folder))
    assert not runs
    assert (gap.what.rpartition("/")[2], gap.why) == ("h200.json", "no server was timed in it")


def test_without_figures_the_speed_gates_say_why(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "cpu", blocked("graph-speed", "no server here"))
    gaps = [one for one in service_section(read(tmp_path)).blocks if isinstance(one, Missing)]
    assert gaps[0].what == "speed of a service"
    assert any(one.what.startswith("graph-speed") and "no server here" in one.why for one in gaps)
    assert service_headline(read(tmp_path)) is None


@pytest.mark.parametrize("speed", [-1.0, 0.0, 1e400, "fast"])
def test_a_speed_that_cannot_be_is_refused(folder: pathlib.Path, speed: object) -> None:
    odd = {"name": "a", "speeds": [{"length": 1, "tokens_per_second": speed}]}
    broken = BENCH | {"servers": [odd]}
    (folder / "serve/h200.json").write_text(json.dumps(broken))
    runs, gaps = speed_runs(read(folder))
    assert runs == []
    assert "cannot be read" in gaps[0].why
