"""Fragmentation over time, from kept benchmarks and the gates of phases 6 and 7."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from kept_evidence import H200, blocked, ended, keep, read

from phases.gate import Unit
from phases.reporting.model import Lines, Missing, Table
from phases.reporting.slots import slots_headline, slots_section


def policy(name: str, runs: float) -> dict[str, Any]:
    samples = [
        {"arrived": at, "long": {"requests": 2 if at else 0, "mean_runs": runs * at / 100}}
        for at in range(0, 101, 5)
    ]
    return {"policy": name, "samples": samples, "outcome": {"leaked": 0}}


def bench(folder: pathlib.Path, *policies: dict[str, Any]) -> None:
    (folder / "frag").mkdir(parents=True)
    document = {
        "seed": 1,
        "requests": 100,
        "traffic": {"rate": 1.5},
        "settings": {"pool": 1000},
        "policies": policies,
    }
    (folder / "frag/churn.json").write_text(json.dumps(document))


def test_a_line_for_each_policy_over_the_arrivals(tmp_path: pathlib.Path) -> None:
    bench(tmp_path, policy("stock", 1000), policy("tier0", 20))
    lines = slots_section(read(tmp_path)).blocks[0]
    assert isinstance(lines, Lines)
    stock, tier0 = lines.lines
    assert (stock.name, tier0.name) == ("stock", "tier0")
    assert stock.points[0] == (5.0, 50.0)
    assert stock.points[-1] == (95.0, 950.0)
    assert not lines.log_x


def test_runs_that_are_none_at_all_have_no_place_on_a_logarithmic_axis(
    tmp_path: pathlib.Path,
) -> None:
    bench(tmp_path, policy("stock", 1000), policy("idle", 0))
    lines = slots_section(read(tmp_path)).blocks[0]
    assert isinstance(lines, Lines)
    assert [line.name for line in lines.lines] == ["stock"]


def test_a_benchmark_without_a_long_request_is_a_gap(tmp_path: pathlib.Path) -> None:
    bench(tmp_path, policy("idle", 0))
    gap = slots_section(read(tmp_path)).blocks[0]
    assert isinstance(gap, Missing)
    assert "no long request" in gap.why


def test_the_gate_gives_both_policies_and_the_headline(tmp_path: pathlib.Path) -> None:
    figures = (
        ("mean runs, stock", 2362.7, Unit.COUNT),
        ("mean runs, tier0", 28.7, Unit.COUNT),
    )
    keep(tmp_path, "cpu", ended("runs-per-request", figures))
    kept = read(tmp_path)
    headline = slots_headline(kept)
    assert headline is not None
    assert (headline.figure, headline.what[-5:]) == ("28.7", "2,363")
    table = next(one for one in slots_section(kept).blocks if isinstance(one, Table))
    assert [cell.text for cell in table.rows[0]] == ["mean runs of a long request", "2,363", "28.7"]
    assert [cell.text for cell in table.rows[1]] == ["runs in the worst tenth", "", ""]


def test_the_price_of_run_lengths_is_over_contiguous_slots(tmp_path: pathlib.Path) -> None:
    place = "verify of 9 nodes, 65536 tokens"
    figures = (
        (f"{place}, contiguous", 40.0, Unit.MICROSECONDS),
        (f"{place}, runs of 1 within 4000000 slots", 42.5, Unit.MICROSECONDS),
        (f"{place}, runs of 64 within 4000000 slots", 40.1, Unit.MICROSECONDS),
    )
    keep(tmp_path, "h200", ended("run-length-price", figures, machine=H200), machine=H200)
    (table,) = (one for one in slots_section(read(tmp_path)).blocks if isinstance(one, Table))
    assert [cell.text for cell in table.rows[0]] == [
        *("verify of 9 nodes", "65,536", "4,000,000", "40.0", "+2.50", "+0.10"),
    ]


def test_each_gap_has_its_reason(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "cpu", blocked("run-length-price", "no GPU here"))
    gaps = [one for one in slots_section(read(tmp_path)).blocks if isinstance(one, Missing)]
    assert gaps[0].why == "no run of kd bench frag is kept"
    assert any("no GPU here" in one.why for one in gaps)
    assert slots_headline(read(tmp_path)) is None
