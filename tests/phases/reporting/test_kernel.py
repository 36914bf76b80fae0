"""The kernel's figures: against peers, under the roof, and where they are missing."""

from __future__ import annotations

import pathlib

import pytest
from kept_evidence import H200, blocked, ended, keep, read

from phases.gate import Unit
from phases.reporting.kernel import (
    kernel_headlines,
    kernel_section,
    roofline,
    roofline_section,
    speedups,
)
from phases.reporting.model import Missing, Standing, Table

BASE, LONG, WIDE = "B=1 H=8 T=9 L=16384", "B=1 H=8 T=9 L=204800", "B=1 H=8 T=65 L=16384"
PEERS = (
    (BASE, 20.0, Unit.MICROSECONDS),
    (f"{BASE}, over sglang-extend, tree", 150.0, Unit.SPEEDUP),
    (f"{BASE}, over flashmla, chain", 0.5, Unit.SPEEDUP),
    (LONG, 80.0, Unit.MICROSECONDS),
    (f"{LONG}, over sglang-extend, tree", 467.0, Unit.SPEEDUP),
)
REGIMES = (
    (BASE, 20.0, Unit.MICROSECONDS),
    (f"{BASE}, cold", 22.0, Unit.MICROSECONDS),
    (LONG, 80.0, Unit.MICROSECONDS),
    (WIDE, 60.0, Unit.MICROSECONDS),
    ("copy", 4.0, Unit.TERABYTES_PER_SECOND),
    ("matrix product", 800.0, Unit.TERAFLOPS),
)


@pytest.fixture
def measured(tmp_path: pathlib.Path) -> pathlib.Path:
    gates = (ended("peers", PEERS, machine=H200), ended("kernel-regimes", REGIMES, machine=H200))
    keep(tmp_path, "h200", *gates, machine=H200)
    return tmp_path


def test_a_panel_for_each_peer_names_rows_by_what_differs(measured: pathlib.Path) -> None:
    bars = speedups(read(measured))
    assert bars is not None
    assert "B=1 H=8 T=9 L=16k where a row says nothing else" in bars.title
    triton, flashmla = bars.panels
    assert (triton.name, triton.note) == ("sglang-extend", "does a tree")
    assert triton.bars == (("L=16k", 150.0), ("L=200k", 467.0))
    assert flashmla.bars == (("L=16k", 0.5),)
    assert [cell.text for cell in bars.table().rows[1]] == ["L=200k", "467", ""]


def test_figures_of_other_names_are_no_speedups(tmp_path: pathlib.Path) -> None:
    """As of a gate whose figures were called otherwise when it was kept."""
    keep(tmp_path, "h200", ended("peers", PEERS[:1], machine=H200), machine=H200)
    kept = read(tmp_path)
    assert speedups(kept) is None
    assert isinstance(kernel_section(kept).blocks[0], Missing)


def test_a_peers_time_is_the_kernels_times_its_ratio(measured: pathlib.Path) -> None:
    times = kernel_section(read(measured)).blocks[1]
    assert isinstance(times, Table)
    assert [cell.text for cell in times.rows[0]] == ["B=1 H=8 T=9 L=16k", "20.0", "3,000", "10.0"]


def test_the_roofline_has_intensity_and_flops_of_the_regime(measured: pathlib.Path) -> None:
    roof = roofline(read(measured))
    assert roof is not None
    base, long, wide = roof.points
    assert (base.series, long.short, wide.series, wide.short) == (
        *("prefix", "L=200k"),
        *("nodes", "T=65"),
    )
    # 72 rows of 2 * (576 + 512) flops share a row of 1,152 bytes.
    assert base.intensity == pytest.approx(72 * 2 * (576 + 512) / 1152)
    assert base.achieved == pytest.approx(72 * 2 * 1088 * (16384 + 9) / 20e-6 / 1e12)
    assert roof.ceiling(base.intensity) == pytest.approx(4.0 * base.intensity)
    assert roof.ceiling(1e6) == 800.0
    assert roof.source.standing is Standing.CURRENT


def test_headlines_are_of_triton_at_the_longest_prefix_and_of_the_best_share(
    measured: pathlib.Path,
) -> None:
    triton, share = kernel_headlines(read(measured))
    assert (triton.figure, triton.section) == ("467x", "kernel")
    assert share.figure.endswith("%")


def test_what_was_not_measured_says_why(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "cpu", blocked("peers", "no GPU here"), blocked("kernel-regimes", "none at all"))
    kept = read(tmp_path)
    assert speedups(kept) is None
    assert kernel_headlines(kept) == []
    gaps = [one for one in kernel_section(kept).blocks if isinstance(one, Missing)]
    assert "no GPU here" in gaps[0].why
    assert gaps[1].why == "no kept record has this gate"
    (first, _) = roofline_section(kept).blocks
    assert isinstance(first, Missing)
    assert "none at all" in first.why


def test_figures_of_a_gate_that_failed_and_went_stale_are_shown_as_such(
    tmp_path: pathlib.Path,
) -> None:
    entry = ended("peers", PEERS, machine=H200, failed="slower than flashmla", stale=True)
    keep(tmp_path, "h200", entry, machine=H200)
    bars = speedups(read(tmp_path))
    assert bars is not None
    assert (bars.source.standing, bars.source.remark) == (Standing.STALE, "the gate failed")


def test_predictions_are_called_so(tmp_path: pathlib.Path) -> None:
    name = f"sm_120 {BASE}, without t0: in turns"
    keep(tmp_path, "cpu", ended("roofline-model", ((name, 21.6, Unit.PREDICTED_MICROSECONDS),)))
    table = roofline_section(read(tmp_path)).blocks[1]
    assert isinstance(table, Table)
    assert "not measured" in table.caption
    assert table.source is not None
    assert table.source.standing is Standing.PREDICTED
    assert [cell.text for cell in table.rows[0]] == ["B=1 H=8 T=9 L=16k", "sm_120", "21.6"]
