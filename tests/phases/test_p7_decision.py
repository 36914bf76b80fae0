"""What Tier 1 could win, from figures made by hand and from evidence that is not there."""

from __future__ import annotations

import dataclasses
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kdtree_engine.errors import MissingError
from phases.evidence import FigureRecord
from phases.gate import Context, FailureKind, Figure, GateFailure, Status, Unit
from phases.p5_tuning import price_figures as named
from phases.p6_defrag_tier0.checks import RUN_LENGTH
from phases.p7_defrag_tier1 import decision
from phases.plan import PlanStatus, find_plan, load_plans

POOL = 4_000_000
ROOT = pathlib.Path(__file__).resolve().parents[2]


def priced(prices: Mapping[int, float], tokens: int = 65536, us: float = 20.0) -> list[Figure]:
    """A verify pass that takes `us`, and so much more by run length."""
    what = named.verify(9)
    return [
        Figure(named.name(what, tokens, None), us, Unit.MICROSECONDS),
        *(
            Figure(
                named.name(what, tokens, named.Slots(length, POOL)), us + more, Unit.MICROSECONDS
            )
            for length, more in prices.items()
        ),
    ]


def churned(stock: float, tier0: float) -> list[Figure]:
    return [
        Figure(RUN_LENGTH.format("stock"), stock, Unit.COUNT),
        Figure(RUN_LENGTH.format("tier0"), tier0, Unit.COUNT),
    ]


def evidence(price: list[Figure], churn: list[Figure], *faults: str) -> Callable[[], Any]:
    known = {
        name: types.SimpleNamespace(
            gate=types.SimpleNamespace(
                figures=[FigureRecord.of(one) for one in figures],
                status=Status.FAILED if f"{name} failed" in faults else Status.PASSED,
            ),
            stale=f"{name} is stale" in faults,
        )
        for name, figures in (("run-length-price", price), ("runs-per-request", churn))
        if figures
    }
    return lambda: known


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def values(figures: list[Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def test_a_low_price_leaves_it_deferred(ctx: Context) -> None:
    """Tier 0 leaves runs of 959: those of 64 stand for them, and cost 1 us of 21."""
    known = evidence(priced({1: 4.0, 8: 2.0, 64: 1.0}), churned(10.3, 959.4))
    found = values(decision.deferral_figures(ctx, evidence=known, status=PlanStatus.DEFERRED))
    assert found["gain of Tier 1 at most, of a step"] == pytest.approx(1 / 21)
    assert found["beside SGLang's own allocator instead"] == pytest.approx(2 / 22)
    assert found["worth it"] == 0
    assert found[f"tier0: verify of 9 nodes, 65536 tokens, runs of 64 within {POOL} slots"] > 0


def test_the_dearest_context_decides(ctx: Context) -> None:
    price = [*priced({64: 0.1}), *priced({64: 3.0}, tokens=16384, us=10.0)]
    with pytest.raises(GateFailure, match=r"at most 23\.1% of a step \(tier0: .*16384") as caught:
        decision.deferral_figures(
            ctx, evidence=evidence(price, churned(100, 900)), status=PlanStatus.DEFERRED
        )
    assert caught.value.kind is FailureKind.NUMERICAL
    assert "plan 17 says 'deferred'" in str(caught.value)
    assert values(list(caught.value.figures))["worth it"] == 1


def test_the_plan_may_not_build_what_is_not_worth_it(ctx: Context) -> None:
    known = evidence(priced({64: 0.1}), churned(100, 900))
    with pytest.raises(GateFailure, match=r"Tier 1 is not worth it: .* plan 17 says 'active'"):
        decision.deferral_figures(ctx, evidence=known, status=PlanStatus.ACTIVE)


def test_a_price_below_nothing_is_noise(ctx: Context) -> None:
    known = evidence(priced({64: -0.4}), churned(100, 900))
    found = values(decision.deferral_figures(ctx, evidence=known, status=PlanStatus.DEFERRED))
    assert found["gain of Tier 1 at most, of a step"] == 0


def test_what_is_not_kept_blocks(ctx: Context) -> None:
    for price, churn, name in (
        ([], churned(1, 1), "run-length-price"),
        (priced({1: 0.0}), [], "runs-per-request"),
    ):
        with pytest.raises(MissingError, match=f"no run of {name} is kept"):
            decision.deferral_figures(ctx, evidence=evidence(price, churn))


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (
            evidence(priced({1: 0.0}), churned(1, 1), "run-length-price is stale"),
            "the code has changed since run-length-price passed",
        ),
        (
            evidence(priced({1: 0.0}), churned(1, 1), "runs-per-request failed"),
            "the newest kept run of runs-per-request did not pass",
        ),
        (evidence(priced({8: 1.0}), churned(2.5, 900)), "runs of 2.5 slots are shorter than all"),
        (evidence(priced({1: 1.0})[:1], churned(1, 1)), "no time is of a verify pass"),
        (evidence(priced({1: 1.0})[1:], churned(1, 1)), "there is no time of"),
        (evidence(priced({1: 1.0}), churned(1, 1)[:1]), "has no figure 'mean run length, tier0'"),
    ],
)
def test_figures_that_say_nothing_fail(ctx: Context, known: Callable[[], Any], says: str) -> None:
    with pytest.raises(GateFailure, match=says):
        decision.deferral_figures(ctx, evidence=known, status=PlanStatus.DEFERRED)


def test_other_operations_do_not_count() -> None:
    price = priced({1: 1.0})
    other = [
        dataclasses.replace(one, name=one.name.replace(named.verify(9), "compaction of 9 rows"))
        for one in price
    ]
    found = decision.gains(named.price_series([*price, *other]), {"tier0": 1.0})
    assert [one.series.operation for one in found] == ["verify of 9 nodes"]


def test_kept_evidence_is_of_gates_that_ran_to_their_end(root: pathlib.Path) -> None:
    """As the repository has it now, where most machines had no GPU and were blocked."""
    assert (root / "plans" / "evidence").is_dir()
    for known in decision.kept_evidence().values():
        assert known.gate.status in (Status.PASSED, Status.FAILED)


def test_the_record_and_the_kept_figures_agree(ctx: Context) -> None:
    """Plan 17, held against what the repository keeps. Whether that is stale, the gate says.

    Until a price is kept, the deferral stands on the estimate in the plan, and the gate is blocked.
    """
    known = {
        name: one.model_copy(update={"stale": False})
        for name, one in decision.kept_evidence().items()
    }
    missing = [name for name in decision.RESTS_ON if name not in known]
    if missing:
        with pytest.raises(MissingError, match=f"no run of {missing[0]} is kept"):
            decision.deferral_figures(ctx, evidence=lambda: known)
        plan = find_plan(load_plans(ROOT / "plans"), "17")
        assert plan.status is PlanStatus.DEFERRED
        assert "nothing yet; deferred on reported figures" in plan.path.read_text()
        return
    figures = decision.deferral_figures(ctx, evidence=lambda: known)
    assert figures[0].name == "gain of Tier 1 at most, of a step"
