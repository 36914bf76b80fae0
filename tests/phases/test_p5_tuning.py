"""Phase 5's gates, tried without a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdtree_engine import timing
from kdtree_engine.attention import tree_verify_attention
from kdtree_engine.build import BuildReport
from kdtree_engine.errors import MissingError
from kdtree_engine.reference.masks import MaskLayout, pack_masks, tree_mask
from kdtree_engine.resources import KernelResources
from phases.attention_cases import Shape, random_parents
from phases.gate import Context, FailureKind, GateFailure, GateKind
from phases.p5_tuning import PHASE, against_peers, checks
from phases.peers import Peer
from phases.regimes import Regime, draw, first_seed, replays_for

pytestmark = pytest.mark.usefixtures("small_cpu_cache")
CPU = torch.device("cpu")
SMALL = Regime(1, 8, 3, 200)


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def test_the_gates_that_the_plan_names() -> None:
    assert {gate.name: (gate.kind, gate.check is None) for gate in PHASE.gates} == {
        "tuning-table": (GateKind.CORRECTNESS, False),
        "deterministic-bits": (GateKind.CORRECTNESS, False),
        "sm120-resources": (GateKind.CORRECTNESS, False),
        "roofline-model": (GateKind.CORRECTNESS, False),
        "kernel-regimes": (GateKind.SPEED, False),
        "peers": (GateKind.SPEED, False),
        "run-length-price": (GateKind.SPEED, False),
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


def test_the_mask_of_a_draw_is_sglangs_full_layout_of_drawn_trees() -> None:
    regime = Regime(batch=2, heads=1, nodes=9, prefix=30)
    generator = torch.Generator().manual_seed(5)
    trees = [random_parents(9, Shape.MIXED, generator) for _ in range(2)]
    masks = [tree_mask(torch.tensor(tree)) for tree in trees]
    expected, starts = pack_masks(masks, [30, 30], MaskLayout.FULL)
    for _ in range(2):  # the second from what was kept of the first
        found = draw(regime, 5, device=CPU, scattered=True)
        assert torch.equal(found[6], expected)
        assert torch.equal(found[7], starts)
        found[6].zero_()
    assert not torch.equal(draw(regime, 6, device=CPU, scattered=True)[6], expected)


def test_the_methods_share_no_seed() -> None:
    most = 24 * (replays_for(200) + 5 + 2)  # what `time_operation` says that it uses
    cold, rotated = (first_seed(1, method) for method in ("cold", "rotated"))
    assert cold + most < rotated
    assert rotated + most < first_seed(2, "cold")
    assert [replays_for(repeats) for repeats in (50, 3)] == [25, 3]


class Clock:
    """Counts what a kernel is said to take and a microsecond a look, however busy a machine is."""

    def __init__(self) -> None:
        self.now_ns = 0

    def read(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def spend(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


CLOCK = Clock()


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_clock_ns", CLOCK.read)
    monkeypatch.setattr(timing, "_second_clock_ns", CLOCK.read)


CHAINS = Regime(1, 8, 2, 60)
"""Two nodes are a chain, whatever is drawn: the operation itself may stand for any peer."""


def absent() -> None:
    import no_such_module  # noqa: F401


def peer(
    name: str, delay_s: float = 0.0, factor: float = 1.0, load: Callable[[], None] = lambda: None
) -> Peer:
    """The operation under a peer's name, at a price."""

    def make(loaded: None, regime: Regime) -> Any:
        if regime.nodes > 2:
            raise NotImplementedError(f"no trees: {regime}")

        def operation(*tensors: torch.Tensor) -> torch.Tensor:
            CLOCK.spend(delay_s)
            out = tree_verify_attention(*tensors[:6], sm_scale=regime.sm_scale)
            assert isinstance(out, torch.Tensor)
            return out * factor

        return operation

    return Peer(name, load, make)


SLOW = 0.2


