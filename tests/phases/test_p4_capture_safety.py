"""Phase 4's gates, tried without a GPU: a replay is then the call itself."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

from phases.gate import Context, GateFailure
from phases.p4_capture_safety import PHASE, checks
from phases.p4_capture_safety.buffers import Capacity, StaticBuffers, draw_batch
from phases.requirement import Requirement

CPU = torch.device("cpu")
SMALL = Capacity(requests=3, nodes=5, prefix=60)


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: (set(gate.requires), gate.check is None) for gate in PHASE.gates} == {
        "op-check": (set(), False),
        "graph-replay-bits": ({Requirement.GPU}, False),
        "no-host-sync": ({Requirement.GPU}, False),
        "graph-service-token-exact": ({Requirement.GPU, Requirement.SERVICE}, False),
        "conformance-kit-graph": ({Requirement.GPU, Requirement.SGLANG}, False),
        "graph-speed": ({Requirement.GPU, Requirement.SERVICE}, False),
    }


def test_the_operation_passes_torchs_checks(ctx: Context) -> None:
    (figure,) = checks.op_check(ctx, device=CPU)
    assert figure.value == 12


def test_replays_are_many_and_of_smaller_batches(ctx: Context) -> None:
    replays, smaller, *_ = checks.graph_replay_bits(ctx, device=CPU, draws=4, capacity=SMALL)
    assert replays.value == 16
    assert 0 < smaller.value < 16


def test_by_default_a_graph_sees_at_least_fifty_batches(ctx: Context) -> None:
    draws = checks.graph_replay_bits.__kwdefaults__["draws"]
    assert draws >= 50


def test_a_replay_that_keeps_its_first_answer_is_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph does that was captured with lengths or masks read on the host."""
    seen: list[StaticBuffers] = []
    verify = checks._verify

    def remember(static: StaticBuffers, *options: object) -> None:
        if static not in seen:
            seen.append(static)
        verify(static, *options)  # type: ignore[arg-type]

    def frozen(call: Callable[[], None], _: torch.device) -> Callable[[], None]:
        call()
        out, lse = seen[-1].out.clone(), seen[-1].lse.clone()
        target = seen[-1]

        def replay() -> None:
            target.out.copy_(out)
            target.lse.copy_(lse)

        return replay

    monkeypatch.setattr(checks, "_verify", remember)
    monkeypatch.setattr(checks, "_captured", frozen)
    with pytest.raises(GateFailure, match=r"replay 0, .*out of replay and eager differ"):
        checks.graph_replay_bits(ctx, device=CPU, draws=2, capacity=SMALL)


def test_padded_rows_that_are_not_zero_are_caught(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = checks._verify

    def stray(static: StaticBuffers, *options: object) -> None:
        verify(static, *options)  # type: ignore[arg-type]
        static.out[-1] = 1.0

    monkeypatch.setattr(checks, "_verify", stray)
    with pytest.raises(GateFailure, match="rows without a request are not zero"):
        checks.graph_replay_bits(ctx, device=CPU, draws=9, capacity=SMALL)


def test_a_smaller_batch_leaves_the_earlier_one_behind_it() -> None:
    static = StaticBuffers(SMALL, device=CPU, indptr_dtype=torch.int32, slot_dtype=torch.int64)
    static.mask.fill_(7)
    generator = torch.Generator().manual_seed(0)
    case, inputs = draw_batch(SMALL, generator, CPU)
    while len(case.trees) == SMALL.requests:
        case, inputs = draw_batch(SMALL, generator, CPU)
    static.fill(inputs)
    assert inputs.mask is not None
    assert static.mask[len(inputs.mask) :].eq(7).all()
    rows = sum(case.trees)
    assert static.qo_indptr[len(case.trees) :].eq(rows).all()
    assert static.qo_indptr.dtype is torch.int32


@pytest.mark.parametrize(
    ("launched", "documented"),
    [
        (["void kdtree::tree_verify_wgmma_kernel<kdtree::WgTile<__half, 72, 17> >(int)"], True),
        (
            [
                "void kdtree::tree_verify_kernel<kdtree::Tile<__half, 24, 16, 3, 1> >(int)",
                "void kdtree::(anonymous namespace)::merge_kernel<__half>(int)",
            ],
            True,
        ),
        (["void kdtree::tree_verify_kernel<kdtree::Tile<__half, 24, 16, 3, 1> >(int)"], False),
        (
            [
                "void at::native::vectorized_elementwise_kernel<4>(int)",
                "void kdtree::tree_verify_wgmma_kernel<kdtree::WgTile<__half, 72, 17> >(int)",
            ],
            False,
        ),
        ([], False),
    ],
)
def test_what_a_call_launches_is_what_is_documented(launched: list[str], documented: bool) -> None:
    assert checks._documented(launched) is documented
