"""The model of plan 15: its numbers are the plan's, and the gate refuses what it should."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from kdtree_engine.tuning import Configuration
from phases.gate import Context, FailureKind, GateFailure, Unit
from phases.p5_tuning import PHASE
from phases.p5_tuning.checks import TARGETS
from phases.p5_tuning.roofline import (
    EVIDENCE,
    H200,
    RTX_PRO_6000,
    Terms,
    bound_us,
    fitted_overlap,
    kept_times,
    launch_of,
    predictions,
    roofline_model,
    terms,
)
from phases.regimes import Regime

ROW = re.compile(r"^\| (\d+, \d+, \d+, \d+k) \| (.*) \|$", re.MULTILINE)
PREFIXES = {"4k": 4096, "16k": 16_384, "65k": 65_536, "200k": 204_800}
FLAGSHIP = Regime(1, 8, 9, 65_536)


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


@pytest.fixture(scope="module")
def rows(root: pathlib.Path) -> dict[str, list[tuple[Regime, list[str]]]]:
    """The rows of plan 15's tables that begin with a regime, by the section that they stand in."""
    plan = (root / "plans" / "0015-tuning.md").read_text()
    found: dict[str, list[tuple[Regime, list[str]]]] = {}
    for section in re.split(r"^### ", plan, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        for name, cells in ROW.findall(section):
            *shape, prefix = name.split(", ")
            regime = Regime(*map(int, shape), PREFIXES[prefix])
            found.setdefault(title, []).append((regime, cells.split(" | ")))
    return found


def test_the_bounds_are_those_of_the_plan(
    rows: dict[str, list[tuple[Regime, list[str]]]],
) -> None:
    table = rows["The bound per regime"]
    assert [regime for regime, _ in table] == [target.regime for target in TARGETS]
    for (regime, cells), target in zip(table, TARGETS, strict=True):
        packed, megabytes, gflop = regime.heads * regime.nodes, *cells[1:3]
        assert cells[0] == str(packed)
        assert float(megabytes) == pytest.approx(regime.floor_bytes / 1e6, abs=0.051)
        assert float(gflop) == pytest.approx(regime.flops / 1e9, abs=0.051)
        assert float(cells[5]) == pytest.approx(bound_us(H200, regime), abs=0.051)
        assert cells[6:8] == [f"{target.must_us:g}", f"{target.aim_us:g}"]
        assert float(cells[10]) == pytest.approx(bound_us(RTX_PRO_6000, regime), abs=0.051)


def test_the_predictions_for_sm_120_are_those_of_the_plan(
    rows: dict[str, list[tuple[Regime, list[str]]]],
) -> None:
    table = rows["Predictions for sm_120"]
    for (regime, cells), made in zip(table, predictions(), strict=True):
        tile = made.launch.configuration
        assert regime == made.regime
        assert cells == [
            f"{made.launch.lanes} of {tile.row_tile}x{tile.block_tokens}",
            str(made.launch.splits),
            f"{made.bound_us:.1f}",
            f"{made.overlapped_us:.1f}",
            f"{made.in_turns_us:.1f}",
        ]


def test_a_launch_is_cut_as_the_schedule_cuts_it() -> None:
    one = launch_of(H200, FLAGSHIP, Configuration(72, 64, 1))
    assert (one.lanes, one.splits, one.stages) == (1, 129, 8)
    four = launch_of(H200, Regime(1, 8, 33, 16_384), Configuration(72, 64, 1))
    assert (four.lanes, four.rows, four.splits) == (4, 288, 33)
    whole = launch_of(H200, Regime(1, 8, 1, 20), Configuration(16, 32, 2))
    assert (whole.splits, terms(H200, Regime(1, 8, 1, 20), whole).merge) == (1, 0)


def test_the_terms_are_the_plans_sums() -> None:
    cut = launch_of(H200, FLAGSHIP, Configuration(72, 64, 1))
    one = terms(H200, FLAGSHIP, cut)
    assert one.copy == pytest.approx(16.9, abs=0.05)
    # Whole stages of the busiest block: 8 of 64 tokens where an even share would be 7.8.
    assert one.product == pytest.approx(16.2 * 8 * 64 * 132 / 65_545, rel=0.01)
    assert one.queries == pytest.approx(129 * 82_944 / 5e6, rel=1e-6)
    # A 16-bit partial row is 1,024 bytes and a pair, written and read; a float32 one 2,056.
    assert one.merge == pytest.approx(129 * 72 * 2 * 1032 / 5e6, rel=1e-6)
    wide = terms(H200, FLAGSHIP, launch_of(H200, FLAGSHIP, Configuration(72, 32, 2)))
    assert wide.merge == pytest.approx(132 * 72 * 2 * 2056 / 5e6, rel=0.03)
    # Nine tiles over the rows read each KV row nine times from L2, which DRAM no longer covers.
    tall = Regime(1, 8, 65, 16_384)
    assert terms(H200, tall, launch_of(H200, tall, Configuration(72, 64, 1))).copy == pytest.approx(
        8 * tall.floor_bytes / 5e6
    )


def test_overlap_is_between_none_and_all() -> None:
    one = Terms(t0=5, copy=10, product=20, queries=1, fill=1, merge=3)
    assert one.time(0) == 30
    assert one.time(1) == 40
    assert fitted_overlap([(one, 35)]) == 0.5
    assert fitted_overlap([(one, 90)]) == 1, "beyond taking turns another term is missing"
    assert fitted_overlap([(one, 10)]) == 0


def test_the_kept_evidence_passes_and_predictions_are_no_figures_of_speed(ctx: Context) -> None:
    figures = roofline_model(ctx)
    assert figures[0].value < 0.30
    assert not any(figure.unit.is_speed for figure in figures)
    assert sum(figure.unit is Unit.PREDICTED_MICROSECONDS for figure in figures) == 3 * len(TARGETS)


def test_the_gate_goes_stale_with_its_evidence_and_tables() -> None:
    (gate,) = (gate for gate in PHASE.gates if gate.name == "roofline-model")
    assert set(gate.data) == {EVIDENCE, "kdtree-engine/kdtree_engine/tables/*"}


def spoiled(root: pathlib.Path, tmp_path: pathlib.Path, prefix: int, us: float | None) -> str:
    """The kept evidence with the times at `prefix` replaced by one, or taken away."""
    document: dict[str, Any] = json.loads((root / EVIDENCE).read_text())
    rows = [row for row in document["kernels"] if row["regime"]["prefix"] == prefix]
    for row in rows:
        document["kernels"].remove(row)
    if us is not None:
        document["kernels"].append(rows[0] | {"median_us": us})
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("us", "said"),
    [
        (55.0, r"L=204800: 55\.0 us is below 0\.95 of the bound"),
        (300.0, r"L=204800: the model says .* us, measured 300\.0"),
        (None, r"kept\.json has no time for B=1 H=8 T=9 L=204800"),
    ],
)
def test_times_that_the_model_cannot_be_right_about_fail(
    ctx: Context, root: pathlib.Path, tmp_path: pathlib.Path, us: float | None, said: str
) -> None:
    with pytest.raises(GateFailure, match=said) as caught:
        roofline_model(ctx, evidence=spoiled(root, tmp_path, 204_800, us))
    assert caught.value.kind in (FailureKind.NUMERICAL, FailureKind.SHAPE)


def test_the_mma_body_is_not_explained_by_it(ctx: Context) -> None:
    """v8 is two and more times its copies and products in turn: the gate tells that apart."""
    with pytest.raises(GateFailure, match=r"B=16 H=8 T=9 L=16384: the model says") as caught:
        roofline_model(ctx, evidence="plans/evidence/kernel-versions/mma-v8.json")
    figures = {figure.name: figure.value for figure in caught.value.figures}
    assert figures["overlap fitted over all regimes"] == 1


def test_a_file_of_kd_bench_kernel_does_as_well(tmp_path: pathlib.Path) -> None:
    shape = {"batch": 1, "heads": 8, "nodes": 9, "prefix": 4096}
    kernels = [
        {"regime": shape, "tile": {"rows": 72, "tokens": 64}, "status": "right", "median_us": 18.0},
        {"regime": shape, "tile": None, "status": "right", "median_us": 19.0},
        {"regime": shape, "tile": None, "status": "wrong", "median_us": None},
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"kernels": kernels}))
    assert kept_times(path) == [
        (Regime(1, 8, 9, 4096), Configuration(72, 64, 1), 18.0),
        (Regime(1, 8, 9, 4096), None, 19.0),
    ]
