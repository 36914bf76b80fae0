"""What an adversary found in the change of a live service.

The promoter runs in this process here, with a manager that starts a server in a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import stand_in_server
from click.testing import CliRunner, Result
from stand_in_host import NEW_TOKENS, StandInHost, interrupts

import tasks
from phases.runner import signals_interrupt
from remote import agent, managers, promoter
from remote.errors import TransportError, UnknownEnd
from remote.local import LocalTransport
from remote.promotion import Outcome, Target

HEALTH = {
    "start_ceiling_s": 5.0,
    "stalled_log_s": 3.0,
    "poll_s": 0.05,
    "sustain_s": 0.2,
    "answer_s": 1.0,
}
RIGHT = [3, 1, 4]


def answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
    return head.encode() + body


def healthy(connection: socket.socket) -> None:
    connection.sendall(answer(b"ok"))


def says(*tokens: object) -> Callable[[socket.socket], None]:
    body = json.dumps([{"output_ids": list(tokens), "meta_info": {}}]).encode()
    return lambda connection: connection.sendall(answer(body))


class Server:
    """It answers a request for its health and one for tokens as the two functions do."""

    def __init__(
        self,
        port: int,
        tokens: Callable[[socket.socket], None],
        health: Callable[[socket.socket], None] = healthy,
    ) -> None:
        self._listens = socket.create_server(("127.0.0.1", port))
        self._does = {b"GET": health, b"POST": tokens}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listens.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                asked = connection.recv(1 << 16)
                self._does[asked.split(b" ")[0]](connection)
            except (OSError, KeyError):
                pass

    def close(self) -> None:
        self._listens.shutdown(socket.SHUT_RDWR)
        self._listens.close()


class Manager:
    """It starts the server that `service.json` names."""

    def __init__(self, root: pathlib.Path, servers: dict[str, Callable[[], Server]]) -> None:
        self._root, self._servers = root, servers
        self.serves: str | None = None
        self._server: Server | None = None

    def start(self) -> None:
        name = json.loads((self._root / "service/service.json").read_text())["command"][0]
        self._server, self.serves = self._servers[name](), name

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self.serves = None

    def status(self) -> dict[str, Any]:
        running = self._server is not None
        return {"state": "running" if running else "stopped", "pid": None, "said": ""}


def target(name: str) -> dict[str, Any]:
    service = {"command": [name], "environment": {}, "from_host": []}
    return {"release": None, "phase": None, "name": name, "service": service}


class Rig:
    """What is live is `good`; `bad` is what a test makes of it."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.said: list[dict[str, Any]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.servers: dict[str, Callable[[], Server]] = {
            "good": lambda: Server(self.port, says(*RIGHT)),
        }
        self.manager = Manager(root, self.servers)
        self.token = "t"
        monkeypatch.setattr(managers, "manager_of", lambda *of_no_use: self.manager)
        monkeypatch.setattr(promoter, "_ignore_signals", lambda: None)
        agent.prepare(str(root))
        agent.lock(str(root), "me", "kd", self.token)
        agent.promoted(str(root), {**target("good"), "result": "promoted", "by": "me"})
        agent.put_service(str(root), "service.json", json.dumps(target("good")["service"]))
        self.manager.start()

    def bad(
        self,
        tokens: Callable[[socket.socket], None],
        health: Callable[[socket.socket], None] = healthy,
    ) -> None:
        self.servers["bad"] = lambda: Server(self.port, tokens, health)

    def promoter(
        self,
        what: str = "promote",
        port: int | None = None,
        others: Mapping[str, list[int]] = MappingProxyType({}),
        seen: float | None = None,
    ) -> promoter.Promoter:
        request = {
            "root": str(self.root),
            "what": what,
            "manager": {},
            "port": port or self.port,
            "health": HEALTH,
            "gpu": False,
            "model": str(self.root / "model"),
            "by": "me",
            "command": f"kd {what}",
            "token": self.token,
            "seen": seen,
            "keep": 1,
            "new_tokens": len(RIGHT),
            "checks": [{"prompt": [1, 2], "tokens": RIGHT, "others": others}],
        }
        return promoter.Promoter(request, self.said.append)

    def promote(self, name: str = "bad") -> dict[str, Any]:
        return self.promoter().activate(target(name), back=False)

    def live(self) -> str:
        return str(agent.promotions(str(self.root))["live"]["name"])

    def close(self) -> None:
        self.manager.stop()


