"""The gates of a GPU host, tried on servers that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any

import fake_service
import pytest
import torch
from fake_service import FAST, SCALE, FakeService, FakeStart

from kdtree_engine.errors import ConfigError, MissingError
from phases.gate import Context, FailureKind, GateFailure
from phases.p3_backend_wiring import gpu_host
from phases.p3_backend_wiring.speed import eager_speed
from phases.p4_capture_safety import PHASE
from phases.p4_capture_safety import service as graphs
from phases.p4_capture_safety.speed import graph_speed
from phases.p6_defrag_tier0 import PHASE as CHURN
from phases.p6_defrag_tier0 import service as churn
from phases.p7_defrag_tier1 import service as relocated
from phases.service import ServiceFailed
from phases.service_mixed import LONGEST_TRAFFIC_S, traffic_seconds


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    return Context(seed=1, scratch=tmp_path)


def eager(ctx: Context, start: FakeStart) -> Any:
    return gpu_host.tokens_of_service(ctx, scale=SCALE, start=start)


def in_graphs(ctx: Context, start: FakeStart) -> Any:
    return graphs.graph_tokens(ctx, scale=SCALE, start=start, seconds=1.0)


def churned(ctx: Context, start: FakeStart) -> Any:
    small = churn.Churn(SCALE, slots=500, longest=40)
    return churn.churn_tokens(ctx, start=start, seconds=1.0, churn=small)


@pytest.mark.parametrize("gate", [eager, in_graphs])
def test_right_servers_pass(ctx: Context, gate: Callable[..., Any]) -> None:
    start = FakeStart()
    found = {figure.name: figure.value for figure in gate(ctx, start)}
    assert found["kdtree_mla-9: near-ties accepted"] == 0
    assert found["kdtree_mla-33: tokens equal"] >= 2 * 4 * 12
    assert 1 < found["kdtree_mla-9: tokens a verification"] < 9
    on = ["--disable-cuda-graph" not in arguments for arguments, _ in start.started]
    assert on == [gate is in_graphs] * 5
    # Stock's own tokens say nothing of the kernel.
    ours = [f"kdtree_mla-{nodes}: tokens equal" for nodes in (9, 33, "plain")]
    ours += ["traffic: tokens equal"] if gate is in_graphs else []
    assert found["tokens equal"] == sum(found[name] for name in ours)
    assert found["triton-9: tokens equal"] > 0
    first = start.started[0][1]["PYTHONPATH"].split(":")[0]
    assert first.endswith("kdtree-engine")
    if gate is in_graphs:
        assert found["kdtree_mla-9: trees in graphs"] >= found["kdtree_mla-9: trees verified"] > 0
        assert found["kdtree_mla-plain: steps in graphs"] >= found["kdtree_mla-plain: answers"] > 0
        assert found["kdtree_mla-plain: padded replays"] > 0
        assert found["traffic: requests"] > 0
        assert "seconds of mixed traffic" in found
    assert not any(figure.unit.is_speed for figure in gate(ctx, FakeStart()))


@pytest.mark.parametrize("gate", [eager, in_graphs])
def test_a_near_tie_is_accepted_and_counted(ctx: Context, gate: Callable[..., Any]) -> None:
    found = {figure.name: figure.value for figure in gate(ctx, FakeStart("near-tie once"))}
    assert found["kdtree_mla-9: near-ties accepted"] == 1
    assert found["kdtree_mla-9: others refused"] == 0
    assert {"gap that is a near-tie at 32, log probability"} < set(found)


@pytest.mark.parametrize("gate", [eager, in_graphs])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("empty", "32 tokens: answer 0: expected 12 tokens and ending 'length', got 0 and"),
        ("cut short", "32 tokens: answer 0: .*, got 12 and 'abort'"),
    ],
)
def test_servers_that_agree_in_no_answer_at_all_fail(
    ctx: Context, gate: Callable[..., Any], fault: str, says: str
) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        gate(ctx, FakeStart(fault))
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH


def test_tier0_under_churn_passes(ctx: Context) -> None:
    """Both servers are asked for Tier 0, which one on the kernel takes; their pool is small."""
    start = FakeStart()
    found = {figure.name: figure.value for figure in churned(ctx, start)}
    assert found["slots evicted"] == 1e6
    (looks,) = (name for name in found if name.startswith("runs, mean of"))
    assert found[looks] == 2
    assert found["answers that wrong slots change"] == 4
    assert found["traffic: requests"] > 0
    assert found["traffic: others refused"] == 0
    assert [environment["KDTREE_DEFRAG"] for _, environment in start.started] == ["tier0"] * 2
    for arguments, _ in start.started:
        assert arguments[-3:] == ("--enable-metrics", "--max-total-tokens", "500")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocated, "server_sglang", lambda: "0.5.23")


@pytest.mark.usefixtures("release")
def test_tier1_under_churn_passes(ctx: Context) -> None:
    start, small = FakeStart(), churn.Churn(SCALE, slots=500, longest=40)
    figures = relocated.relocated_tokens(ctx, start=start, seconds=1.0, churn=small)
    found = {figure.name: figure.value for figure in figures}
    assert found["rows moved"] == 50
    for arguments, environment in start.started:
        assert "--disable-overlap-schedule" in arguments
        assert environment["KDTREE_DEFRAG"] == "tier1"
        assert environment["KDTREE_DEFRAG_EVERY"] == "1"


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no move", "tier1 did nothing: no rows moved"),
        ("no tier1", "its log does not say 'defrag: tier1'"),
    ],
)
def test_a_tier1_that_is_none_fails(ctx: Context, fault: str, says: str) -> None:
    small = churn.Churn(SCALE, slots=500, longest=40)
    with pytest.raises(GateFailure, match=says):
        relocated.relocated_tokens(ctx, start=FakeStart(fault), seconds=1.0, churn=small)


def test_tier1_is_blocked_where_the_holders_are_not_known(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocated, "server_sglang", lambda: "0.5.17")
    with pytest.raises(MissingError, match=r"holders of SGLang 0\.5\.23, and 0\.5\.17 is"):
        relocated.relocated_tokens(ctx, start=FakeStart())


def test_where_tokens_round_stock_trees_say_how_often(ctx: Context) -> None:
    small = churn.Churn(SCALE, slots=500, longest=40, rounds=True)
    start = FakeStart("near-tie once")
    figures = churn.churn_tokens(ctx, start=start, seconds=1.0, churn=small)
    found = {figure.name: figure.value for figure in figures}
    assert found["kdtree_mla-9: near-ties accepted"] == 1
    assert found["triton-9: tokens equal"] > 0
    backends = [one[one.index("--attention-backend") + 1] for one, _ in start.started]
    assert sorted(backends) == ["kdtree_mla", "triton", "triton"]
    with pytest.raises(GateFailure, match="beside 0% of stock trees'"):
        churn.churn_tokens(ctx, start=FakeStart("near-tie"), seconds=1.0, churn=small)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("late token", FailureKind.TOKEN_MISMATCH, "answers differ beyond rounding"),
        ("leaks", FailureKind.NUMERICAL, "KV slots are in use with no request"),
        ("breaks", FailureKind.LAUNCH, "traffic: no answer from the server: 500"),
        ("no tier0", FailureKind.LAUNCH, "its log does not say 'defrag: tier0'"),
        ("no eviction", FailureKind.LAUNCH, "0 slots were evicted, expected more than the pool's"),
        ("no gauge", FailureKind.LAUNCH, "no gauge of fragmentation told of a request"),
        ("right slots", FailureKind.TOKEN_MISMATCH, "wrong slots change no token"),
    ],
)
def test_what_churn_refuses(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, fault: str, kind: FailureKind, says: str
) -> None:
    monkeypatch.setattr("phases.service_traffic._IDLE_LIMIT_S", 0.1)
    small = churn.Churn(SCALE, slots=500, longest=40)
    with pytest.raises(GateFailure, match=says) as caught:
        churn.churn_tokens(ctx, start=FakeStart(fault), seconds=1.0, churn=small)
    assert caught.value.kind is kind


def test_what_traffic_is_held_against_must_be_whole(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FakeService.answers

    def answers(self: FakeService, prompts: Any, *asked: Any, **options: Any) -> Any:
        found = right(self, prompts, *asked, **options)
        drawn = len(prompts[0]) not in (1, *SCALE.lengths)
        return [dataclasses.replace(one, tokens=()) for one in found] if drawn else found

    monkeypatch.setattr(FakeService, "answers", answers)
    with pytest.raises(GateFailure, match="prompts of traffic: answer 0: expected 30 tokens"):
        in_graphs(ctx, FakeStart())


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("late token", FailureKind.TOKEN_MISMATCH, "answers differ beyond rounding"),
        ("decode: late token", FailureKind.TOKEN_MISMATCH, "beyond rounding; kdtree_mla-plain"),
        ("near-tie", FailureKind.TOKEN_MISMATCH, "part by a near-tie, expected at most 2 beside"),
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
        ("other log", "expected lines 'Decode batch' with 'cuda graph: True', got none"),
        ("no padding", "no graph was replayed with fewer requests than it was captured for"),
        ("decode: eager", "kdtree_mla-plain: .* decode steps ran without a graph"),
        ("decode: other log", "kdtree_mla-plain: its log: expected lines 'Decode batch' with"),
        ("decode: no replay", "kdtree_mla-plain: no graph of plain decode was replayed"),
        ("decode: no padding", "kdtree_mla-plain: no graph was replayed with fewer requests"),
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


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("aborts fail", "traffic: no answer from the server: 404"),
        ("no abort", r"traffic: aborted requests: expected at least 1, got 0 of \d+ requests"),
    ],
)
def test_traffic_in_which_nothing_is_aborted_fails(ctx: Context, fault: str, says: str) -> None:
    with pytest.raises(GateFailure, match=says) as caught:
        in_graphs(ctx, FakeStart(fault))
    assert "kdtree_mla-33: tokens equal" in {figure.name for figure in caught.value.figures}


def test_traffic_of_less_than_ten_minutes_is_no_pass(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_TRAFFIC_S", "0.3")
    with pytest.raises(GateFailure, match=r"traffic: expected 600 s, got \d+ s") as caught:
        graphs.graph_tokens(ctx, scale=SCALE, start=FakeStart())
    assert caught.value.kind is FailureKind.TIMEOUT
    assert "seconds of mixed traffic" in {figure.name for figure in caught.value.figures}


@pytest.mark.parametrize(
    "gate",
    [
        gpu_host.tokens_of_service,
        eager_speed,
        graphs.graph_tokens,
        graph_speed,
    ],
)
def test_a_library_of_other_sources_starts_no_server(
    ctx: Context, gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ctx.scratch / "lib.so"
    monkeypatch.setattr("phases.candidates.library_path", lambda: library)
    start = FakeStart()
    on_gpu = dataclasses.replace(SCALE, device=torch.device("cuda"))
    with pytest.raises(GateFailure, match=r"lib\.so was not built from") as caught:
        gate(ctx, scale=on_gpu, start=start)
    assert caught.value.kind is FailureKind.COMPILE
    assert not start.started


def test_a_server_that_does_not_start_is_said_so(ctx: Context) -> None:
    with pytest.raises(ServiceFailed, match="no such thing"):
        eager(ctx, FakeStart("kdtree_mla-trees does not start"))


@pytest.mark.parametrize("side_by_side", [False, True])
def test_servers_end_where_another_one_fails(ctx: Context, side_by_side: bool) -> None:
    """A server that does not start ends ten minutes of traffic on another, or keeps it from it."""
    begun = time.monotonic()
    start = FakeStart("triton-trees does not start" if side_by_side else "triton does not start")
    scale = dataclasses.replace(SCALE, side_by_side=side_by_side)
    with pytest.raises(ServiceFailed, match="no such thing"):
        graphs.graph_tokens(ctx, scale=scale, start=start, seconds=600.0)
    assert time.monotonic() - begun < 30
    assert side_by_side or len(start.started) == 1, "the others are not started any more"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("odd")])
def test_whatever_ends_a_server_is_what_comes_out(ctx: Context, error: BaseException) -> None:
    """No other server waits for it for ever, as the traffic does for the reference's answers."""

    class Dies(FakeStart):
        @contextlib.contextmanager
        def __call__(self, arguments: Any, **options: Any) -> Any:
            if "kdtree_mla" not in arguments and "NGRAM" not in arguments:
                raise error
            with super().__call__(arguments, **options) as service:
                yield service

    begun = time.monotonic()
    with pytest.raises(type(error)):
        graphs.graph_tokens(ctx, scale=SCALE, start=Dies(), seconds=600.0)
    assert time.monotonic() - begun < 30


