"""The client of a load test against a server of known pace, which fails on demand.

Times are bounded from below by the server's pace, which no delay shortens; from above only by what
a machine that stands still for a while would still keep.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from paced_server import PacedServer, right_tokens

from phases.load_client import (
    DRAIN,
    MEASURED,
    MOST_FORMS,
    OTHER_PROMPT,
    RAMP,
    TOO_MANY,
    UNTOLD,
    ClientFailed,
    Order,
    Tick,
    _Client,
    running,
)
from phases.load_point import Point
from phases.load_prompts import drawn

PROMPTS = drawn([tuple(range(2 + one, 34 + one)) for one in range(3)], fresh=False, vocabulary=64,
                seed=1)  # fmt: skip
NEW = 12


def loaded(url: str, **order: Any) -> tuple[Point, list[Tick], str]:
    options: dict[str, Any] = {"seconds": 0.5, "judged": 3, "silence_s": 60.0}
    asked = Order(url, PROMPTS, NEW, **options | order)
    point = Point("paced", 32, asked.concurrency, asked.rate, NEW)
    with running(asked) as client:
        ticks = list(client.ticks())
    for tick in ticks:
        point.add(tick)
    return point, ticks, client.why


@contextlib.contextmanager
def paced(*faults: str, **options: Any) -> Iterator[PacedServer]:
    with PacedServer(*faults, **options).serving() as server:
        yield server


def test_a_closed_loop_has_so_many_in_flight() -> None:
    with paced(pace_s=0.02) as server:
        point, ticks, why = loaded(server.url, concurrency=3, seconds=1.0)
    assert not why
    assert server.most_open == 3 == point.most_in_flight
    assert point.right
    assert point.answers >= 3
    assert point.seconds >= 1.0
    assert {tick.stage for tick in ticks} == {RAMP, MEASURED, DRAIN}
    assert sum(tick.tokens for tick in ticks) == NEW * len(server.streamed)
    assert point.requests == len(server.streamed)
    # No token before its time: what a busy machine adds makes gaps longer, and none shorter in sum.
    assert point.inter_token.mean is not None
    assert 0.015 <= point.inter_token.mean < 0.5
    assert point.inter_token.total == pytest.approx(point.chunk_gap.total)
    assert 0 < point.tokens_per_second <= 3 / 0.015
    middle = point.answer.percentile(50)
    assert middle is not None
    assert middle >= (NEW - 1) * 0.015


def test_a_chunk_of_several_tokens_shares_its_gap() -> None:
    """12 tokens are 1, 4, 4 and 3: three gaps for a reader, eleven of a token."""
    with paced(pace_s=0.05, a_chunk=4) as server:
        point, _, _ = loaded(server.url, rate=4.0, seconds=1.0)
    assert point.answers > 0
    answers = point.answers
    # An open loop is measured from its beginning to its end; what drains is not of the gaps.
    assert point.chunk_gap.count <= 3 * answers
    shared = point.inter_token
    assert point.chunk_gap.count < shared.count <= 11 * answers
    assert shared.total == pytest.approx(point.chunk_gap.total)
    assert point.accept_length == pytest.approx(11 / 3)  # the first token is the prefill's
    assert point.answer.least >= 3 * 0.05 - 0.01


@pytest.mark.parametrize("incremental", [False, True])
def test_answers_are_kept_as_tokens(incremental: bool) -> None:
    with paced(incremental=incremental) as server:
        point, _, _ = loaded(server.url, concurrency=2)
    wanted = {one: [tuple(right_tokens(list(PROMPTS.tokens(one)), NEW))] for one in range(3)}
    assert {one: point.forms.get(one) for one in (0, 1)} == {one: wanted[one] for one in (0, 1)}
    assert set(point.forms) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("http 500", "http 500", "out of memory"),
        ("error", "error", "no more slots"),
        ("abort", "abort", "told to"),
        ("closes", "closed", "after 6 tokens"),
        ("resets", "closed", ""),
        ("short", "short", "7 of 12 tokens, ended by 'stop'"),
        ("endless", "endless", "13 of 12 tokens, and no end"),
        ("garbage", "garbage", "no size of a chunk"),
    ],
)
def test_an_error_is_counted_by_its_kind(fault: str, kind: str, said: str) -> None:
    with paced(fault, every=3) as server:
        point, _, why = loaded(server.url, concurrency=2)
    assert not why
    assert set(point.errors) == {kind}
    assert point.answers > 0
    assert not point.right
    assert point.said[0].startswith(kind)
    assert said in point.said[0]


@pytest.mark.parametrize("fault", ["hangs", "drips"])
def test_a_server_that_hangs_is_given_up(fault: str) -> None:
    """Bytes without a token are no answer either."""
    begun = time.monotonic()
    with paced(fault) as server:
        point, _, why = loaded(server.url, concurrency=1, silence_s=0.5, seconds=60)
    assert "failed one after the other, the last one: silent" in why
    assert set(point.errors) == {"silent"}
    assert "no token for 0.5 s" in point.said[0]
    assert time.monotonic() - begun < 60


def test_a_server_without_a_byte_is_given_up() -> None:
    with paced("silent") as server:
        point, _, why = loaded(server.url, concurrency=2, silence_s=0.5, seconds=60)
    assert "silent" in why
    assert not point.tokens
    assert point.first_token.count == 0


def test_no_server_is_given_up() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    point, _, why = loaded(url, concurrency=2, seconds=60)
    assert "the last one: refused" in why
    assert set(point.errors) == {"refused"}


def test_an_open_loop_sends_when_it_is_due() -> None:
    with paced(pace_s=0.05) as server:
        point, ticks, why = loaded(server.url, rate=20.0, seconds=1.5, seed=3)
        again, _, _ = loaded(server.url, rate=20.0, seconds=1.5, seed=3)
    assert not why
    assert point.requests == again.requests > 10  # drawn, and not the machine's
    assert point.answers == point.requests
    assert {tick.stage for tick in ticks} == {MEASURED, DRAIN}
    assert server.most_open > 1


def test_an_open_loop_that_a_server_cannot_keep_up_with_is_given_up() -> None:
    with paced(pace_s=0.5) as server:
        _, _, why = loaded(server.url, rate=50.0, seconds=30.0, most=8)
    assert "8 requests in flight: the server falls behind" in why


def test_a_client_that_is_told_to_stop_hangs_up() -> None:
    with paced(pace_s=0.05) as server:
        order = Order(server.url, PROMPTS, 1000, 600.0, concurrency=2)
        with running(order) as client:
            for tick in client.ticks():
                if tick.stage == MEASURED and tick.tokens:
                    break
            client.stop()
            rest = client.rest()
        deadline = time.monotonic() + 20
        while server.open and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server.open
    assert all(not tick.errors for tick in rest)


def test_a_client_that_dies_is_an_error() -> None:
    with paced(pace_s=0.05) as server:
        order = Order("http://127.0.0.1:1:1", PROMPTS, 8, 1.0, concurrency=1)  # two ports
        with running(order) as client, pytest.raises(ClientFailed, match="died"):
            list(client.ticks())
    assert not server.streamed


def test_answers_beyond_those_that_are_kept_are_counted() -> None:
    """Each answer is another: of one prompt, as the others are not judged."""
    with paced("drifts", pace_s=0.001) as server:
        point, _, _ = loaded(server.url, concurrency=8, seconds=3.0, judged=1)
    assert set(point.forms) == {0}
    kept = len(point.forms[0])
    assert kept <= MOST_FORMS
    assert (point.unjudged[TOO_MANY] > 0) == (kept == MOST_FORMS)
    ended = point.requests - point.failed
    assert kept + point.unjudged[TOO_MANY] + point.unjudged[OTHER_PROMPT] == ended


def test_answers_without_ids_are_counted() -> None:
    with paced("no ids", pace_s=0.001) as server:
        point, _, _ = loaded(server.url, concurrency=2)
    assert point.forms == {}
    assert point.unjudged == {UNTOLD: point.requests}


def test_the_client_keeps_so_many_and_counts_the_rest() -> None:
    """Without a server: what an answer's end does."""
    client = _Client(Order("http://127.0.0.1:1", PROMPTS, NEW, 1.0, concurrency=1, judged=1), None)  # type: ignore[arg-type]
    for answer in range(MOST_FORMS + 5):
        client._keep(0, [answer])
    client._keep(0, [3])  # one that is kept
    client._keep(2, [3])
    assert len(client._tick.forms) == MOST_FORMS
    assert client._tick.unjudged == {TOO_MANY: 5, OTHER_PROMPT: 1}