@pytest.fixture
def rig(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path / "root", monkeypatch)
    yield made
    made.close()


def _forever(connection: socket.socket) -> None:
    """Never so long without a byte that a socket's time limit would end it."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n" if connection.fileno() % 2 else b"Y: y\r\n")
        time.sleep(0.3)


def _slow_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n[")
    while True:
        connection.sendall(b" ")
        time.sleep(0.3)


def _broken_error(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")


def _elsewhere(connection: socket.socket) -> None:
    connection.sendall(answer(b"", "302 Found", "Location: http://[x/health\r\n"))


@pytest.mark.parametrize(
    ("tokens", "health"),
    [
        pytest.param(says(float("inf")), healthy, id="infinite token"),
        pytest.param(_broken_error, healthy, id="broken error page"),
        pytest.param(says(*RIGHT), _elsewhere, id="health elsewhere"),
        pytest.param(_slow_body, healthy, id="a byte now and then"),
        pytest.param(says(*RIGHT), _forever, id="health of endless headers"),
        pytest.param(
            lambda one: one.sendall(answer(b"[" * 100_000)), healthy, id="deeply nested answer"
        ),
        pytest.param(lambda one: one.sendall(b"\0\xff" * 99), healthy, id="no HTTP"),
        pytest.param(lambda one: one.sendall(answer(b"<html>")), healthy, id="HTML"),
        pytest.param(lambda one: None, healthy, id="closes"),
        pytest.param(lambda one: one.sendall(answer(b"[]")), healthy, id="no answers"),
        pytest.param(lambda one: one.sendall(answer(b"null")), healthy, id="null"),
    ],
)
def test_whatever_a_server_answers_what_was_live_serves_again(
    rig: Rig,
    tokens: Callable[[socket.socket], None],
    health: Callable[[socket.socket], None],
) -> None:
    rig.bad(tokens, health)
    ends = rig.promote()
    assert ends["result"] == "restored", ends
    assert len(ends["text"]) < 1000
    assert "\n" not in ends["text"]
    assert (rig.manager.serves, rig.live()) == ("good", "good")


def _failing(
    monkeypatch: pytest.MonkeyPatch, name: str, does: Callable[..., Any], when: Callable[..., bool]
) -> None:
    def instead(*given: Any, **more: Any) -> Any:
        if when(*given, **more):
            raise OSError(28, "No space left on device")
        return does(*given, **more)

    monkeypatch.setattr(agent, name, instead)


def test_what_the_log_has_is_live_though_the_audit_log_is_full(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.bad(says(*RIGHT))
    _failing(monkeypatch, "audit", agent.audit, lambda root, entry: entry["result"] == "promoted")
    ends = rig.promote()
    assert rig.manager.serves == rig.live()
    assert ends["result"] == "promoted"


def test_a_line_that_is_not_on_disk_for_certain_is_taken_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.bad(says(*RIGHT))
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if pathlib.Path(f"/proc/self/fd/{descriptor}").readlink().name == "promotions.jsonl":
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    ends = rig.promote()
    assert ends["result"] == "restored"
    assert (rig.manager.serves, rig.live()) == ("good", "good")


def test_tokens_that_cannot_be_written_leave_live_what_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.root / "model").mkdir()
    (rig.root / "model/config.json").write_text('{"vocab_size": 9}')
    said = {"output_ids": RIGHT, "meta_info": {"output_top_logprobs": [[[0.0, 1, None]]] * 3}}
    rig.bad(lambda one: one.sendall(answer(json.dumps([said]).encode())))
    _failing(monkeypatch, "put_tokens", agent.put_tokens, lambda *given: True)
    ends = rig.promoter("record").record(target("bad"), [[1, 2]])
    assert ends["result"] == "restored"
    assert (rig.manager.serves, rig.live()) == ("good", "good")


def test_an_entry_of_the_log_that_lacks_its_service_is_told(rig: Rig) -> None:
    agent.promoted(str(rig.root), {"release": None, "phase": None, "result": "promoted"})
    rig.bad(says(9))
    ends = rig.promote()
    assert ends["result"] == "down"


def test_a_restart_of_what_is_not_live_any_more_is_refused(rig: Rig) -> None:
    agent.promoted(str(rig.root), {**target("other"), "result": "promoted", "release": "b"})
    with pytest.raises(agent.Refused):
        rig.promoter("restart").activate(target("good"), back=False)


def test_a_rollback_that_another_s_promotion_has_outdated_is_refused(rig: Rig) -> None:
    """What it goes back to was chosen before the lock was had."""
    chosen_when = agent.promotions(str(rig.root))["live"]["at"]
    agent.promoted(str(rig.root), {**target("newer"), "phase": 4, "result": "promoted", "by": "x"})
    for what in ("rollback", "restart"):
        with pytest.raises(
            agent.Refused, match=r"another was quicker: newer, by x, is live by now"
        ):
            rig.promoter(what, seen=chosen_when).activate(target("newer") | {"phase": 4}, back=True)
    with pytest.raises(agent.Refused, match="another was quicker"):
        rig.promoter("stop", seen=chosen_when).stop()
    assert rig.manager.serves == "good"


@pytest.mark.parametrize("what", ["rollback", "restart"])
def test_what_has_another_model_is_refused_before_anything_is_stopped(rig: Rig, what: str) -> None:
    old = target("old") | {"phase": 3}
    old["service"]["command"] += ["--model-path", "/models/old"]
    agent.promoted(str(rig.root), {**old, "result": "promoted", "by": "me"})
    if what == "rollback":
        agent.promoted(str(rig.root), {**target("new"), "result": "promoted", "by": "me"})
    with pytest.raises(agent.Refused) as caught:
        rig.promoter(what).activate(old, back=what == "rollback")
    assert "old was started with the model /models/old, and the recorded tokens" in str(
        caught.value
    )
    assert "kd record" in str(caught.value)
    assert rig.manager.serves == "good"


@pytest.mark.parametrize("what", ["promote", "record", "rollback"])
def test_nothing_is_stopped_that_could_not_be_put_back(rig: Rig, what: str) -> None:
    """Its release was removed by hand: what runs of it would be gone for good."""
    gone = {**target("gone"), "release": "gone", "phase": 3}
    agent.promoted(str(rig.root), {**gone, "result": "promoted", "by": "me"})
    rig.bad(says(*RIGHT))
    does = rig.promoter(what)

    def change() -> dict[str, Any]:
        if what == "record":
            return does.record(target("bad"), [[1, 2]])
        return does.activate(target("bad"), back=what == "rollback")

    with pytest.raises(agent.Refused, match="release gone, which is live, is not there any more"):
        change()
    assert rig.manager.serves == "good"
    assert rig.promoter("stop").stop()["result"] == "off"
    assert rig.promote()["result"] == "promoted"


class TestStoppedOnPurpose:
    """`kd stop`: what is live stays what a restart gets, and nothing else starts it."""

    @pytest.fixture
    def stopped(self, rig: Rig) -> Rig:
        ends = rig.promoter("stop").stop()
        assert (ends["result"], ends["text"]) == ("off", "good is stopped, on purpose")
        assert rig.manager.serves is None
        return rig

    def test_it_is_written_down_once(self, stopped: Rig) -> None:
        found = agent.promotions(str(stopped.root))
        assert (found["live"]["name"], found["stopped"]["by"]) == ("good", "me")
        assert found["followed"]
        assert stopped.promoter("stop").stop()["result"] == "off"
        assert len(agent.promotions(str(stopped.root))["entries"]) == 2
        audited = agent.audited(str(stopped.root), 2)["entries"]
        assert [(one["did"], one["result"]) for one in audited] == [
            ("stop", "begins"),
            ("stop", "off"),
        ]

    def test_a_restart_starts_it(self, stopped: Rig) -> None:
        assert stopped.promoter("restart").activate(target("good"), back=False)["result"] == (
            "promoted"
        )
        found = agent.promotions(str(stopped.root))
        assert (stopped.manager.serves, found["live"]["name"], found["stopped"]) == (
            *("good", "good"),
            None,
        )
        assert found["previous"] is None, "nothing else was live in between"

    def test_a_promotion_goes_on_from_it(self, stopped: Rig) -> None:
        stopped.bad(says(*RIGHT))
        assert stopped.promote()["result"] == "promoted"
        found = agent.promotions(str(stopped.root))
        assert (found["live"]["name"], found["stopped"]) == ("bad", None)

    @pytest.mark.parametrize("what", ["promote", "record", "restart"])
    def test_what_fails_does_not_start_it(self, stopped: Rig, what: str) -> None:
        stopped.bad(says(9))
        stopped.servers["good"] = stopped.servers["bad"]
        does = stopped.promoter(what)
        if what == "record":
            ends = does.record(target("bad"), [[1, 2]])
        else:
            ends = does.activate(target("good" if what == "restart" else "bad"), back=False)
        assert ends["result"] == "stopped"
        assert ends["text"].endswith("stopped, as it was stopped on purpose")
        found = agent.promotions(str(stopped.root))
        assert stopped.manager.serves is None
        assert (found["live"]["name"], found["stopped"]["by"], found["followed"]) == (
            *("good", "me"),
            True,
        )

    def test_a_full_disk_is_no_reason_against_it(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(rig.root)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=0))
        _failing(monkeypatch, "audit", agent.audit, lambda *given: True)
        with monkeypatch.context() as patched:
            _failing(patched, "promoted", agent.promoted, lambda *given: True)
            ends = rig.promoter("stop").stop()
            assert ends["result"] == "down"
            assert "good is stopped, and the promotion log cannot say so: " in ends["text"]
            assert rig.manager.serves is None
        assert rig.promoter("stop").stop()["result"] == "off"

    def test_where_nothing_is_live_what_runs_is_stopped(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a first promotion leaves it that was killed. Nothing of it was ever in the log."""
        (rig.root / "promotions.jsonl").unlink()
        (rig.root / "releases/a").mkdir()
        (rig.root / "releases/a/release.json").write_text("{}")
        agent.switch(str(rig.root), "a")
        first = {"state": "running", "pid": 7, "said": ""}
        with monkeypatch.context() as patched:
            patched.setattr(rig.manager, "status", lambda: first)
            ends = rig.promoter("stop", seen=promoter.NOTHING).stop()
        name = "what an unfinished change left running (release a)"
        assert (ends["result"], ends["text"]) == ("off", f"{name} is stopped, on purpose")
        assert rig.manager.serves is None
        found = agent.promotions(str(rig.root))
        assert (found["live"], found["stopped"], found["followed"]) == (None, None, True)
        audited = agent.audited(str(rig.root), 2)["entries"]
        assert [(one["from"], one["to"], one["result"]) for one in audited] == [
            (None, name, "begins"),
            (None, name, "off"),
        ]
        with pytest.raises(agent.Refused, match="nothing is live, and nothing runs"):
            rig.promoter("stop", seen=promoter.NOTHING).stop()
        with pytest.raises(agent.Refused, match="is not what is live by now"):
            rig.promoter("restart").activate(target("good"), back=False)

    def test_what_has_become_live_meanwhile_is_not_stopped_for_it(self, rig: Rig) -> None:
        with pytest.raises(agent.Refused, match="another was quicker: good, by me, is live by now"):
            rig.promoter("stop", seen=promoter.NOTHING).stop()
        assert rig.manager.serves == "good"

    def test_what_does_not_end_is_said_and_not_written_down(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stays() -> None:
            raise agent.Refused("1 processes of the service outlived its stop: 77")

        with monkeypatch.context() as patched:
            patched.setattr(rig.manager, "stop", stays)
            ends = rig.promoter("stop").stop()
        assert (ends["result"], ends["text"]) == (
            "down",
            "good does not stop: 1 processes of the service outlived its stop: 77",
        )
        assert agent.promotions(str(rig.root))["stopped"] is None


def test_a_lock_that_was_broken_ends_the_promotion_before_the_log(rig: Rig) -> None:
    def taken(connection: socket.socket) -> None:
        holder = agent.lock_holder(str(rig.root))["holder"]
        if holder["owner"] == "me":
            agent.break_lock(str(rig.root), "me", holder["at"])
            agent.lock(str(rig.root), "another", "kd", "u")
        says(*RIGHT)(connection)

    rig.bad(taken)
    does = rig.promoter()
    with pytest.raises(promoter.Lost):
        does.activate(target("bad"), back=False)
    assert does.lost()["result"] == "lost"
    (audited,) = agent.audited(str(rig.root), 1)["entries"]
    assert [audited[key] for key in ("from", "to", "result")] == ["good", "bad", "lost"]
    assert rig.live() == "good"
    assert rig.manager.serves == "bad", "it is for the lock's new owner"


def test_a_lock_that_was_broken_and_is_nobody_s_ends_in_what_was_live(rig: Rig) -> None:
    def broken(connection: socket.socket) -> None:
        holder = agent.lock_holder(str(rig.root))["holder"]
        if holder is not None:
            agent.break_lock(str(rig.root), "me", holder["at"])
        says(*RIGHT)(connection)

    rig.bad(broken)
    ends = rig.promote()
    assert ends["result"] == "restored"
    assert "its lock was broken" in ends["text"]
    assert (rig.manager.serves, rig.live()) == ("good", "good")


def test_a_full_disk_is_seen_before_the_live_service_is_stopped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit log's line may have room where no other file has."""
    rig.bad(says(*RIGHT))
    usage = shutil.disk_usage(rig.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=4096))
    with pytest.raises(agent.Refused, match="less than 32 MB are free"):
        rig.promote()
    assert rig.manager.serves == "good"