def test_a_leak_is_told_where_another_server_dies_later(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phases.service_traffic._IDLE_LIMIT_S", 0.1)
    scale = dataclasses.replace(SCALE, side_by_side=False)
    start = FakeStart("leaks", "triton-trees does not start")
    with pytest.raises(GateFailure, match="KV slots are in use"):
        graphs.graph_tokens(ctx, scale=scale, start=start, seconds=1.0)


def test_one_after_the_other_finds_the_same(ctx: Context) -> None:
    by_turns, at_once = (
        gpu_host.tokens_of_service(
            ctx, scale=dataclasses.replace(SCALE, side_by_side=side_by_side), start=FakeStart()
        )
        for side_by_side in (False, True)
    )
    assert by_turns == at_once


def test_how_long_the_traffic_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KD_TRAFFIC_S", raising=False)
    assert traffic_seconds() == 600
    monkeypatch.setenv("KD_TRAFFIC_S", "45")
    assert traffic_seconds() == 45
    (gate,) = (gate for gate in PHASE.gates if gate.check is graphs.graph_tokens)
    assert gate.time_limit_s / 2 >= LONGEST_TRAFFIC_S
    (gate,) = (gate for gate in CHURN.gates if gate.check is churn.churn_tokens)
    assert gate.time_limit_s >= LONGEST_TRAFFIC_S + 600
    for wrong in ("soon", "0", "nan", "86400"):
        monkeypatch.setenv("KD_TRAFFIC_S", wrong)
        with pytest.raises(ConfigError, match="KD_TRAFFIC_S: expected seconds"):
            traffic_seconds()


def test_speeds_are_held_against_their_bars(ctx: Context) -> None:
    start = FakeStart(seconds=FAST)
    figures = graph_speed(
        ctx,
        scale=SCALE,
        start=start,
        new_tokens=20,
        times_triton={64: 2.0},
        times_plain={64: 2.0},
        decode_times_plain={64: 1.05},
    )
    found = {figure.name: figure.value for figure in figures}
    assert found["times triton at 64"] > found["times no speculation at 64"] > 2
    assert [arguments[arguments.index("--attention-backend") + 1] for arguments, _ in start.started]
    with pytest.raises(GateFailure, match=r"at 64 tokens .* as fast as triton, expected 1000") as e:
        eager_speed(
            ctx, scale=SCALE, start=FakeStart(seconds=FAST), new_tokens=20, bars={64: 1000.0}
        )
    assert e.value.kind is FailureKind.TOO_SLOW
    assert e.value.figures


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("none accepted", "kdtree_mla-9 accepts 1.00 tokens a verification, expected more than 1"),
        ("not counted", "kdtree_mla-9 accepts 0.00 tokens a verification"),
    ],
)
def test_trees_that_were_not_tried_have_no_speed(ctx: Context, fault: str, says: str) -> None:
    start = FakeStart(fault, seconds=FAST)
    with pytest.raises(GateFailure, match=says) as caught:
        eager_speed(ctx, scale=SCALE, start=start, new_tokens=40, bars={64: 0.01})
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH


