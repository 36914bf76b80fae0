"""A live service that is changed: a real supervisord, real processes, and a stand-in for SGLang.

The stand-in answers in no time and can be unfit in every way; the real server is changed in
tests/sglang/test_live_service.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import stand_in_server

from phases.recorded import draw_prompts, expected
from remote import promoter
from remote import releases as client
from remote.agent import file_digest
from remote.errors import TransportError
from remote.inventory import Health, LocalHost, Service
from remote.local import LocalTransport
from remote.promotion import LiveService, Outcome, Target
from remote.releases import ReleaseRefused, Releases
from remote.transport import Transport

pytestmark = pytest.mark.slow
pytest.importorskip("supervisor", reason="supervisor is not installed")

NEW_TOKENS = 6


class Host:
    """One host with a service, and what a person would do with it."""

    def __init__(self, folder: pathlib.Path, transport: Transport) -> None:
        self.root = folder / "a root's"
        self.said: list[str] = []
        self.port = _free_port()
        # SGLang's Python: what it is asked for is the stand-in, whatever its name.
        server = pathlib.Path(stand_in_server.__file__)
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} "{server}" "$@"\n')
        self.python.chmod(0o755)
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"vocab_size": 97}')
        host = LocalHost(
            name="here",
            kind="local",
            root=str(self.root),
            service=Service(
                manager="supervisor",
                unit="sglang",
                model_path=str(self.model),
                tensor_parallel=1,
                port=self.port,
            ),
            health=Health(
                start_ceiling_s=9,
                stalled_log_s=4,
                poll_s=0.2,
                sustain_s=0.6,
                prompts=3,
                new_tokens=NEW_TOKENS,
            ),
        )
        self.transport = transport
        self.releases = Releases(transport, python=sys.executable, root=str(self.root))
        self.live = LiveService(
            transport,
            self.releases,
            host,
            python=str(self.python),
            manager_python=sys.executable,
        )
        prompts = draw_prompts(vocabulary=97, positions=None, count=3, new_tokens=NEW_TOKENS)
        self.prompts = prompts
        self.checks = [
            {
                "prompt": one,
                "tokens": stand_in_server.tokens_after(one, NEW_TOKENS),
                "others": {},
            }
            for one in prompts
        ]

    def place(self, release: str, behaviour: str = "") -> str:
        """A release whose service behaves so."""
        self.releases.prepare()
        wheel = self.root / "incoming" / "wheel" / "engine-1-py3-none-any.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("behaviour", behaviour)
        manifest = {f"wheel/{wheel.name}": {"sha256": file_digest(wheel), "executable": False}}
        self.releases.place(release, manifest, {})
        return release

    def promote(self, release: str | None, phase: int | None = 3) -> Outcome:
        target = Target(release, None if release is None else phase, ("--x", "1"), {})
        return self.live.promote(target, self.checks, command="kd promote", note=self.said.append)

    def back(self, entry: dict[str, Any], what: str = "rollback") -> Outcome:
        return self.live.again(what, entry, self.checks, command="kd", note=self.said.append)

    def serves(self) -> str | None:
        """The release that serves right now, and rightly."""
        body = {"input_ids": [[1, 2]], "sampling_params": {"max_new_tokens": 4}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            (said,) = json.load(answer)
        assert said["output_ids"] == stand_in_server.tokens_after([1, 2], 4)
        pid = self.live.manager.status().pid
        environment = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
        (path,) = [one for one in environment if one.startswith("PYTHONPATH=")]
        return pathlib.Path(path.partition("=")[2]).parent.name or None

    def is_well(self, release: str | None) -> None:
        """This release is live by every account, and nobody has the lock."""
        assert self.serves() == release
        found = self.releases.promotions()["live"]
        assert found["release"] == release
        assert self.releases.known()["current"] == release
        assert self.releases.lock_holder() is None

    def audit(self) -> list[tuple[str, str | None, str | None, str]]:
        return [
            (one["did"], one["from"], one["to"], one["result"]) for one in self.releases.audited(99)
        ]

    def close(self) -> None:
        conf = self.root / "service" / "supervisord.conf"
        if conf.is_file():
            with contextlib.suppress(TransportError):
                self.live.manager.stop()
            line = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(conf), "shutdown"]
            subprocess.run(line, capture_output=True, check=False, timeout=60)
            deadline = time.monotonic() + 30
            while (self.root / "service" / "supervisord.pid").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Iterator[Host]:
    made = Host(tmp_path, LocalTransport())
    yield made
    made.close()


def test_promoted_and_back_over_ssh(ssh: Transport, tmp_path: pathlib.Path) -> None:
    host = Host(tmp_path, ssh)
    try:
        for release in ("a", "b"):
            outcome = host.promote(host.place(release))
            assert (outcome.result, outcome.text) == ("promoted", f"phase 3 of {release} is live")
            host.is_well(release)
        assert host.back(host.releases.promotions()["previous"]).done
        host.is_well("a")
        assert host.releases.promotions()["previous"] is None, "b is what was fled from"
        first, second = "phase 3 of a", "phase 3 of b"
        assert host.audit() == [
            ("promote", None, first, "begins"),
            ("promote", None, first, "promoted"),
            ("promote", first, second, "begins"),
            ("promote", first, second, "promoted"),
            ("rollback", second, first, "begins"),
            ("rollback", second, first, "promoted"),
        ]
        assert [line.partition(":")[0] for line in host.said[:6]] == [
            *("stops", "starts", "healthy", "asks", "sustains"),
            "asks",
        ]
    finally:
        host.close()


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("wrong", r"other tokens than recorded: prompt 0, token 5: \d+ instead of \d+"),
        ("wrong later", "other tokens than recorded"),
        ("dies", "it does not start: .*ERROR.*; its log ends: no such model"),
        ("dies later", "its process has ended|is not any more"),
        ("silent", "not healthy, and its log has stood still for 4 s; its log ends: starts"),
        ("no tokens", 'it does not generate: HTTP 500 {"error": "out of memory"}'),
    ],
)
def test_what_is_not_fit_is_taken_back(host: Host, behaviour: str, says: str) -> None:
    assert host.promote(host.place("good")).done
    if behaviour.endswith("later"):
        host.live._host.health.__dict__["sustain_s"] = 4.0
    outcome = host.promote(host.place("bad", behaviour))
    assert outcome.result == "restored"
    assert outcome.text.startswith("phase 3 of bad: ")
    assert outcome.text.endswith("; phase 3 of good serves again")
    assert re.search(says, outcome.text), outcome.text
    host.is_well("good")
    known = {one["release"]: one["bad"] for one in host.releases.known()["releases"]}
    assert known == {"good": False, "bad": True}
    assert host.audit()[-1] == ("promote", "phase 3 of good", "phase 3 of bad", "restored")


def test_a_first_one_that_is_not_fit_leaves_nothing(host: Host) -> None:
    outcome = host.promote(host.place("bad", "wrong"))
    assert outcome.result == "stopped"
    assert outcome.text.endswith("stopped, as nothing was live before")
    assert host.live.manager.status().pid is None
    assert host.releases.promotions()["live"] is None
    assert host.releases.known()["current"] is None
    assert not (host.root / "service/service.json").exists()


def test_stock_is_live_without_any_release(host: Host) -> None:
    assert host.promote(None).text == "stock SGLang is live"
    host.is_well(None)
    assert host.promote(host.place("bad", "dies")).result == "restored"
    host.is_well(None)


def test_where_the_one_before_does_not_serve_either_it_is_said(host: Host) -> None:
    assert host.promote(host.place("good")).done
    (host.root / "releases/good/site/behaviour").write_text("dies")
    outcome = host.promote(host.place("bad", "wrong"))
    assert outcome.result == "down"
    assert "and what was live before does not serve: it does not start" in outcome.text


def test_a_child_that_ignores_its_end_does_not_outlive_its_release(host: Host) -> None:
    assert host.promote(host.place("a", "stubborn")).done
    pid = host.live.manager.status().pid
    assert pid is not None
    assert len(host.releases.group_of(pid)) == 2
    assert host.promote(host.place("b")).done
    assert host.releases.group_of(pid) == []


def test_processes_of_a_service_that_died_are_ended_too(host: Host) -> None:
    assert host.promote(host.place("a", "stubborn")).done
    pid = host.live.manager.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert host.promote(host.place("b")).done
    assert host.releases.group_of(pid) == []


def test_ctrl_c_puts_back_what_was_live(host: Host) -> None:
    assert host.promote(host.place("good")).done
    main = threading.current_thread().ident
    assert main is not None
    timer = threading.Timer(4.0, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        host.promote(host.place("slow", "silent"))
    timer.cancel()
    assert any("asked to put back" in line for line in host.said)
    host.is_well("good")
    assert not any(one["bad"] for one in host.releases.known()["releases"])


def test_a_port_that_somebody_else_holds_is_said(host: Host) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", host.port))
        other.listen()
        outcome = host.promote(host.place("a"))
    assert outcome.result in ("down", "stopped")
    assert f"port {host.port} is held by something that kd does not manage" in outcome.text
    assert not host.releases.known()["releases"][0]["bad"], "it is not the release's fault"


def test_of_two_at_once_one_is_refused(host: Host) -> None:
    host.place("a", "slow")
    host.place("b")
    found: list[str] = []

    def first() -> None:
        found.append(host.promote("a").result)

    thread = threading.Thread(target=first)
    thread.start()
    deadline = time.monotonic() + 20
    while host.releases.lock_holder() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ReleaseRefused, match=r"locked by .*: kd promote"):
        host.promote("b")
    thread.join()
    assert found == ["promoted"]
    host.is_well("a")


def test_a_lost_connection_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes on by itself; whoever comes back sees what has become of it."""
    host.place("a", "slow")

    def lost(*of_no_use: object) -> dict[str, Any]:
        raise TransportError("the connection is lost")

    monkeypatch.setattr(host.releases, "look_at_job", lost)
    monkeypatch.setattr("remote.jobs.follow.__kwdefaults__", {"poll_s": 0.1, "patience_s": 0.5})
    with pytest.raises(TransportError, match="what was begun there goes on"):
        host.promote("a")
    monkeypatch.undo()
    deadline = time.monotonic() + 30
    while host.releases.lock_holder() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    host.is_well("a")


