"""Decode speed from outside a server: what is timed, and what it is counted in."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from fake_service import FakeService

from phases.service import Answer, ServiceFailed
from phases.service_speed import decode_speed


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


def test_a_clock_that_stands_still_gives_no_speed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("")
    server: Any = FakeService(tmp_path / "log", "triton", 1, (), 0.0)
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    with pytest.raises(ServiceFailed, match="nothing was decoded"):
        decode_speed(server, (1, 2, 3), new_tokens=16)