def test_no_speculation_has_a_bar_of_its_own(ctx: Context) -> None:
    with pytest.raises(
        GateFailure, match=r"at 64 tokens .* as fast as no speculation, expected 1"
    ) as e:
        graph_speed(
            ctx,
            scale=SCALE,
            start=FakeStart(seconds=FAST),
            new_tokens=40,
            times_triton={},
            times_plain={64: 1000.0},
            decode_times_plain={},
        )
    found = {figure.name for figure in e.value.figures}
    assert {"kdtree_mla-9: capture", "kdtree_mla-9: capture memory", "triton-9 step at 32"} <= found


def test_plain_decode_on_the_kernel_has_a_bar_too(ctx: Context) -> None:
    slow = {**FAST, "kdtree_mla": 0.006}
    with pytest.raises(GateFailure, match=r"as fast as triton's plain decode, expected 0\.95") as e:
        graph_speed(
            ctx,
            scale=SCALE,
            start=FakeStart(seconds=slow),
            new_tokens=40,
            times_triton={},
            times_plain={},
            decode_times_plain={64: 0.95},
        )
    found = {figure.name: figure.value for figure in e.value.figures}
    assert found["plain decode: times triton at 64"] == pytest.approx(4 / 6, rel=0.2)


@pytest.mark.parametrize("gate", [eager_speed, graph_speed])
def test_servers_are_timed_by_turns(ctx: Context, gate: Callable[..., Any]) -> None:
    """All have started before one is timed; each has a pass before any has the next."""
    asked: list[str] = []
    right = FakeService.answers

    def answers(self: FakeService, prompts: Any, count: int, **options: Any) -> Any:
        asked.append(self._name)
        return right(self, prompts, count, **options)

    start = FakeStart(seconds=FAST)
    options: dict[str, Any] = {"bars": {64: 0.01}}
    if gate is graph_speed:
        options = {"times_triton": {64: 0.1}, "times_plain": {}, "decode_times_plain": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeService, "answers", answers)
        gate(ctx, scale=SCALE, start=start, new_tokens=20, **options)
    names = ["kdtree_mla-trees", "triton", "triton-trees", "kdtree_mla"]
    one_pass = [name for name in names for _ in range(2)]
    assert asked == (names + one_pass * SCALE.passes) * 2
    assert all("--sleep-on-idle" in arguments for arguments, _ in start.started)