def test_a_restart_is_held_against_the_tokens_and_changes_no_history(host: Host) -> None:
    assert host.promote(host.place("a")).done
    before = host.releases.promotions()["entries"]
    pid = host.live.manager.status().pid
    assert host.back(before[-1], "restart").done
    assert host.live.manager.status().pid != pid
    assert host.releases.promotions()["entries"] == before
    host.is_well("a")


def test_recorded_tokens_are_those_of_a_server_of_its_own(host: Host) -> None:
    assert host.promote(host.place("a")).done
    host.live.checks_of_live = host.checks
    arguments = ("--port", str(host.port))
    outcome = host.live.record(arguments, host.prompts, command="kd record", note=host.said.append)
    assert outcome.result == "recorded"
    host.is_well("a")
    record = host.releases.tokens()
    assert record is not None
    assert record["model"] == host.live.model()
    assert record["server"] == {"version": "0.0"}
    assert expected(record).checks == host.checks


def test_a_recording_that_fails_changes_nothing(host: Host) -> None:
    assert host.promote(host.place("a")).done
    host.live.checks_of_live = host.checks
    arguments = ("--port", "no number")
    outcome = host.live.record(arguments, host.prompts, command="kd record", note=host.said.append)
    assert outcome.result == "restored"
    assert host.releases.tokens() is None
    host.is_well("a")


