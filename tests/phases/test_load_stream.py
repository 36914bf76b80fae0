"""What a server streams, however its bytes are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phases.load_stream import Events, Pieces, StreamBroken

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def event(tokens: list[int], count: int, ending: Any = None, **more: Any) -> bytes:
    about = {"finish_reason": ending, "completion_tokens": count, **more}
    return json.dumps({"output_ids": tokens, "meta_info": about}, separators=(",", ":")).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_wherever_the_bytes_are_cut(size: int) -> None:
    whole = HEAD + chunked(b"data: one\n\nda", b"ta: two\n", b"\n: a comment\n\ndata: [DONE]\n\n")
    events, found = Events(), []
    for begin in range(0, len(whole), size):
        found += events.feed(whole[begin : begin + size])
    assert found == [b"one", b"two", b"[DONE]"]
    assert events.ended
    assert events.status == 200


def test_a_body_of_known_length_and_one_to_the_end() -> None:
    events = Events()
    assert events.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\ndata: a\n\n..") == [b"a"]
    assert events.ended
    events = Events()
    assert events.feed(b"HTTP/1.0 200 OK\r\n\r\ndata: a\n\ndata: b") == [b"a"]
    assert events.feed(b"c\n") == [b"bc"]
    assert not events.ended


def test_what_a_failure_says_is_kept() -> None:
    events = Events()
    assert events.feed(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n") == []
    assert events.feed(chunked(b"data: try later")) == []
    assert (events.status, events.ended, events.body) == (503, True, b"data: try later")


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 what\r\n\r\n", b"\x00" * 9])
def test_what_is_no_http_is_refused(said: bytes) -> None:
    with pytest.raises(StreamBroken, match="no HTTP"):
        Events().feed(said)


def test_a_chunk_without_a_size_is_refused() -> None:
    with pytest.raises(StreamBroken, match="no size"):
        Events().feed(HEAD + b"xyz\r\n")


def test_an_answer_that_comes_whole_each_time() -> None:
    pieces = Pieces()
    assert pieces.take(event([5], 1)) == 1
    assert pieces.take(event([5, 6, 7, 8], 4)) == 3
    # From here on its count alone is read, so that ids which are not there are not missed.
    assert pieces.take(event([], 6)) == 2
    assert pieces.take(event([5, 6, 7, 8, 9, 1, 2], 7, {"type": "length"}, spec_verify_ct=2)) == 1
    assert pieces.take(b"[DONE]") == 0
    assert pieces.tokens == [5, 6, 7, 8, 9, 1, 2]
    assert (pieces.ending, pieces.verified, pieces.count) == ("length", 2, 7)


def test_an_answer_that_comes_in_parts() -> None:
    pieces = Pieces()
    assert pieces.take(event([5], 1)) == 1
    assert pieces.take(event([6, 7, 8], 4)) == 3
    assert pieces.take(event([], 4)) == 0
    assert pieces.take(event([9], 5, {"type": "length"})) == 1
    assert pieces.tokens == [5, 6, 7, 8, 9]


def test_an_answer_in_words_alone_has_no_token_ids() -> None:
    about = {"completion_tokens": 3, "finish_reason": {"type": "length"}}
    pieces = Pieces()
    assert pieces.take(json.dumps({"text": "a b c", "meta_info": about}).encode()) == 3
    assert pieces.tokens is None
    assert pieces.ending == "length"


def test_errors_of_the_server_are_said() -> None:
    pieces = Pieces()
    assert pieces.take(b'{"error": {"message": "too long", "code": 400}}') == 0
    assert pieces.error == "too long"
    pieces = Pieces()
    pieces.take(event([1], 1, {"type": "abort", "message": "told to"}))
    assert (pieces.ending, pieces.error) == ("abort", "told to")


@pytest.mark.parametrize(
    "said",
    [
        *(b"{", b"[1]", b'"x"', event([1, 2], 7), event([1], 1, "length"), b'{"output_ids": 3}'),
        *(b'{"meta_info": {"completion_tokens": 1e999}}', b"[" * 60_000),
    ],
)
def test_what_is_no_event_of_sglangs_is_refused(said: bytes) -> None:
    with pytest.raises(StreamBroken, match="no event"):
        Pieces().take(said)


def test_an_event_that_never_ends_is_not_gathered() -> None:
    events = Events()
    events.feed(b"HTTP/1.1 200 OK\r\n\r\ndata: ")
    with pytest.raises(StreamBroken, match="an event without an end"):
        events.feed(b"x" * (17 << 20))


def test_fewer_tokens_than_before_are_refused() -> None:
    pieces = Pieces()
    pieces.take(event([1, 2, 3], 3))
    with pytest.raises(StreamBroken, match="2 tokens after 3"):
        pieces.take(event([1, 2], 2))
