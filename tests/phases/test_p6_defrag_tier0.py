"""The gates of phase 6 on churns and trials that are not there: what they refuse."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kdtree_engine.fragmentation.traffic import Request, Traffic
from kdtree_engine.sglang_ext.defrag.churn import Settings
from phases.bench_frag import Churned, Sample
from phases.gate import Context, FailureKind, GateFailure
from phases.p6_defrag_tier0 import checks

TRIED = {"operations": checks.OPERATIONS, "allocations": 5, "refused": 2}
SMALL = Traffic(requests=10)


def run_of(runs: dict[str, float], **outcome: Any) -> Any:
    def run(
        settings: Settings, requests: Sequence[Request], seen: Callable[[Sample], None]
    ) -> Churned:
        figures = {
            "requests": 3,
            "mean_runs": runs[settings.policy],
            "worst_decile_runs": 2 * runs[settings.policy],
            "mean_tokens": 1000,
        }
        samples = [{"arrived": n, "finished": 0, "long": figures} for n in (2, 6, 10)]
        for sample in samples:
            seen(sample)
        told = {"finished": 10, "leaked": 0} | outcome
        return Churned(settings.policy, samples, told)

    return run


def test_a_tenth_is_enough(tmp_path: pathlib.Path) -> None:
    ctx = Context(seed=1, scratch=tmp_path)
    figures = checks.runs_per_request(ctx, run=run_of({"stock": 100, "tier0": 10}), traffic=SMALL)
    assert (figures[0].name, figures[0].value) == ("of stock's runs", 0.1)
    values = {figure.name: figure.value for figure in figures}
    lengths = [values[checks.RUN_LENGTH.format(policy)] for policy in ("stock", "tier0")]
    assert lengths == [10, 100]


def test_more_than_a_tenth_is_not(tmp_path: pathlib.Path) -> None:
    ctx = Context(seed=1, scratch=tmp_path)
    with pytest.raises(GateFailure, match=r"11 runs of .*, expected at most 0\.1 of 100"):
        checks.runs_per_request(ctx, run=run_of({"stock": 100, "tier0": 11}), traffic=SMALL)


def test_a_lost_slot_fails_however_few_runs(tmp_path: pathlib.Path) -> None:
    ctx = Context(seed=1, scratch=tmp_path)
    run = run_of({"stock": 100, "tier0": 1}, leaked=4)
    with pytest.raises(GateFailure, match="lost 8 slots"):
        checks.runs_per_request(ctx, run=run, traffic=SMALL)


def test_invariants_are_of_all_operations(tmp_path: pathlib.Path) -> None:
    ctx = Context(seed=1, scratch=tmp_path)
    assert checks.allocator_invariants(ctx, trial=lambda asked: TRIED)[0].value == 100_000
    for short in ({"operations": 99}, {"allocations": 0}, {"refused": 0}):
        with pytest.raises(GateFailure) as failed:
            checks.allocator_invariants(ctx, trial=lambda asked, short=short: TRIED | short)
        assert failed.value.kind is FailureKind.LAUNCH