# At its n-th change of anything below the root, request to the service or start of a program, the
# promoter is killed with all that it has started.
_KILLED = """
import os, sys
left = {count}
changes = ('os.rename', 'os.mkdir', 'os.remove', 'os.rmdir', 'os.link', 'os.symlink', 'os.truncate')
def hook(event, arguments):
    global left
    writes = event == 'open' and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    below = (event in changes or writes) and {root!r} in os.fsdecode(str(arguments))
    if 'remote.promoter' in sys.modules and (below or event == 'subprocess.Popen'):
        left -= 1
        if left < 0:
            open({killed!r}, 'w').close()
            os.kill(0, 9)
sys.addaudithook(hook)
"""
_BOOT = client._BOOT


@pytest.mark.parametrize("before", ["good", None])
def test_killed_at_any_step_the_next_run_serves(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, before: str | None
) -> None:
    """Killed at its first change, at its second ...; whatever that leaves, a rerun serves."""
    if before is not None:
        assert host.promote(host.place(before)).done
    host.place("new")
    killed = tmp_path / "killed"
    for count in itertools.count(0, 3 if before else 5):
        assert count < 120
        killed.unlink(missing_ok=True)
        hook = _KILLED.format(count=count, root=str(host.root), killed=str(killed))
        monkeypatch.setattr(client, "_BOOT", f"{hook}\n{_BOOT}")
        with contextlib.suppress(TransportError):
            host.promote("new")
        monkeypatch.setattr(client, "_BOOT", _BOOT)
        live = host.releases.promotions()["live"]
        assert live is None or live["release"] in ("new", before)
        survived = not killed.exists()
        if (holder := host.releases.lock_holder()) is not None:
            assert not survived
            assert "kd promote (promote-" in holder["command"]
            host.releases.break_lock(holder)
        wanted = live or {"release": None}
        if survived:
            host.is_well("new")
            break
        # The rerun: what was live before it, and then what was wanted.
        if wanted["release"] is not None:
            assert host.back(live, "restart").done
            host.is_well(wanted["release"])
        elif before is None:
            assert host.promote("new").done
            host.is_well("new")
            assert host.live.again(
                "rollback",
                host.live.entry(Target(None, None, (), {})),
                host.checks,
                command="kd",
                note=host.said.append,
            ).done
    assert count > 3


class TestDifference:
    """What the promoter takes for other tokens."""

    CHECK: ClassVar[dict[str, Any]] = {"prompt": [1], "tokens": [5, 6, 7], "others": {"1": [9]}}

    def test_the_same(self) -> None:
        assert promoter.difference(self.CHECK, [5, 6, 7]) is None

    def test_a_near_tie_ends_the_comparison(self) -> None:
        assert promoter.difference(self.CHECK, [5, 9, 1]) is None

    def test_another_token_is_told_with_its_step(self) -> None:
        assert promoter.difference(self.CHECK, [5, 6, 9]) == "token 2: 9 instead of 7"
        assert promoter.difference(self.CHECK, [9, 6, 7]) == "token 0: 9 instead of 5"

    def test_too_few(self) -> None:
        assert promoter.difference(self.CHECK, [5]) == "1 tokens instead of 3"
