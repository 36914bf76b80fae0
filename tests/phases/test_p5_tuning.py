"""Phase 5's gates, tried without a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch

from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import BuildReport
from kdtree_engine.resources import KernelResources
from phases.gate import Context, FailureKind, GateFailure, GateKind
from phases.p5_tuning import PHASE, checks
from phases.regimes import Regime

CPU = torch.device("cpu")
SMALL = Regime(1, 8, 3, 200)


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: (gate.kind, gate.check is None) for gate in PHASE.gates} == {
        "tuning-table": (GateKind.CORRECTNESS, True),
        "deterministic-bits": (GateKind.CORRECTNESS, False),
        "sm120-resources": (GateKind.CORRECTNESS, False),
        "roofline-model": (GateKind.CORRECTNESS, True),
        "kernel-regimes": (GateKind.SPEED, False),
        "peers": (GateKind.SPEED, False),
    }


def test_deterministic_mode_passes(ctx: Context) -> None:
    batches, differing = checks.deterministic_bits(ctx, devices=[CPU], batches=8)
    assert batches.value == 8
    assert differing.value > 0


def test_a_mode_that_is_ignored_is_caught(ctx: Context) -> None:
    def ignoring(*tensors: Any, **options: Any) -> Any:
        return tree_verify_attention(*tensors, **options | {"deterministic": False})

    with pytest.raises(GateFailure, match="other bits than alone"):
        checks.deterministic_bits(ctx, devices=[CPU], candidate=ignoring, batches=8)


def test_batches_that_show_nothing_are_an_error_of_the_gate(ctx: Context) -> None:
    def always(*tensors: Any, **options: Any) -> Any:
        return tree_verify_attention(*tensors, **options | {"deterministic": True})

    with pytest.raises(ValueError, match="show nothing"):
        checks.deterministic_bits(ctx, devices=[CPU], candidate=always, batches=4)


TILE = KernelResources("tile", "sm_120", 198, 0, 0, 0, dynamic_shared_bytes=97_728)


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        ([TILE], None),
        ([dataclasses.replace(TILE, spill_bytes=4)], "tile on sm_120: 4 bytes spilled"),
        ([dataclasses.replace(TILE, architecture="sm_90")], "no tile of the kernel fits sm_120"),
        (
            [dataclasses.replace(TILE, dynamic_shared_bytes=101_377)],
            "no tile of the kernel fits sm_120",
        ),
    ],
)
def test_resources_of_sm_120(
    ctx: Context,
    monkeypatch: pytest.MonkeyPatch,
    kernels: list[KernelResources],
    text: str | None,
) -> None:
    def built(**_: object) -> BuildReport:
        return BuildReport(ctx.scratch, tuple(kernels), 1, 0, 1.0, "13.0")

    monkeypatch.setattr(checks, "build", built)
    if text is None:
        assert [figure.value for figure in checks.sm120_resources(ctx)] == [1, 97_728, 198]
        return
    with pytest.raises(GateFailure, match=text) as caught:
        checks.sm120_resources(ctx)
    assert caught.value.kind is FailureKind.COMPILE


def test_a_regime_that_comes_late_is_too_slow_and_keeps_its_figures(ctx: Context) -> None:
    targets = [checks.Target(SMALL, must_us=0.5, aim_us=0.1)]
    with pytest.raises(GateFailure, match=r"B=1 H=8 T=3 L=200: .* us, must reach 0.5") as caught:
        checks.kernel_regimes(ctx, device=CPU, targets=targets, repeats=3, judged=True)
    assert caught.value.kind is FailureKind.TOO_SLOW
    named = {figure.name: figure for figure in caught.value.figures}
    assert named["B=1 H=8 T=3 L=200"].value > 0.5
    assert named["B=1 H=8 T=3 L=200, cold"].value > 0.5
    assert named["aims reached"].value == 0


def test_the_bars_are_an_h200s_and_bind_no_other_card(ctx: Context) -> None:
    targets = [checks.Target(SMALL, must_us=0.5, aim_us=0.1)]
    figures = checks.kernel_regimes(ctx, device=CPU, targets=targets, repeats=3)
    assert figures[0].value > 0.5


def test_a_regime_in_time_passes(ctx: Context) -> None:
    targets = [checks.Target(SMALL, must_us=1e9, aim_us=1e8)]
    figures = checks.kernel_regimes(ctx, device=CPU, targets=targets, repeats=3, judged=True)
    assert figures[0].unit.is_speed
    assert figures[-1].value == 1


def test_the_sums_of_a_regime() -> None:
    regime = Regime(batch=4, heads=8, nodes=9, prefix=16_384)
    assert regime.floor_bytes == 1152 * (16_384 + 9) * 4
    assert regime.flops == 2176 * 72 * (16_384 + 9) * 4
    assert len(checks.TARGETS) == 12
    assert all(target.aim_us < target.must_us for target in checks.TARGETS)