def test_no_control_character_of_a_service_reaches_a_terminal(rig: Rig) -> None:
    (rig.root / "service/service.log").write_text("\x1b]0;mine\x07\x9b31m\n")
    rig.bad(lambda one: one.sendall(answer(b"\x1b[2J\x07no", "500 No")))
    text = rig.promote()["text"]
    assert text.isprintable(), repr(text)


def test_what_a_rollback_goes_to_is_not_pruned(tmp_path: pathlib.Path) -> None:
    root = str(tmp_path / "root")
    agent.prepare(root)
    for name in "abc":
        agent.place_release(root, name, {}, {})
        agent.prepare(root)
        agent.switch(root, name)
        agent.promoted(root, {"release": name, "phase": 3, "result": "promoted"})
        if name == "b":
            agent.mark_bad(root, "b", "phase 4 of it was not fit")
    agent.prune(root, 1)
    names = [one["release"] for one in agent.releases(root)["releases"]]
    assert agent.promotions(root)["previous"]["release"] in names


def test_a_disk_that_a_bad_service_fills_does_not_keep_the_good_one_down(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False

    def fills(connection: socket.socket) -> None:
        nonlocal full
        full = True
        says(9)(connection)

    rig.bad(fills)
    room = rig.root / "service/room"
    _failing(monkeypatch, "put_service", agent.put_service, lambda *of: full and not freed(room))
    ends = rig.promote()
    assert ends["result"] == "restored", ends
    assert rig.manager.serves == "good"
    assert not room.exists()


def freed(room: pathlib.Path) -> bool:
    return not room.exists()


@pytest.mark.parametrize("health", [healthy, lambda one: one.sendall(answer(b"", "503 No"))])
def test_a_secret_that_a_service_prints_goes_no_further(
    rig: Rig, health: Callable[[socket.socket], None]
) -> None:
    """It is in the service's own answer and log, and in nothing that kd says or writes down."""
    secret = 'hush "hush" 100%'
    (rig.root / "secrets.env").write_text(f"HF_TOKEN={secret}\nFLAG=1\n")
    (rig.root / "secrets.env").chmod(0o600)
    rig.bad(lambda one: one.sendall(answer(f"with {secret} at 1".encode(), "500 No")), health)
    agent.put_service(str(rig.root), "service.log", "before\n")
    start = rig.manager.start

    def prints() -> None:
        start()
        with (rig.root / "service/service.log").open("a") as log:
            log.write(f"{'x' * 290} {secret} is wrong, 1\n")

    rig.manager.start = prints  # type: ignore[method-assign]
    ends = rig.promote()
    assert ends["result"] == "restored"
    assert "***" in ends["text"]
    told = json.dumps([ends, rig.said]) + "".join(
        path.read_text() for path in rig.root.glob("*.json*")
    )
    assert "hush" not in told


def test_what_is_put_back_must_stay_well_as_what_is_new(rig: Rig) -> None:
    """It answered once and never again, and was said to serve."""
    asked: list[int] = []

    def once(connection: socket.socket) -> None:
        asked.append(1)
        says(*(RIGHT if len(asked) == 1 else [9, 9, 9]))(connection)

    rig.servers["good"] = lambda: Server(rig.port, once)
    rig.bad(says(9, 9, 9))
    ends = rig.promote()
    assert ends["result"] == "down", ends
    assert "what was live before does not serve: other tokens than recorded" in ends["text"]
    assert [one["step"] for one in rig.said].count("sustains") == 1


def test_what_was_live_is_looked_for_at_its_own_port(rig: Rig) -> None:
    """The inventory names another port since."""
    agent.promoted(
        str(rig.root), {**target("good"), "result": "promoted", "by": "me", "port": rig.port}
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        other = int(probe.getsockname()[1])
    rig.servers["bad"] = lambda: Server(other, says(9))
    ends = rig.promoter(port=other).activate(target("bad"), back=False)
    assert ends["result"] == "restored", ends


def test_what_was_live_with_another_model_is_not_held_against_the_new_one_s_tokens(
    rig: Rig,
) -> None:
    rig.servers["old"] = lambda: Server(rig.port, says(7, 7, 7))
    old = target("old")
    old["service"]["command"] += ["--model-path", "/models/old"]
    agent.promoted(str(rig.root), {**old, "result": "promoted", "by": "me"})
    rig.bad(says(9))
    ends = rig.promote()
    assert ends["result"] == "restored", ends
    assert rig.manager.serves == "old"


def test_near_ties_do_not_excuse_a_server_that_is_wholly_wrong(rig: Rig) -> None:
    """A near-tie at the first token of each prompt, and nonsense after it."""
    rig.bad(says(8, 0, 0))
    ends = rig.promoter(others={"0": [8]}).activate(target("bad"), back=False)
    assert ends["result"] == "restored", ends
    assert "0 of 3 are equal" in ends["text"]


def test_a_damaged_line_of_the_audit_log_hides_no_other(tmp_path: pathlib.Path) -> None:
    agent.prepare(str(tmp_path))
    (tmp_path / "audit.jsonl").write_bytes(b'\xff\x00\n[1]\n{"did": "a"}\nnot JSON\n')
    assert agent.audited(str(tmp_path), 5) == {"entries": [{"did": "a"}]}


# With a real supervisord, as in test_promotion.py.


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Iterator[StandInHost]:
    made = StandInHost(tmp_path, LocalTransport())
    yield made
    made.close()


def _ended(host: StandInHost) -> None:
    deadline = time.monotonic() + 40
    while host.releases.lock_holder() is not None:
        assert time.monotonic() < deadline, "the lock is left behind"
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_while_the_job_is_started_ends_it_there_too(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.place("a")
    start = host.releases.start_promoter

    def interrupted(*given: Any) -> None:
        start(*given)
        time.sleep(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(host.releases, "start_promoter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.promote("a")
    _ended(host)
    assert host.releases.promotions()["live"] is None


@pytest.mark.slow
def test_a_job_that_ends_before_its_first_step_leaves_no_lock(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promoter that is still being started when it is killed: it has said nothing yet."""
    host.place("a")

    def ended(job: str, request: Any) -> None:
        host.releases.start_job(job, ["sleep", "60"], {})
        host.releases.end_job(job, signal.SIGKILL)

    monkeypatch.setattr(host.releases, "start_promoter", ended)
    with pytest.raises(TransportError, match="ended without a result") as caught:
        host.promote("a")
    assert "goes on" not in str(caught.value)
    assert host.releases.lock_holder() is None


@pytest.mark.slow
def test_a_terminal_that_closes_while_the_job_is_started_leaves_no_lock(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the command on the host ends what that had just begun, before its first step."""
    host.place("a")
    start = host.releases.start_promoter

    def closed(job: str, request: Any) -> None:
        start(job, request)
        host.releases.end_job(job, signal.SIGKILL)
        while host.releases.look_at_job(job)["alive"]:
            time.sleep(0.05)
        raise SystemExit(129)

    monkeypatch.setattr(host.releases, "start_promoter", closed)
    with pytest.raises(SystemExit):
        host.promote("a")
    assert host.releases.lock_holder() is None


@pytest.mark.slow
def test_a_promoter_that_was_killed_is_not_said_to_go_on(host: StandInHost) -> None:
    host.place("a", "silent")

    def killed() -> None:
        while not any(line.startswith("starts") for line in host.said):
            time.sleep(0.05)
        (job,) = (host.root / "jobs").iterdir()
        host.releases.end_job(job.name, signal.SIGKILL)

    threading.Thread(target=killed, daemon=True).start()
    with pytest.raises(TransportError) as caught:
        host.promote("a")
    assert "goes on" not in str(caught.value)
    assert "kd unlock" in str(caught.value)


@pytest.mark.slow
def test_after_ctrl_c_what_is_down_is_said_to_be_down(host: StandInHost) -> None:
    assert host.promote(host.place("good")).done
    (host.root / "releases/good/site/behaviour").write_text("dies")
    interrupts(host, "starts: phase 3 of slow")
    assert host.promote(host.place("slow", "silent")).result == "down"


@pytest.mark.slow
def test_ctrl_c_once_more_leaves_it_to_the_host(host: StandInHost) -> None:
    assert host.promote(host.place("good", "slow")).done
    host.place("new", "silent")
    interrupts(host, "starts: phase 3 of new", "restores: cancelled")
    with signals_interrupt(), pytest.raises(KeyboardInterrupt):
        host.promote("new")
    assert any("left to the host" in line for line in host.said), host.said
    _ended(host)
    host.is_well("good")


@pytest.mark.slow
def test_ctrl_c_to_a_host_that_does_not_answer(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun goes on there, and that is said; once more ends the wait for the host."""

    def lost(*of_no_use: object) -> bool:
        raise TransportError("the connection is lost")

    def hangs(*of_no_use: object) -> bool:
        signal.raise_signal(signal.SIGINT)  # the second; the first one has made kd deaf to it
        raise AssertionError("nobody heard it")

    monkeypatch.setattr(host.releases, "end_job", lost)
    interrupts(host, "starts: phase 3 of new")
    with signals_interrupt(), pytest.raises(UnknownEnd, match="and what was begun there goes on"):
        host.promote(host.place("new", "slow"))
    _ended(host)
    host.is_well("new")
    monkeypatch.setattr(host.releases, "end_job", hangs)
    interrupts(host, "starts: phase 3 of newer")
    with signals_interrupt(), pytest.raises(KeyboardInterrupt):
        host.promote(host.place("newer", "slow"))
    assert host.said[-1].startswith("left to the host")
    _ended(host)
    host.is_well("newer")


@pytest.mark.slow
def test_after_ctrl_c_no_line_comes_twice(host: StandInHost) -> None:
    assert host.promote(host.place("good")).done
    seen = len(host.said)
    interrupts(host, "starts: phase 3 of new")
    with pytest.raises(KeyboardInterrupt):
        host.promote(host.place("new", "silent"))
    steps = [line.partition(":")[0] for line in host.said[seen:]]
    asked = "the host is asked to put back what was live; once more leaves it alone"
    assert steps[:6] == ["stops", "starts", asked, "restores", "stops", "starts"]
    assert steps.count("ends") == 1


@pytest.mark.slow
def test_a_closed_terminal_leaves_a_promotion_to_the_host(host: StandInHost) -> None:
    """kd ends, as a shell expects of SIGHUP; what was begun there goes on and counts."""
    assert host.promote(host.place("good")).done
    host.place("new", "slow")
    interrupts(host, "starts: phase 3 of new", number=signal.SIGHUP)
    with pytest.raises(SystemExit) as ended, signals_interrupt(), tasks._hangup_leaves():
        host.promote("new")
    assert ended.value.code == 129
    assert host.said[-1] == "starts: phase 3 of new", "nobody is there to read more"
    _ended(host)
    host.is_well("new")


def test_a_terminal_that_closes_while_an_object_is_finalized_is_closed_too() -> None:
    """What is raised there is dropped by Python: kd went on, and ended with 0."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGHUP)

    def goes_on() -> None:
        Finalized()
        time.sleep(20)

    begun = time.monotonic()
    with pytest.raises(SystemExit) as ended, signals_interrupt(), tasks._hangup_leaves():
        goes_on()
    assert ended.value.code == 129
    assert time.monotonic() - begun < 10


def test_a_closed_terminal_that_something_swallowed_ends_kd_before_the_next_host() -> None:
    def swallows() -> None:
        with contextlib.suppress(SystemExit):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # once more changes nothing

    with pytest.raises(SystemExit) as ended, tasks._hangup_leaves():
        swallows()
    assert ended.value.code == 129


@pytest.mark.slow
def test_a_stop_is_not_taken_back_by_ctrl_c(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.promote(host.place("good", "stubborn")).done  # it takes ten seconds to end
    interrupts(host, "stops")
    assert host.stop().result == "off"
    assert "a stop is not taken back" in " ".join(host.said)
    assert host.live.manager.status().pid is None
    assert host.back(host.releases.promotions()["live"], "restart").done
    host.is_well("good")


@pytest.mark.slow
def test_another_s_server_on_the_port_is_not_taken_for_the_service(host: StandInHost) -> None:
    """It gives the right tokens, and what kd has started still loads."""
    host.place("a", "deaf")
    server = pathlib.Path(stand_in_server.__file__)

    def take() -> None:
        while not any(line.startswith("starts") for line in host.said):
            time.sleep(0.05)
        line = [sys.executable, str(server), "--port", str(host.port)]
        others.append(subprocess.Popen(line, env={}))

    others: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=take)
    thread.start()
    try:
        outcome = host.promote("a")
        assert not outcome.done, outcome
        assert "another process" in outcome.text
        assert host.releases.promotions()["live"] is None
        assert not host.releases.known()["releases"][0]["bad"], "it is not the release's fault"
    finally:
        thread.join()
        others[0].kill()
        others[0].wait()


@pytest.mark.slow
def test_a_supervisord_that_was_killed_is_started_again(host: StandInHost) -> None:
    assert host.promote(host.place("good")).done
    before = len(host.said)

    def kill() -> None:
        while not any(line.startswith("healthy") for line in host.said[before:]):
            time.sleep(0.05)
        number = int((host.root / "service/supervisord.pid").read_text())
        os.kill(number, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    host.live._host.health.__dict__["sustain_s"] = 4.0
    outcome = host.promote(host.place("new"))
    thread.join()
    assert outcome.result == "restored", outcome
    host.is_well("good")


@pytest.fixture
def kd(host: StandInHost, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Commands about that host."""

    @contextlib.contextmanager
    def service(config: object) -> Iterator[object]:
        yield host.live

    monkeypatch.setattr(tasks, "_hosts", lambda text: [host.live._host])
    monkeypatch.setattr(tasks, "_host", lambda text: host.live._host)
    monkeypatch.setattr(tasks, "_live_service", service)
    return lambda *line, **more: CliRunner().invoke(tasks.cli, list(line), **more)


@pytest.mark.slow
def test_a_record_that_is_of_no_use_is_made_anew(
    host: StandInHost, kd: Callable[..., Result]
) -> None:
    assert kd("record").exit_code == 0
    record = host.releases.tokens()
    assert record is not None
    record["together"][0]["likely"][0][1][0] = -9.0  # it moved by more than anything may
    agent.put_tokens(str(host.root), record)
    assert "kd record" in str(kd("promote", "stock").exception)
    assert kd("record").exit_code == 0
    assert kd("promote", "stock").exit_code == 0
    agent.put_tokens(str(host.root), (host.releases.tokens() or {}) | {"model": "x"})
    assert "of another model" in str(kd("restart").exception)
    (host.root / "tokens.json").write_text("no JSON")
    assert "kd record writes it anew" in str(kd("restart").exception)
    assert kd("record").exit_code == 0
    host.is_well(None)


@pytest.mark.slow
def test_a_record_has_as_many_tokens_as_the_inventory_says_now(
    host: StandInHost, kd: Callable[..., Result]
) -> None:
    assert kd("record").exit_code == 0
    assert kd("promote", "stock").exit_code == 0
    host.live._host.health.__dict__["new_tokens"] = NEW_TOKENS + 2
    assert kd("record").exit_code == 0
    record = host.releases.tokens()
    assert record is not None
    assert {len(one["tokens"]) for one in record["alone"]} == {NEW_TOKENS + 2}
    host.is_well(None)


@pytest.mark.slow
def test_what_does_not_serve_is_not_said_to_be_live_already(
    host: StandInHost, kd: Callable[..., Result]
) -> None:
    assert kd("record").exit_code == 0
    assert kd("promote", "stock").exit_code == 0
    assert "is live already" in kd("promote", "stock").output
    pid = host.live.manager.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert kd("promote", "stock").exit_code == 0
    host.is_well(None)
    # A promoter that was killed has left another's service there, as well as it may serve.
    other = host.live.entry(Target(None, None, ("--x", "2"), {}))["service"]
    agent.put_service(str(host.root), "service.json", json.dumps(other))
    found = kd("status", "--host", "here")
    assert "kd restart" in found.output
    assert "is live already" not in kd("promote", "stock").output
    host.is_well(None)


@pytest.mark.slow
def test_nothing_changed_is_exit_code_2(host: StandInHost, kd: Callable[..., Result]) -> None:
    assert kd("record").exit_code == 0
    done = Outcome("refused", "there is no room", "job")
    assert tasks._changed(done, "here", True)[1] == 2
    assert tasks._changed(Outcome("lost", "", "job"), "here", True)[1] == 4


@pytest.mark.slow
def test_a_log_s_control_characters_stay_in_it(
    host: StandInHost, kd: Callable[..., Result]
) -> None:
    host.releases.prepare()
    (host.root / "service").mkdir()
    (host.root / "service/service.log").write_bytes(b"a\tb\x1b]52;c;eA==\x07\x9b\xc2\x9b\nend\r\n")
    done = kd("logs", color=True)
    assert done.stdout == "a\tb?]52;c;eA==?\ufffd?\nend\n"
