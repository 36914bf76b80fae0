"""The gates of a GPU host, tried on servers that are not there."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from fake_service import FAST, SCALE, FakeStart

from kdtree_engine.errors import ConfigError
from phases.gate import Context, FailureKind, GateFailure
from phases.p3_backend_wiring import gpu_host
from phases.p4_capture_safety import service as graphs
from phases.service import ServiceFailed


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def eager(ctx: Context, start: FakeStart) -> Any:
    return gpu_host.tokens_of_service(ctx, scale=SCALE, start=start)


def in_graphs(ctx: Context, start: FakeStart) -> Any:
    return graphs.graph_tokens(ctx, scale=SCALE, start=start, seconds=0.3)


@pytest.mark.parametrize("gate", [eager, in_graphs])
def test_right_servers_pass(ctx: Context, gate: Callable[..., Any]) -> None:
    start = FakeStart()
    found = {figure.name: figure.value for figure in gate(ctx, start)}
    assert found["kdtree_mla-9: near-ties accepted"] == 0
    assert found["kdtree_mla-33: tokens equal"] >= 2 * 4 * 12
    assert 1 < found["kdtree_mla-9: tokens a verification"] < 9
    on = ["--disable-cuda-graph" not in arguments for arguments, _ in start.started]
    assert on == ([True] * 3 if gate is in_graphs else [False] * 4)
    first = start.started[0][1]["PYTHONPATH"].split(":")[0]
    assert first.endswith("kdtree-engine")
    if gate is in_graphs:
        assert found["kdtree_mla-9: trees in graphs"] >= found["kdtree_mla-9: trees verified"] > 0
        assert found["traffic: requests"] > 0
        assert "seconds of mixed traffic" in found
    assert not any(figure.unit.is_speed for figure in gate(ctx, FakeStart()))


@pytest.mark.parametrize("gate", [eager, in_graphs])
def test_a_near_tie_is_accepted_and_counted(ctx: Context, gate: Callable[..., Any]) -> None:
    found = {figure.name: figure.value for figure in gate(ctx, FakeStart("near-tie"))}
    assert found["kdtree_mla-9: near-ties accepted"] == found["kdtree_mla-9: answers"]
    assert found["kdtree_mla-9: others refused"] == 0


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("late token", FailureKind.TOKEN_MISMATCH, "answers differ beyond rounding"),
        ("none accepted", FailureKind.TOKEN_MISMATCH, "its trees were not tried"),
        ("all accepted", FailureKind.TOKEN_MISMATCH, "its trees were not tried"),
        ("silent", FailureKind.LAUNCH, "expected a line with 'kdtree_mla: SGLang '"),
    ],
)
@pytest.mark.parametrize("gate", [eager, in_graphs])
def test_what_both_gates_refuse(
    ctx: Context, gate: Callable[..., Any], fault: str, kind: FailureKind, says: str
) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        gate(ctx, FakeStart(fault))
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("eager", "decode steps ran without a graph"),
        ("no replay", r"\d+ trees were verified, and 0 of them in graphs"),
        ("no padding", "no graph was replayed with fewer requests than it was captured for"),
    ],
)
def test_graphs_that_were_not_used_fail(ctx: Context, fault: str, says: str) -> None:
    with pytest.raises(GateFailure, match=says):
        in_graphs(ctx, FakeStart(fault))


def test_traffic_that_fails_does_not_hide_what_was_compared(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phases.service_traffic._IDLE_LIMIT_S", 0.1)
    for fault, says in (("leaks", "KV slots are in use"), ("breaks", "traffic: no answer from")):
        with pytest.raises(GateFailure, match=says) as caught:
            graphs.graph_tokens(ctx, scale=SCALE, start=FakeStart(fault), seconds=1.0)
        names = {figure.name for figure in caught.value.figures}
        assert "kdtree_mla-33: tokens equal" in names
        assert "seconds of mixed traffic" not in names


def test_a_server_that_does_not_start_is_said_so(ctx: Context) -> None:
    with pytest.raises(ServiceFailed, match="no such thing"):
        eager(ctx, FakeStart("kdtree_mla-trees does not start"))


def test_how_long_the_traffic_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KD_TRAFFIC_S", raising=False)
    assert graphs.traffic_seconds() == 600
    monkeypatch.setenv("KD_TRAFFIC_S", "45")
    assert graphs.traffic_seconds() == 45
    for wrong in ("soon", "0", "nan"):
        monkeypatch.setenv("KD_TRAFFIC_S", wrong)
        with pytest.raises(ConfigError, match="KD_TRAFFIC_S: expected seconds"):
            graphs.traffic_seconds()


def test_speeds_are_held_against_their_bars(ctx: Context) -> None:
    start = FakeStart(seconds=FAST)
    figures = graphs.graph_speed(
        ctx,
        scale=SCALE,
        start=start,
        new_tokens=20,
        times_triton={64: 2.0},
        times_plain={64: 2.0},
    )
    found = {figure.name: figure.value for figure in figures}
    assert found["times triton at 64"] > found["times plain at 64"] > 2
    assert [arguments[arguments.index("--attention-backend") + 1] for arguments, _ in start.started]
    with pytest.raises(GateFailure, match=r"at 64 tokens .* as fast as triton, expected 1000") as e:
        gpu_host.eager_speed(
            ctx, scale=SCALE, start=FakeStart(seconds=FAST), new_tokens=20, bars={64: 1000.0}
        )
    assert e.value.kind is FailureKind.TOO_SLOW
    assert e.value.figures
    with pytest.raises(GateFailure, match="not the same work"):
        gpu_host.eager_speed(
            ctx,
            scale=SCALE,
            start=FakeStart("none accepted", seconds=FAST),
            new_tokens=20,
            bars={},
        )
