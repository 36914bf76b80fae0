"""The gate of phase 7 on trials that are not there: what it refuses."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import pytest

from phases.gate import Context, FailureKind, GateFailure
from phases.p7_defrag_tier1 import checks

TRIED = {"operations": checks.OPERATIONS, **dict.fromkeys(checks._SHOWN, 7)}


def trial_of(
    found: Mapping[str, float] = TRIED, *, notices: tuple[str, ...] = ("rows", "nodes", "release")
) -> checks.Trial:
    """A trial that finds `found`, and fails where an update that it notices is left out."""

    def trial(asked: Mapping[str, object]) -> Mapping[str, float]:
        if asked.get("forget") in notices:
            raise GateFailure(FailureKind.NUMERICAL, "AssertionError: other rows")
        return found

    return trial


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def test_a_trial_without_a_fault_passes(ctx: Context) -> None:
    figures = checks.relocation_bytes_exact(ctx, trial=trial_of())
    assert (figures[0].name, figures[0].value) == ("operations", 100_000)


@pytest.mark.parametrize("count", ["operations", "rows_moved", "hits_after_moves", "retracted"])
def test_a_trial_that_did_not_try_it_shows_nothing(ctx: Context, count: str) -> None:
    with pytest.raises(GateFailure, match="did not try") as failed:
        checks.relocation_bytes_exact(ctx, trial=trial_of(TRIED | {count: 0}))
    assert failed.value.kind is FailureKind.LAUNCH


@pytest.mark.parametrize("forget", ["rows", "nodes", "release"])
def test_a_trial_that_cannot_fail_shows_nothing(ctx: Context, forget: str) -> None:
    notices = tuple({"rows", "nodes", "release"} - {forget})
    with pytest.raises(GateFailure, match=f"does not notice that {forget} is not updated"):
        checks.relocation_bytes_exact(ctx, trial=trial_of(notices=notices))


def test_a_trial_that_breaks_is_not_one_that_notices(ctx: Context) -> None:
    def broken(asked: Mapping[str, object]) -> Mapping[str, float]:
        raise GateFailure(FailureKind.LAUNCH, "ImportError")

    with pytest.raises(GateFailure, match="ImportError"):
        checks.relocation_bytes_exact(ctx, trial=broken)


def test_a_wrong_byte_fails_the_gate(ctx: Context) -> None:
    def wrong(asked: Mapping[str, object]) -> Mapping[str, float]:
        raise GateFailure(FailureKind.NUMERICAL, "AssertionError: node 3: other rows")

    with pytest.raises(GateFailure, match="node 3") as failed:
        checks.relocation_bytes_exact(ctx, trial=wrong)
    assert failed.value.kind is FailureKind.NUMERICAL