def against(ctx: Context, *peers: Peer, **options: Any) -> dict[str, float]:
    options = {"device": CPU, "regimes": [CHAINS], "replays": 3} | options
    figures = against_peers.against_peers(ctx, peers=peers, **options)
    return {figure.name: figure.value for figure in figures}


@pytest.mark.usefixtures("own_clock")
def test_a_slower_bar_is_passed_and_the_others_are_recorded_without_a_threshold(
    ctx: Context,
) -> None:
    longer = [dataclasses.replace(CHAINS, prefix=CHAINS.prefix + more) for more in (1, 2)]
    found = against(
        ctx,
        peer("flashinfer-fa2", SLOW),
        peer("faster"),
        peer("wrong", SLOW, factor=1.5),
        peer("absent", load=absent),
        candidate=delayed(SLOW / 10),
        regimes=[CHAINS, *longer, SMALL],
    )
    assert found["least speed-up over flashinfer-fa2"] == pytest.approx(10, rel=0.01)
    assert found["regimes that flashinfer-fa2 does"] == 3
    assert found[f"{CHAINS}, over faster, chain"] < 1
    assert found[f"{SMALL}"] == pytest.approx(SLOW / 10 * 1e6, rel=0.01)
    assert not any("wrong" in name or "absent" in name for name in found)
    assert not any(name.startswith(f"{SMALL}, over") for name in found)


def delayed(delay_s: float) -> Any:
    def candidate(*tensors: Any, **options: Any) -> Any:
        CLOCK.spend(delay_s)
        return tree_verify_attention(*tensors, **options)

    return candidate


@pytest.mark.usefixtures("own_clock")
def test_a_faster_bar_fails_the_gate_and_the_figures_are_kept(ctx: Context) -> None:
    with pytest.raises(
        GateFailure, match=r"not faster than flashinfer-fa2 at B=1 H=8 T=2 L=60: 0\.\d\dx"
    ) as caught:
        against(ctx, peer("flashinfer-fa2"), candidate=delayed(SLOW))
    assert caught.value.kind is FailureKind.TOO_SLOW
    assert caught.value.figures[0].value < 1


@pytest.mark.usefixtures("own_clock")
def test_a_wrong_kernel_is_not_compared(ctx: Context) -> None:
    def wrong(*tensors: Any, **options: Any) -> Any:
        return 1.1 * tree_verify_attention(*tensors, **options)  # type: ignore[operator]

    with pytest.raises(GateFailure, match="relative error") as caught:
        against(ctx, peer("flashinfer-fa2", SLOW), candidate=wrong)
    assert caught.value.kind is FailureKind.NUMERICAL


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        ([peer("flashinfer-fa2", load=absent)], "no peer is installed"),
        ([], "no peer is installed"),
        (
            [peer("flashinfer-fa2", load=absent), peer("flashmla")],
            "flashinfer-fa2, the peer to beat, cannot be run: no module no_such_module",
        ),
    ],
)
def test_without_the_peer_to_beat_the_gate_is_blocked(
    ctx: Context, peers: list[Peer], text: str
) -> None:
    with pytest.raises(MissingError, match=text):
        against(ctx, *peers)


@pytest.mark.parametrize(
    ("bar", "text"),
    [
        (peer("flashinfer-fa2", factor=1.5), "WrongResult: .*relative error"),
        (
            dataclasses.replace(peer("flashinfer-fa2"), make=lambda loaded, regime: 1 / 0),
            "ZeroDivision",
        ),
    ],
)
def test_a_bar_that_is_right_nowhere_shows_nothing(ctx: Context, bar: Peer, text: str) -> None:
    with pytest.raises(ValueError, match=f"was right in 0 of 1 regimes, .*{text}"):
        against(ctx, bar)


@pytest.mark.usefixtures("own_clock")
def test_a_bar_that_does_few_of_the_regimes_shows_little(ctx: Context) -> None:
    with pytest.raises(ValueError, match=r"was right in 1 of 2 regimes, .*B=1 H=8 T=3 L=200"):
        against(ctx, peer("flashinfer-fa2", SLOW), regimes=[CHAINS, SMALL])
