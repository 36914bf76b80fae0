"""Decode speed from outside a server: what is timed, and what it is counted in."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from fake_service import FakeService

from phases.service import Answer, ServiceFailed
from phases.service_graphs import Capture
from phases.service_scale import kernel, plain
from phases.service_speed import Served, Speed, decode_speed, differences


class Clocked:
    """A server whose clock is told: 10 ms an answer, and 1 ms a step."""

    def __init__(self, accepted: int | None) -> None:
        self.now = 0.0
        self._accepted = accepted

    def answers(self, prompts: Any, count: int, *, likely: int = 0) -> list[Answer]:
        steps = count - 1
        verified = 0
        if self._accepted:
            steps = verified = -(-(count - 1) // self._accepted)
        self.now += 0.01 + 0.001 * steps
        return [Answer((1,) * count, verified=verified)]


@pytest.mark.parametrize(
    ("accepted", "per_second"),
    [
        (None, 1000.0),
        # 17 tokens in 3 steps; one of them is the short answer's, which gives 6 tokens for 1.
        (6, 17 / 3 * 1000),
    ],
)
def test_what_a_short_answer_takes_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, accepted: int | None, per_second: float
) -> None:
    server: Any = Clocked(accepted)
    monkeypatch.setattr("time.perf_counter", lambda: server.now)
    speed = decode_speed(server, (1, 2, 3), new_tokens=16)
    assert speed.tokens_per_second == pytest.approx(per_second)
    assert speed.accept_length == pytest.approx(17 / 3 if accepted else 0)
    assert (speed.length, speed.answer.tokens) == (3, (1,) * 18)


def test_time_and_verifications_are_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that learns: from the third answer on, 6 tokens a verification and not 1."""
    server: Any = Clocked(1)
    monkeypatch.setattr("time.perf_counter", lambda: server.now)
    asked = server.answers

    def answers(prompts: Any, count: int, *, likely: int = 0) -> list[Answer]:
        server.count = getattr(server, "count", 0) + 1
        server._accepted = 6 if server.count > 3 else 1
        found: list[Answer] = asked(prompts, count, likely=likely)
        return found

    server.answers = answers
    speed = decode_speed(server, (1, 2, 3), new_tokens=16)
    assert speed.accept_length == pytest.approx(17 / 3)
    assert speed.tokens_per_second == pytest.approx(17 / 3 * 1000)


def test_a_clock_that_stands_still_gives_no_speed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("")
    server: Any = FakeService(tmp_path / "log", "triton", 1, (), 0.0)
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    with pytest.raises(ServiceFailed, match="nothing was decoded"):
        decode_speed(server, (1, 2, 3), new_tokens=16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda answer: Answer(()), "a prompt of 3 tokens: answer 0: expected 18 tokens .* got 0"),
        (lambda answer: Answer(answer.tokens, ending="abort"), "got 18 and 'abort'"),
    ],
)
@pytest.mark.parametrize("timed", [False, True])
def test_an_answer_that_is_not_whole_has_no_speed(
    monkeypatch: pytest.MonkeyPatch, change: Any, says: str, timed: bool
) -> None:
    server: Any = Clocked(None)
    monkeypatch.setattr("time.perf_counter", lambda: server.now)
    right, asked = server.answers, []

    def answers(prompts: Any, count: int, *, likely: int = 0) -> list[Answer]:
        asked.append(count)
        spoiled = count == 18 and (not timed or len(asked) > 1)
        (answer,) = right(prompts, count)
        return [change(answer) if spoiled else answer]

    server.answers = answers
    with pytest.raises(ServiceFailed, match=says):
        decode_speed(server, (1, 2, 3), new_tokens=16)
    assert len(asked) == (3 if timed else 1)


def test_one_verification_for_both_answers_gives_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 more tokens, where one tree gives 9: then the time of the difference is of nothing."""
    server: Any = Clocked(9)
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: server.now + 1e-6 * next(ticks) ** 2)
    with pytest.raises(ServiceFailed, match="10 tokens took 1 verifications and 2 took 1"):
        decode_speed(server, (1, 2, 3), new_tokens=8)


def test_timed_answers_are_compared_too() -> None:
    def served(variant: Any, first: tuple[int, ...], *timed: tuple[int, ...]) -> Served:
        answer = Answer(first, likely=(((-1.0, 5), (-1.1, 6)),) * 3)
        return Served(variant, 1.0, Capture(0, 0, 0), 0.0, (Speed(9, 1.0, 0.0, answer, timed),))

    ours = served(kernel(9), (5, 5, 5), (5, 7), (5, 6, 5))
    found = differences(ours, served(plain(), (5, 5, 5)), 0.2)
    assert [(one.where, one.step, one.near_tie) for one in found] == [
        ("kdtree_mla-9 L=9 timed", 1, False),
        ("kdtree_mla-9 L=9 timed", 1, True),
    ]
