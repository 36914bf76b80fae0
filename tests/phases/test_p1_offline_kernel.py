"""Phase 1's gates, tried without a GPU: what they let pass, and what they must not."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest
import torch

from kdtree_engine import build
from phases import candidates
from phases.attention_cases import AttentionCase
from phases.gate import Context, FailureKind, GateFailure, GateKind
from phases.p1_offline_kernel import PHASE, checks, sanitized, speed
from phases.regimes import Regime, draw, problem_with, time_regime
from phases.requirement import Requirement

CPU = torch.device("cpu")
FEW = [
    AttentionCase("ragged", (9, 3), (300, 21)),
    AttentionCase("nothing but padding", (), (), padded_rows=2),
]
SMALL = Regime(2, 8, 3, 200)


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: set(gate.requires) for gate in PHASE.gates} == {
        "library-builds": {Requirement.NVCC},
        "split-kv-matches-oracle": set(),
        "kernel-matches-oracle": {Requirement.GPU},
        "kernel-traps": {Requirement.GPU},
        "kernel-memcheck": {Requirement.GPU, Requirement.SANITIZER},
        "kernel-speed": {Requirement.GPU},
    }
    assert [gate.name for gate in PHASE.gates if gate.kind is GateKind.SPEED] == ["kernel-speed"]
    assert all(gate.check for gate in PHASE.gates)


def test_the_right_implementation_passes(ctx: Context) -> None:
    figures = checks.kernel_matches_oracle(ctx, device=CPU, cases=FEW)
    assert figures[0].name == "worst relative error"
    checks.kernel_traps(ctx, device=CPU, cases=FEW)


def test_reading_behind_the_offsets_is_caught(ctx: Context) -> None:
    """A candidate that takes the last slots of the buffer for those of the last prefix."""

    def careless(*tensors: Any, **options: Any) -> Any:
        q, pool, qo, kv, indices, own, mask, starts = tensors
        if len(qo) > 1:
            length = int(kv[-1])
            view = torch.arange(length) if indices is None else indices[-length:]
            tensors = (q, pool, qo, kv, view.clamp(max=pool.shape[0] - 1), own, mask, starts)
        return candidates.operation(*tensors, **options)

    cases = [AttentionCase("ragged", (9, 3), (300, 21))]
    paged = checks.attention_matches_oracle(careless, ctx, dtype=torch.bfloat16, cases=cases)
    assert paged, "without stale buffers the fault does not show"
    with pytest.raises(GateFailure) as caught:
        checks.attention_matches_oracle(
            candidates.with_stale_buffers(careless), ctx, dtype=torch.bfloat16, cases=cases
        )
    assert caught.value.kind is FailureKind.NUMERICAL


def test_every_call_of_the_sanitized_set_works() -> None:
    assert sanitized.run(CPU) == 36


@pytest.mark.parametrize(("returncode", "fails"), [(0, False), (9, True)])
def test_a_report_of_the_sanitizer_fails_the_gate(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, returncode: int, fails: bool
) -> None:
    report = "========= Invalid __global__ read of size 2 bytes\nnoise\n"
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, returncode, report, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(checks, "require_current_library", lambda device: None)
    if fails:
        with pytest.raises(GateFailure, match="memcheck: ========= Invalid __global__ read"):
            checks.kernel_memcheck(ctx)
    else:
        checks.kernel_memcheck(ctx)
        assert [command[1] for command in calls] == ["--tool=memcheck", "--tool=racecheck"]


def test_a_compiler_error_is_a_failure_of_the_kernel(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> object:
        raise build.CompileError("merge.cu does not compile: error")

    monkeypatch.setattr(checks, "build", refuse)
    with pytest.raises(GateFailure, match=r"merge\.cu") as caught:
        checks.library_builds(ctx)
    assert caught.value.kind is FailureKind.COMPILE


@pytest.mark.parametrize("scattered", [False, True])
def test_a_regimes_inputs_are_its_own(scattered: bool) -> None:
    first, again, other = (draw(SMALL, seed, device=CPU, scattered=scattered) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert [part.shape for part in first] == [part.shape for part in other]
    assert torch.equal(first[4], torch.arange(400)) is not scattered
    assert first[4].unique().numel() == 400
    out = candidates.operation(*first, sm_scale=SMALL.sm_scale)
    assert problem_with(first, out, SMALL.sm_scale) is None
    assert "relative error" in str(problem_with(other, out, SMALL.sm_scale))
    assert "nan" in str(problem_with(first, out * torch.nan, SMALL.sm_scale))


def test_a_wrong_result_has_no_time() -> None:
    def zeros(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return q[..., :512] * 0

    with pytest.raises(GateFailure, match="B=2 H=8 T=3 L=200: the output was wrong") as caught:
        time_regime(SMALL, zeros, device=CPU, seed=1, repeats=3, warmup=1)
    assert caught.value.kind is FailureKind.NUMERICAL


def test_a_kernel_no_faster_than_the_naive_one_is_too_slow(ctx: Context) -> None:
    def slower(*tensors: object, **options: object) -> object:
        for _ in range(7):  # so much that a busy machine cannot hide it
            candidates.operation(*tensors, **options)  # type: ignore[arg-type]
        return candidates.operation(*tensors, **options)  # type: ignore[arg-type]

    with pytest.raises(GateFailure, match=r"at least 1\.7x is due") as caught:
        speed.kernel_speed(
            ctx,
            device=CPU,
            candidate=slower,
            baseline=candidates.operation,
            regimes=[SMALL],
            repeats=3,
        )
    assert caught.value.kind is FailureKind.TOO_SLOW
    assert caught.value.figures[0].name == "least speed-up over naive"
