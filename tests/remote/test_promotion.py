"""A live service that is changed: a real manager, real processes, and a stand-in for SGLang.

The stand-in answers in no time and can be unfit in every way; the real server is changed in
tests/sglang/test_live_service.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import socket
import threading
import time
from typing import Any, ClassVar, Literal

import pytest
from stand_in_host import StandInHost, interrupts
from systemd_machine import SYSTEM_PYTHON

from phases.recorded import expected
from remote import promoter
from remote import releases as client
from remote.errors import TransportError
from remote.jobs import follow
from remote.promotion import Target
from remote.releases import ReleaseRefused

pytestmark = pytest.mark.slow


both = pytest.mark.parametrize("host", ["supervisor", "systemd"], indirect=True)


@pytest.mark.parametrize("manager", ["supervisor", "systemd"])
def test_promoted_and_back_over_ssh(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    manager: Literal["supervisor", "systemd"],
) -> None:
    """With systemd by a login that is not root."""
    if manager == "supervisor":
        pytest.importorskip("supervisor", reason="supervisor is not installed")
        host = StandInHost(tmp_path, request.getfixturevalue("ssh"))
    else:
        ssh, folder = map(request.getfixturevalue, ("person_ssh", "open_path"))
        host = StandInHost(folder, ssh, manager, SYSTEM_PYTHON)
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


@both
@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("wrong", r"other tokens than recorded: prompt 0, token 5: \d+ instead of \d+"),
        ("wrong later", "other tokens than recorded"),
        ("dies", "it does not start: .*; its log ends: no such model"),
        ("dies later", "its process has ended|is not any more"),
        ("silent", "not healthy, and its log has stood still for 4 s; its log ends: starts"),
        ("lively", "not healthy after 9 s; its log ends: loads on"),
        ("no tokens", 'it does not generate: HTTP 500 {"error": "out of memory"}'),
    ],
)
def test_what_is_not_fit_is_taken_back(host: StandInHost, behaviour: str, says: str) -> None:
    assert host.promote(host.place("good")).done
    if behaviour.endswith("later"):
        host.host.health.__dict__["sustain_s"] = 4.0
    outcome = host.promote(host.place("bad", behaviour))
    assert outcome.result == "restored"
    assert outcome.text.startswith("phase 3 of bad: ")
    assert outcome.text.endswith("; phase 3 of good serves again")
    assert re.search(says, outcome.text), outcome.text
    host.is_well("good")
    known = {one["release"]: one["bad"] for one in host.releases.known()["releases"]}
    assert known == {"good": False, "bad": True}
    assert host.audit()[-1] == ("promote", "phase 3 of good", "phase 3 of bad", "restored")


@both
def test_a_load_may_take_long_as_long_as_its_log_grows(host: StandInHost) -> None:
    """Longer than a log may stand still, and less than the ceiling."""
    assert host.promote(host.place("a", "loads")).done
    (healthy,) = [line for line in host.said if line.startswith("healthy: after")]
    assert int(healthy.split()[2]) > host.host.health.stalled_log_s
    host.is_well("a")


def test_a_first_one_that_is_not_fit_leaves_nothing(host: StandInHost) -> None:
    outcome = host.promote(host.place("bad", "wrong"))
    assert outcome.result == "stopped"
    assert outcome.text.endswith("stopped, as nothing was live before")
    assert host.live.manager.status().pid is None
    assert host.releases.promotions()["live"] is None
    assert host.releases.known()["current"] is None
    assert not (host.root / "service/service.json").exists()


def test_stock_is_live_without_any_release(host: StandInHost) -> None:
    assert host.promote(None).text == "stock SGLang is live"
    host.is_well(None)
    assert host.promote(host.place("bad", "dies")).result == "restored"
    host.is_well(None)


@both
def test_where_the_one_before_does_not_serve_either_it_is_said(host: StandInHost) -> None:
    assert host.promote(host.place("good")).done
    (host.root / "releases/good/site/behaviour").write_text("dies")
    outcome = host.promote(host.place("bad", "wrong"))
    assert outcome.result == "down"
    assert "and what was live before does not serve: it does not start" in outcome.text


@both
def test_a_child_that_ignores_its_end_does_not_outlive_its_release(host: StandInHost) -> None:
    assert host.promote(host.place("a", "stubborn")).done
    pid = host.live.manager.status().pid
    assert pid is not None
    assert len(host.releases.group_of(pid)) == 2
    assert host.promote(host.place("b")).done
    assert host.releases.group_of(pid) == []


@both
def test_processes_of_a_service_that_died_are_ended_too(host: StandInHost) -> None:
    assert host.promote(host.place("a", "stubborn")).done
    pid = host.live.manager.status().pid
    assert pid is not None
    host.there("kill", "-KILL", str(pid))
    assert host.promote(host.place("b")).done
    assert host.releases.group_of(pid) == []


@both
def test_ctrl_c_puts_back_what_was_live(host: StandInHost) -> None:
    assert host.promote(host.place("good")).done
    interrupts(host, "starts: phase 3 of slow")
    with pytest.raises(KeyboardInterrupt):
        host.promote(host.place("slow", "silent"))
    assert any("asked to put back" in line for line in host.said)
    host.is_well("good")
    assert not any(one["bad"] for one in host.releases.known()["releases"])


def test_ctrl_c_at_any_point_leaves_live_what_was(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step that is told, and before the first of them: with the lock had, and installed."""
    assert host.promote(host.place("good")).done
    host.place("new", "slow")
    for owner, name in ((host.releases, "lock"), (host.live.manager, "install")):
        does = getattr(owner, name)

        def interrupted(*given: Any, does: Any = does, **more: Any) -> None:
            does(*given, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as cut:
            cut.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                host.promote("new")
        host.is_well("good")
    host.host.health.__dict__["sustain_s"] = 3.0
    for step in ("stops", "starts: phase 3 of new", "healthy", "asks: tokens:", "sustains"):
        interrupts(host, step)
        with pytest.raises(KeyboardInterrupt):
            host.promote("new")
        host.is_well("good")
        assert host.audit()[-1] == ("promote", "phase 3 of good", "phase 3 of new", "restored")
    assert not any(one["bad"] for one in host.releases.known()["releases"])


@both
def test_nobody_else_may_look_at_what_is_there(host: StandInHost) -> None:
    """Whatever umask a login has: it is 022 here, and 0 in the worst case."""
    before = os.umask(0)
    try:
        assert host.promote(host.place("a")).done
        assert host.promote(host.place("bad", "wrong")).result == "restored"
    finally:
        os.umask(before)
    found = [path for path in [host.root, *host.root.rglob("*")] if not path.is_symlink()]
    found = [path for path in found if "wheel" not in path.parts]  # which the test has written
    assert len(found) > 20
    assert [str(path) for path in found if path.stat().st_mode & 0o077] == []


def test_a_port_that_somebody_else_holds_is_said(host: StandInHost) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", host.port))
        other.listen()
        outcome = host.promote(host.place("a"))
    assert outcome.result in ("down", "stopped")
    assert f"port {host.port} is held by something that kd does not manage" in outcome.text
    assert not host.releases.known()["releases"][0]["bad"], "it is not the release's fault"


def test_of_two_at_once_one_is_refused(host: StandInHost) -> None:
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


def test_a_lost_connection_changes_nothing(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host goes on by itself; whoever comes back sees what has become of it."""
    host.place("a", "slow")

    def lost(*of_no_use: object) -> dict[str, Any]:
        raise TransportError("the connection is lost")

    monkeypatch.setattr(host.releases, "look_at_job", lost)
    for name, seconds in {"poll_s": 0.1, "patience_s": 0.5}.items():
        monkeypatch.setitem(follow.__kwdefaults__, name, seconds)
    with pytest.raises(TransportError, match="what was begun there goes on"):
        host.promote("a")
    monkeypatch.undo()
    deadline = time.monotonic() + 30
    while host.releases.lock_holder() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    host.is_well("a")


def test_old_releases_go_once_newer_ones_are_live(host: StandInHost) -> None:
    """The current one and what a rollback goes to stay, however few are to be kept."""
    host.host.__dict__["keep"] = 1
    for release in ("a", "b", "c"):
        assert host.promote(host.place(release)).done
    assert [one["release"] for one in host.releases.known()["releases"]] == ["b", "c"]
    assert "prunes: removed a" in host.said
    assert host.back(host.releases.promotions()["previous"]).done
    host.is_well("b")


@both
def test_a_restart_is_held_against_the_tokens_and_changes_no_history(host: StandInHost) -> None:
    assert host.promote(host.place("a")).done
    before = host.releases.promotions()["entries"]
    pid = host.live.manager.status().pid
    assert host.back(before[-1], "restart").done
    assert host.live.manager.status().pid != pid
    assert host.releases.promotions()["entries"] == before
    host.is_well("a")


@both
def test_recorded_tokens_are_those_of_a_server_of_its_own(host: StandInHost) -> None:
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


def test_a_secret_that_this_connection_alone_has_is_missing(
    host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """supervisord runs by then, and gives the service what it was started with."""

    def secrets() -> dict[str, Any]:
        (found,) = (one for one in host.live.readiness() if one["what"] == "secrets")
        return found

    assert host.promote(host.place("a")).done
    service = host.host.service
    assert service is not None
    host.live._service = service.model_copy(update={"environment": ("KD_LATER",)})
    monkeypatch.setenv("KD_LATER", "x")
    assert not secrets()["ok"]
    assert "nor in the environment of supervisor" in secrets()["said"]
    outcome = host.promote(host.place("b"))
    assert outcome.result == "restored"
    assert "KD_LATER: named for this service, and neither in" in outcome.text
    (host.root / "secrets.env").write_text("KD_LATER=x\n")
    (host.root / "secrets.env").chmod(0o600)
    assert secrets()["ok"]


def test_a_recording_that_fails_changes_nothing(host: StandInHost) -> None:
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
    host: StandInHost, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, before: str | None
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
                seen=None,
                command="kd",
                note=host.said.append,
            ).done
    assert count > 3


class TestGpuMemory:
    """What nvidia-smi says of memory that nobody is named for."""

    @pytest.fixture
    def smi(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
        """A folder whose files `gpus` and `apps` are what it says."""
        program = tmp_path / "nvidia-smi"
        program.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            f'  *query-gpu=*) cat "{tmp_path}/gpus";;\n  *) cat "{tmp_path}/apps";;\nesac\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    @pytest.mark.parametrize(
        ("gpus", "apps", "held"),
        [
            ("GPU-a, 0, 5, 97887\nGPU-b, 1, 620, 97887\n", "", []),
            (
                "GPU-a, 0, 5, 97887\nGPU-b, 1, 80000, 97887\n",
                "",
                ["80000 MiB of GPU 1"],
            ),
            ("GPU-a, 0, 40000, 97887\n", "GPU-a, 30000\nGPU-a, 9500\n", []),
            ("GPU-a, 0, 40000, 97887\n", "GPU-a, 20000\n", ["40000 MiB of GPU 0"]),
            ("GPU-a, 0, 40000, 97887\n", "GPU-a, [N/A]\n", ["40000 MiB of GPU 0"]),
            ("no devices were found\n", "", None),
        ],
    )
    def test_what_is_held(
        self, smi: pathlib.Path, gpus: str, apps: str, held: list[str] | None
    ) -> None:
        (smi / "gpus").write_text(gpus)
        (smi / "apps").write_text(apps)
        assert promoter.gpus_held() == held

    def test_without_nvidia_smi_nobody_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        assert promoter.gpus_held() is None

    def test_a_promotion_waits_until_it_is_free(self, host: StandInHost, smi: pathlib.Path) -> None:
        """Held at first, as by a process that is gone and whose memory is not.

        And before that nvidia-smi fails, as it may while a driver is busy with what has ended.
        """
        (smi / "gpus").write_text("Unable to determine the device handle\n")
        (smi / "apps").write_text("")
        host.host.__dict__["cuda_arch"] = "sm_120"
        timers = [
            threading.Timer(seconds, (smi / "gpus").write_text, (f"GPU-a, 0, {used}, 97887\n",))
            for seconds, used in ((4.0, 40000), (7.0, 5))
        ]
        for timer in timers:
            timer.start()
        begun = time.monotonic()
        assert host.promote(host.place("a")).done
        assert time.monotonic() - begun > 7.0
        for timer in timers:
            timer.join()


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
