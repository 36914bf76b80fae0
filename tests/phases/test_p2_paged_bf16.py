"""Phase 2's gates, tried without a GPU."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdtree_engine.errors import MissingError
from kdtree_engine.schedule import workspace_bytes
from phases.attention_cases import AttentionCase
from phases.candidates import operation
from phases.gate import Context, FailureKind, GateFailure
from phases.p2_paged_bf16 import PHASE, checks, speed
from phases.regimes import Regime
from phases.requirement import Requirement

CPU = torch.device("cpu")


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: set(gate.requires) for gate in PHASE.gates} == {
        "paged-split-kv-matches-oracle": set(),
        "paged-matches-oracle": {Requirement.GPU},
        "paged-traps": {Requirement.GPU},
        "workspace-bound": set(),
        "tinymla-tokens": set(),
        "paged-speed": {Requirement.GPU},
    }
    assert all(gate.check for gate in PHASE.gates)


def test_the_right_implementation_passes_the_traps(ctx: Context) -> None:
    cases = [AttentionCase("shared", (9, 3), (90, 70), shared_prefix=64)]
    figures = checks.paged_traps(ctx, device=CPU, cases=cases, counts=((5, 3, 2),))
    assert figures[-1].value == 15


def test_a_wrapped_offset_in_q_is_caught(ctx: Context) -> None:
    """A kernel whose offset wraps reads the first rows of q in place of the last."""

    def wrapping(q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        wrapped = q.clone()
        wrapped[-3:] = q[:3]
        return operation(wrapped, *rest, **options)

    with pytest.raises(GateFailure, match="24 tokens, requests 6 and 7: relative error"):
        checks.many_tokens(ctx, wrapping, device=CPU, requests=8, nodes=3, heads=2)


def test_the_formula_must_be_the_librarys(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(extra: int) -> SimpleNamespace:
        def answer(_: int, batch: int, __: int, ___: int, processors: int, mode: bool) -> int:
            return workspace_bytes(batch, processors, deterministic=mode) + extra

        return SimpleNamespace(workspace_bytes=answer)

    monkeypatch.setattr(checks, "kernels", lambda: library(0))
    largest, compared, *_ = checks.workspace_bound(ctx)
    assert 0 < largest.value < 256_000_000
    assert compared.value > 1000
    monkeypatch.setattr(checks, "kernels", lambda: library(8))
    with pytest.raises(
        GateFailure,
        match=r"batch 0, 1 nodes, 8 heads, 82 .*: the library wants .*56 bytes, the documented",
    ) as c:
        checks.workspace_bound(ctx)
    assert c.value.kind is FailureKind.SHAPE


def test_without_a_library_only_the_bound_is_shown(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> object:
        raise MissingError("the kernel library is not built")

    monkeypatch.setattr(checks, "kernels", absent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [figure.value for figure in checks.workspace_bound(ctx)][1:] == [0]
    monkeypatch.setattr(checks, "MOST_WORKSPACE_BYTES", 1_000)
    with pytest.raises(GateFailure, match="below 1000 are allowed"):
        checks.workspace_bound(ctx)


def test_tokens_of_a_small_model(ctx: Context) -> None:
    figures = checks.tinymla_tokens(ctx, device=CPU, prompts_each=1)
    assert figures[0].value > 100


def test_dear_random_slots_are_too_slow(ctx: Context) -> None:
    with pytest.raises(GateFailure, match="random slots take") as caught:
        speed.paged_speed(ctx, device=CPU, regimes=[Regime(1, 8, 3, 200)], repeats=3, most=0.0)
    assert caught.value.kind is FailureKind.TOO_SLOW