@pytest.mark.parametrize("missing", ["verify: kernel", "decode: kernel"])
@pytest.mark.parametrize("gate", [eager_speed, graph_speed])
def test_a_server_that_is_not_on_its_kernel_has_no_speed(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, gate: Callable[..., Any], missing: str
) -> None:
    """As where a KDTREE_ variable of whoever runs the gate switched it off."""
    line = fake_service.LINE.replace(missing, missing.replace("kernel", "triton"))
    monkeypatch.setattr(fake_service, "LINE", line)
    options: dict[str, Any] = {"bars": {}}
    if gate is graph_speed:
        options = {"times_triton": {}, "times_plain": {}, "decode_times_plain": {}}
    with pytest.raises(GateFailure, match="'verify: kernel; decode: kernel', got") as caught:
        gate(ctx, scale=SCALE, start=FakeStart(seconds=FAST), new_tokens=20, **options)
    assert caught.value.kind is FailureKind.LAUNCH


def test_a_drafter_that_accepts_more_does_not_hide_a_slower_step(ctx: Context) -> None:
    """9 tokens in 2.7 ms against 5 in 2 ms: more tokens a second, and slower all the same."""
    seconds = {"kdtree_mla-trees": 0.0003, "triton-trees": 0.0004, "triton": 0.0004}
    start = FakeStart("most accepted", seconds=seconds)
    with pytest.raises(GateFailure, match=r"at 64 tokens 0\.\d+ times .* triton by the step") as e:
        eager_speed(ctx, scale=SCALE, start=start, new_tokens=200, bars={64: 1.0})
    found = {figure.name: figure.value for figure in e.value.figures}
    assert found["times triton at 64"] > 1
    assert found["kdtree_mla-9 step at 64"] > found["triton-9 step at 64"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("late token", "timed answers differ beyond rounding; kdtree_mla-9 L=32, token 21"),
        ("timed", "2 timed answers differ beyond rounding; kdtree_mla-9 L=32 timed, token 5"),
        (
            "decode: late token",
            "4 timed answers differ beyond rounding; kdtree_mla-plain L=32, token 21",
        ),
    ],
)
@pytest.mark.parametrize("gate", [eager_speed, graph_speed])
def test_other_tokens_have_no_speed(
    ctx: Context, gate: Callable[..., Any], fault: str, says: str
) -> None:
    options: dict[str, Any] = {"bars": {64: 1.0}}
    if gate is graph_speed:
        options = {"times_triton": {32: 1.0, 64: 1.0}, "times_plain": {}, "decode_times_plain": {}}
    start = FakeStart(fault, seconds=FAST)
    with pytest.raises(GateFailure, match=says) as caught:
        gate(ctx, scale=SCALE, start=start, new_tokens=20, **options)
    assert caught.value.kind is FailureKind.TOKEN_MISMATCH
    assert caught.value.figures
    near = FakeStart("near-tie", seconds=FAST)
    assert gate(ctx, scale=SCALE, start=near, new_tokens=20, **options)
