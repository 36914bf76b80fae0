"""The program on a host by its functions: damaged files, and services that say nonsense."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from remote import agent


def test_no_gates_begin_between_the_look_and_the_removal(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is about to be removed cannot be marked any more, else gates lose their files."""
    for name in "abc":
        folder = tmp_path / "releases" / name
        folder.mkdir(parents=True)
        (folder / "release.json").write_text("{}")
        agent.promoted(str(tmp_path), {"release": name, "result": "promoted"})
    rename = pathlib.Path.rename

    def watched(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        with (path / "release.json").open() as mark, pytest.raises(BlockingIOError):
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", watched)
    assert agent.prune(str(tmp_path), 1) == {"removed": ["a"], "in_use": []}
    assert sorted(one.name for one in (tmp_path / "releases").iterdir()) == ["b", "c"]


@pytest.mark.parametrize("content", ["[" * 100_000, '{"sequence": "x"}', '{"placed": {}}'])
def test_a_release_that_says_nonsense_is_named(tmp_path: pathlib.Path, content: str) -> None:
    for name, text in (("a", content), ("b", '{"sequence": 2}')):
        (tmp_path / "releases" / name).mkdir(parents=True)
        (tmp_path / "releases" / name / "release.json").write_text(text)
    with pytest.raises(agent.Refused, match=r"move that release away by hand \(mv .*/a ELSEWHERE"):
        agent.releases(str(tmp_path))


@pytest.mark.parametrize("name", ["promotions.jsonl", "audit.jsonl", "lock.json", "tokens.json"])
def test_what_is_nested_without_end_is_damaged(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 100_000 + "\n")
    for do in ("promotions", "audited", "lock_holder", "tokens"):
        more = {"last": 5} if do == "audited" else {}
        answer = agent.answer({"do": do, "root": str(tmp_path), **more})
        assert "\n" not in str(answer)
    assert "damaged" in str(agent.answer({"do": "lock_holder", "root": str(tmp_path)})) or (
        name != "lock.json"
    )


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("service", {"do": "put_service", "name": "x", "text": ""}),
        ("jobs", {"do": "start_job", "name": "x", "command": ["true"], "environment": {}}),
        ("releases", {"do": "prepare"}),
        ("incoming", {"do": "prepare"}),
    ],
)
def test_a_file_in_a_folder_s_place_comes_with_what_to_do(
    tmp_path: pathlib.Path, name: str, request_: dict[str, Any]
) -> None:
    """In the words of `kd hosts check`, which looks for that before a promotion does."""
    (tmp_path / name).write_text("")
    said = agent.answer({**request_, "root": str(tmp_path)})["error"]
    assert said.endswith(
        f"expected a folder, got a file: move it away by hand (mv {tmp_path / name} ELSEWHERE)"
    )
    with pytest.raises(agent.Refused) as caught:
        agent.require_folders(str(tmp_path))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"vocab_size": 1e999}', "no number of tokens"),
        ('{"vocab_size": 9, "max_position_embeddings": 1e999}', "no number of tokens"),
        ('{"vocab_size": NaN}', "no number of tokens"),
        ('{"vocab_size": -5}', "no number of tokens"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_model_that_says_nonsense_is_one_line(
    tmp_path: pathlib.Path, config: str, says: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    request = {"do": "model_of", "root": str(tmp_path), "path": str(tmp_path)}
    assert says in agent.answer(request)["error"]
    request["path"] = "~nobodyx/model"
    assert agent.answer(request)["error"].startswith("~nobodyx/model: ")


class TestMetrics:
    """Whatever a service answers, `kd status` is told in time, and told no nonsense."""

    GOOD = b"kd:a 1\nother 2\nkd:b 3\n"

    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
        monkeypatch.setattr(agent, "_METRICS_S", 1.0)
        monkeypatch.setattr(agent, "listens", lambda root, leader, port: None)

        def told(*pieces: bytes, again: bytes = b"", pause_s: float = 0.0) -> str:
            """again: what comes after that, for ever, with so many seconds in between."""

            def serve() -> None:
                connection, _ = server.accept()
                with contextlib.suppress(OSError), connection:
                    connection.recv(1 << 16)
                    for piece in pieces:
                        connection.sendall(piece)
                    while again:
                        connection.sendall(again)
                        time.sleep(pause_s)

            with socket.create_server(("127.0.0.1", 0)) as server:
                thread = threading.Thread(target=serve, daemon=True)
                thread.start()
                begun = time.monotonic()
                port = server.getsockname()[1]
                text = agent.metrics("/nowhere", 2, port, "kd:")["text"]
                assert time.monotonic() - begun < 5.0
                thread.join()
            return text

        return told

    HEAD = b"HTTP/1.1 200 OK\r\n\r\n"

    def test_its_own_lines_are_told(self, told: Callable[..., str]) -> None:
        assert told(self.HEAD, self.GOOD) == "kd:a 1\nkd:b 3\n"

    @pytest.mark.parametrize(
        ("pieces", "again", "pause_s"),
        [
            pytest.param((b"HTTP/1.1 200 OK\r\n",), b"X: y\r\n", 0.3, id="headers now and then"),
            pytest.param((), b"HTTP/1.1 100 Continue\r\n\r\n", 0.0, id="continues for ever"),
            pytest.param((), b"H", 0.3, id="a status now and then"),
            pytest.param((b"HTTP/1.1 200 OK\r\n\r\n",), b"k", 0.3, id="a byte now and then"),
            pytest.param((b"\0\xff" * 99,), b"", 0.0, id="no HTTP"),
            pytest.param((), b"", 0.0, id="closes"),
            pytest.param((b"HTTP/1.1 500 No\r\n\r\n", b"kd:a 1\n"), b"", 0.0, id="an error"),
            pytest.param(
                (b"HTTP/1.1 302 F\r\nLocation: http://[x/\r\n\r\n",), b"", 0.0, id="moved"
            ),
            pytest.param(
                (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",),
                *(b"", 0.0),
                id="broken chunks",
            ),
        ],
    )
    def test_what_says_nothing_says_so_in_time(
        self, told: Callable[..., str], pieces: tuple[bytes, ...], again: bytes, pause_s: float
    ) -> None:
        assert told(*pieces, again=again, pause_s=pause_s) == ""

    def test_what_came_before_the_limit_counts(self, told: Callable[..., str]) -> None:
        assert told(self.HEAD, self.GOOD, again=b"x", pause_s=0.3) == "kd:a 1\nkd:b 3\n"

    def test_a_line_of_megabytes_is_passed_over(self, told: Callable[..., str]) -> None:
        """Its pieces are no lines, whatever they begin with."""
        huge = b"kd:c " * (agent._METRICS_LINE_BYTES // 5 * 5)
        assert len(huge) > 3 * agent._METRICS_LINE_BYTES
        assert told(self.HEAD, huge, b"\n", self.GOOD) == "kd:a 1\nkd:b 3\n"

    def test_no_more_is_told_than_a_connection_carries(self, told: Callable[..., str]) -> None:
        text = told(self.HEAD, again=b"kd:a 1\n" * 10_000)
        assert 0 < len(text) <= agent._METRICS_KEPT_BYTES

    def test_bytes_that_are_no_text_are_told_as_such(self, told: Callable[..., str]) -> None:
        assert told(self.HEAD, b"kd:a \xff\0\n") == "kd:a \ufffd\0\n"
