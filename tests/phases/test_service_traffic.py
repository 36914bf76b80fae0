"""Mixed traffic: what is sent, and what it must not leave behind."""

from __future__ import annotations

import dataclasses
import pathlib
import urllib.error
from typing import Any

import pytest
from fake_service import FakeService

from phases.gate import GateFailure
from phases.service import ServiceFailed
from phases.service_tokens import demand
from phases.service_traffic import (
    Traffic,
    demand_traffic,
    leaks_in,
    mixed_prompts,
    run_traffic,
    traffic_rounding,
)

PROMPTS = mixed_prompts(64, 200, 8, 1)


def traffic(
    tmp_path: pathlib.Path, *faults: str, log: str = "well\n", seconds: float = 0.7
) -> Traffic:
    path = tmp_path / "log"
    path.write_text(log)
    right: Any = FakeService(path, "triton", 1, (), 0.0)
    server: Any = FakeService(path, "kdtree_mla-trees", 9, faults, 0.0005)
    reference = right.answers(PROMPTS, 26, likely=4)
    return run_traffic(
        server, PROMPTS, reference, seconds=seconds, bound=0.01, seed=1, nodes=9, workers=3
    )


def test_rounding_is_measured_in_traffic_of_its_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log"
    server: Any = FakeService(path, "triton", 1, (), 0.0)
    reference = server.answers(PROMPTS, 26, likely=4)
    asked: list[str] = []
    found = traffic_rounding(
        server, PROMPTS, reference, seconds=0.3, seed=1, workers=3, note=asked.append
    )
    assert found == 0.0
    assert len(asked) > 3
    uneven = [
        dataclasses.replace(
            one,
            likely=tuple(((best + 0.07, token), *rest) for (best, token), *rest in one.likely),
        )
        for one in reference
    ]
    found = traffic_rounding(server, PROMPTS, uneven, seconds=0.3, seed=1, workers=3)
    assert found == pytest.approx(0.07)


def test_prompts_are_ragged_and_share_prefixes() -> None:
    sizes = [len(prompt) for prompt in PROMPTS]
    assert min(sizes) >= 1
    assert len(set(sizes)) > 4
    assert max(sizes) <= 200
    halves = [
        one[: len(two) // 2] == two[: len(two) // 2]
        for one, two in zip(PROMPTS[::2], PROMPTS[1::2], strict=True)
    ]
    assert any(halves)


def test_every_answer_is_compared_and_aborted_ones_as_far_as_they_go(
    tmp_path: pathlib.Path,
) -> None:
    found = traffic(tmp_path)
    assert found.requests > 20
    assert found.seconds >= 0.7
    assert found.comparison.answers + found.hung_up == found.requests
    assert found.comparison.tokens > 0
    assert found.comparison.tokens == found.comparison.wanted
    demand(found.comparison)
    demand_traffic(found)


def test_traffic_that_was_not_mixed_fails(tmp_path: pathlib.Path) -> None:
    found = traffic(tmp_path)
    nothing = dataclasses.replace(found.comparison, answers=0)
    for one, says in (
        (dataclasses.replace(found, aborted=0), "aborted requests: expected at least 1, got 0"),
        (dataclasses.replace(found, hung_up=0), "callers that hung up: expected at least 1"),
        (dataclasses.replace(found, comparison=nothing), "answers: expected at least 1, got 0"),
    ):
        with pytest.raises(GateFailure, match=says):
            demand_traffic(one)


def test_an_abort_that_fails_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ServiceFailed, match="no answer from the server: 404"):
        traffic(tmp_path, "aborts fail")


@pytest.mark.parametrize(
    ("cause", "left"),
    [
        (TimeoutError(), True),
        (urllib.error.URLError(TimeoutError("timed out")), True),  # while it connects
        (urllib.error.URLError(ConnectionRefusedError()), False),
        (ConnectionResetError(), False),
    ],
)
def test_a_caller_that_ran_out_of_time_has_hung_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cause: Exception, left: bool
) -> None:
    right = FakeService.answers

    def answers(
        self: FakeService, *asked: Any, limit_s: float | None = None, **options: Any
    ) -> Any:
        if limit_s is not None:
            raise ServiceFailed("no answer from the server") from cause
        return right(self, *asked, **options)

    monkeypatch.setattr(FakeService, "answers", answers)
    if left:
        assert traffic(tmp_path, seconds=1.0).hung_up > 0
    else:
        with pytest.raises(ServiceFailed):
            traffic(tmp_path, seconds=1.0)


def test_a_wrong_token_is_found(tmp_path: pathlib.Path) -> None:
    with pytest.raises(GateFailure, match="answers differ beyond rounding; traffic, prompt"):
        demand(traffic(tmp_path, "late token").comparison)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tokens: (*tokens[:-1], 999), "999 for"),
        (lambda tokens: (*tokens, *[1] * 40), "beyond the reference's end|not among the likely"),
    ],
)
def test_an_aborted_answer_is_held_against_the_reference_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    """Its tokens must be right, and no more than the last trees can have given."""
    right = FakeService.answers

    def answers(self: FakeService, *asked: Any, names: Any = None, **options: Any) -> Any:
        found = right(self, *asked, names=names, **options)
        return [
            dataclasses.replace(one, tokens=change(one.tokens)) if one.ending == "abort" else one
            for one in found
        ]

    monkeypatch.setattr(FakeService, "answers", answers)
    found = traffic(tmp_path)
    assert found.aborted > 0
    with pytest.raises(GateFailure, match=says):
        demand(found.comparison)


def test_an_aborted_answer_may_have_more_than_was_asked_for(tmp_path: pathlib.Path) -> None:
    """As `FakeService` gives for prompts of odd length; it is compared to its end."""
    found = traffic(tmp_path, seconds=1.5)
    assert found.aborted > 1
    demand(found.comparison)
    assert found.comparison.tokens == found.comparison.wanted


def test_slots_that_stay_in_use_have_leaked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phases.service_traffic._IDLE_LIMIT_S", 0.1)
    with pytest.raises(GateFailure, match="KV slots are in use with no request"):
        traffic(tmp_path, "leaks")


def test_a_request_that_fails_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ServiceFailed, match="no answer from the server"):
        traffic(tmp_path, "breaks")


def test_what_the_log_says_of_leaks_fails(tmp_path: pathlib.Path) -> None:
    line = "[x] pool memory leak detected! [full] total=9"
    assert leaks_in(f"well\n{line}\n") == [line]
    with pytest.raises(GateFailure, match=r"the server's log says: \[x\] pool memory leak"):
        traffic(tmp_path, log=f"{line}\n", seconds=0.1)
