"""kd record, promote, rollback, restart, status, logs: what a person types and is told.

The host has a real service manager, of either kind, and a stand-in for SGLang. What its gates say
is given here; that they are run there is in tests/remote/test_validation.py.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from stand_in_host import StandInHost

import tasks
from phases.registry import find_phase, load_phases
from remote import connection, inventory, validation
from remote.errors import TransportError
from remote.jobs import follow
from remote.releases import Releases

pytestmark = pytest.mark.slow

Kd = Callable[..., tuple[int, str, str]]


both = pytest.mark.parametrize("host", ["supervisor", "systemd"], indirect=True)


@pytest.fixture
def states() -> list[dict[str, Any]]:
    """How the gates of phases 0..3 stand on the host: all proven, until a test says otherwise."""
    gates = (
        ("p3_backend_wiring", "service-token-exact", True),
        ("p3_backend_wiring", "conformance-kit-eager", False),
        ("p2_paged_bf16", "tinymla-tokens", False),
        ("p1_offline_kernel", "library-builds", False),
        ("p0_oracle", "mask-paths", False),
    )
    return [
        {
            "phase": phase,
            "gate": gate,
            "kind": "correctness",
            "token_exact": exact,
            "state": "proven",
            "why": None,
            "run": None,
        }
        for phase, gate, exact in gates
    ]


@pytest.fixture
def profile() -> list[str]:
    """The arguments that a release's own phase gives a service."""
    return ["--attention-backend", "kdtree_mla"]


@pytest.fixture
def kd(
    host: StandInHost,
    states: list[dict[str, Any]],
    profile: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Kd:
    """What a command ends with: exit code, stdout, stderr."""
    monkeypatch.setattr(tasks, "_hosts", lambda names: [host.host])
    monkeypatch.setattr(tasks, "_host", lambda name: host.host)
    monkeypatch.setattr(connection, "connect", lambda named: host.transport)
    monkeypatch.setattr(validation.Validation, "states", lambda self, release, phase: states)
    monkeypatch.setattr(
        validation.Validation, "profile", lambda self, release, phase: (tuple(profile), {})
    )

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kd", *words])
        with pytest.raises(SystemExit) as ended:
            tasks.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@both
def test_from_nothing_to_a_promoted_phase_and_back(kd: Kd, host: StandInHost) -> None:
    code, out, err = kd("promote", "stock")
    assert (code, out) == (2, "")
    assert "no tokens are recorded" in err
    assert "kd record" in err

    code, out, err = kd("record")
    assert (code, out) == (0, "here: the tokens are written\n")
    assert "asks: 3 prompts, alone and together" in err

    assert kd("promote", "stock")[:2] == (0, "here: stock SGLang is live\n")
    code, out, err = kd("promote", "3")
    assert (code, out) == (2, "")
    assert "there is no release that is not bad (kd deploy)" in err

    host.place("a")
    assert kd("promote", "3")[:2] == (0, "here: phase 3 of a is live\n")
    code, out, err = kd("promote", "3")
    assert (code, out) == (0, "")
    assert "phase 3 of a is live already" in err
    host.is_well("a")

    shown = json.loads(kd("status", "--host", "here", "--json")[1])
    assert shown["service"]["state"] == "running"
    assert (shown["live"]["name"], shown["previous"]["name"]) == ("phase 3 of a", "stock SGLang")
    assert shown["lock"] is None
    assert shown["audit"][-1]["result"] == "promoted"
    code, out, err = kd("status", "--host", "here")
    assert "phase 3 of a" in out
    assert "starts ['--model-path'" in kd("logs", "-n", "5")[1]

    answer = json.loads(kd("rollback", "--json")[1])
    assert (answer["result"], answer["text"]) == ("promoted", "stock SGLang is live")
    host.is_well(None)
    code, out, err = kd("rollback")
    assert (code, out) == (2, "")
    assert "host here: nothing was live before" in err
    code, out, err = kd("rollback", "--to", "never")
    assert (code, "release never was never live" in err) == (2, True)
    assert kd("rollback", "--to", "a")[:2] == (0, "here: phase 3 of a is live\n")
    assert kd("restart")[:2] == (0, "here: phase 3 of a is live\n")


@pytest.mark.parametrize("what", ["record", "promote"])
def test_what_a_killed_first_change_left_running_is_stopped(
    kd: Kd, host: StandInHost, what: str
) -> None:
    """Nothing was live before, and nothing is; what was started runs all the same."""
    begun = host.root / "service" / "service.pid"

    def killed() -> None:
        deadline = time.monotonic() + 60
        while not begun.exists():  # and supervisor waits for a second before it says so
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (job,) = host.releases.jobs()
        host.releases.end_job(job["name"], signal.SIGKILL)

    thread = threading.Thread(target=killed)
    thread.start()
    port = ("--port", str(host.port))
    does = {
        "promote": lambda: host.promote(host.place("a")),
        "record": lambda: host.live.record(port, host.prompts, command="kd", note=host.said.append),
    }
    with pytest.raises(TransportError, match="ended without a result"):
        does[what]()
    thread.join()
    left = "release a" if what == "promote" else "no release"
    holder = host.releases.lock_holder()
    assert holder is not None
    host.releases.break_lock(holder)
    assert "which was never live: kd stop" in " ".join(kd("status", "--host", "here")[1].split())
    code, out, err = kd("stop")
    assert (code, out) == (
        0,
        f"here: what an unfinished change left running ({left}) is stopped, on purpose\n",
    )
    assert "stops: the service and every process of its group" in err
    assert host.live.manager.status().pid is None
    assert host.audit()[-1][::3] == ("stop", "off")
    assert "nothing is live" in kd("restart")[2]
    assert "so there is nothing to stop" in kd("stop")[2]


def test_stopped_on_purpose_and_started_again(kd: Kd, host: StandInHost) -> None:
    code, out, err = kd("stop")
    assert (code, out) == (2, "")
    assert "host here: nothing is live, so there is nothing to stop" in err
    kd("record")
    assert kd("promote", "stock")[0] == 0
    host.place("a")
    assert kd("promote", "3")[0] == 0

    assert kd("stop")[:2] == (0, "here: phase 3 of a is stopped, on purpose\n")
    shown = json.loads(kd("status", "--host", "here", "--json")[1])
    assert (shown["service"]["state"], shown["service"]["pid"]) == ("stopped", None)
    assert (shown["live"]["name"], shown["followed"]) == ("phase 3 of a", True)
    assert "@" in shown["stopped"]["by"]
    assert (shown["audit"][-1]["did"], shown["audit"][-1]["result"]) == ("stop", "off")
    assert shown["lock"] is None
    assert "kd restart starts it" in kd("status", "--host", "here")[1]
    assert json.loads(kd("stop", "--json")[1])["result"] == "off", "twice is as good as once"

    assert kd("restart")[:2] == (0, "here: phase 3 of a is live\n")
    host.is_well("a")
    assert json.loads(kd("status", "--host", "here", "--json")[1])["stopped"] is None
    kd("stop")
    assert kd("promote", "3")[:2] == (0, "here: phase 3 of a is live\n")
    kd("stop")
    assert kd("rollback")[:2] == (0, "here: stock SGLang is live\n")
    host.is_well(None)
    assert kd("rollback", "--to", "a")[:2] == (0, "here: phase 3 of a is live\n")


def test_how_kv_slots_lie_is_shown(kd: Kd, host: StandInHost) -> None:
    """As the live service exports it: the stand-in has the figures of `METRICS`."""
    assert json.loads(kd("status", "--host", "here", "--json")[1])["fragmentation"] == {}
    kd("record")
    assert kd("promote", "stock")[0] == 0
    found = json.loads(kd("status", "--host", "here", "--json")[1])["fragmentation"]
    assert found["kdtree:kv_mean_runs"] == 26
    assert "sglang:num_running_reqs" not in found
    out = " ".join(kd("status", "--host", "here")[1].split())
    assert "26 runs of 630.2 slots a request, 52 in the worst tenth" in out
    assert "tier0: 40 free runs, 512 slots reserved for growth, 3 allocations that waited" in out
    kd("stop")
    assert json.loads(kd("status", "--host", "here", "--json")[1])["fragmentation"] == {}


def test_what_runs_there_is_shown(kd: Kd, host: StandInHost) -> None:
    host.releases.start_job("validate-20261130T000000Z-abcdef", ["sleep", "60"], {})
    shown = json.loads(kd("status", "--host", "here", "--json")[1])
    assert [one["name"] for one in shown["jobs"]] == ["validate-20261130T000000Z-abcdef"]
    assert "validate-20261130T000000Z-abcdef, 2" in kd("status", "--host", "here")[1]
    host.releases.end_job("validate-20261130T000000Z-abcdef", signal.SIGKILL)
    assert json.loads(kd("status", "--host", "here", "--json")[1])["jobs"] == []


@both
def test_a_check_says_what_a_promotion_would_lack(
    kd: Kd, host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in's Python has no SGLang, and a model's folder may be gone."""
    hosts = inventory.Inventory({"here": host.host})
    monkeypatch.setattr(inventory, "load_inventory", lambda path: hosts)
    code, out, err = kd("hosts", "check")
    assert (code, err) == (1, f"kd: host here: sglang: {sys.executable} has no SGLang\n")
    assert out.splitlines()[1].split()[-4:] == ["yes", "yes", "yes", "no"]
    (host.model / "config.json").unlink()
    code, out, err = kd("hosts", "check", "here", "--json")
    found = json.loads(out)["here"]["needs"]
    needs = {one["what"]: one["ok"] for one in found}
    assert code == 1
    kind = host.live.manager.kind
    assert {"what": "manager", "ok": True, "said": kind} in found
    assert [what for what, ok in needs.items() if not ok] == ["sglang", "model"]
    assert not host.root.exists(), "nothing is written there"


def test_what_is_not_proven_is_promoted_by_force_alone_and_that_is_logged(
    kd: Kd, host: StandInHost, states: list[dict[str, Any]]
) -> None:
    kd("record")
    host.place("a")
    states[1] |= {"state": "blocked", "why": "no CUDA GPU"}
    code, out, err = kd("promote", "3")
    assert (code, out) == (2, "")
    assert "p3_backend_wiring conformance-kit-eager is blocked: no CUDA GPU" in err
    assert "1 gates are not proven" in err
    assert "kd validate 3 --host here --release a, or --force REASON" in err
    assert kd("promote", "3", "--force", "  ")[0] == 2
    assert host.releases.promotions()["live"] is None

    assert kd("promote", "3", "--force", "no GPU here")[0] == 0
    forced = host.releases.audited(1)[0]["forced"]
    assert forced["reason"] == "no GPU here"
    assert forced["lacks"] == ["p3_backend_wiring conformance-kit-eager is blocked: no CUDA GPU"]


def test_a_trial_is_started_as_the_release_says_or_else_as_this_checkout_does(
    kd: Kd,
    host: StandInHost,
    profile: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that was sent without the tools of gates cannot say it, and can be tried all the same."""
    host.place("a")
    profile += ["--its-own", "x"]
    phase = find_phase(load_phases(), "3")

    def line() -> str:
        tasks._serve_there(host.host, phase, None, (), dry_run=True, as_json=False)
        return capsys.readouterr().out

    assert "--its-own x" in line()

    def cannot(*of_no_use: object) -> None:
        raise TransportError("its kd cannot tell")

    monkeypatch.setattr(validation.Validation, "profile", cannot)
    assert "--its-own" not in line()
    code, _, err = kd("promote", "3")
    assert (code, "its kd cannot tell" in err) == (2, True)


@pytest.mark.parametrize("state", ["missing", "stale", "failed", "blocked", "unwritten"])
def test_token_exactness_cannot_be_forced(
    kd: Kd, host: StandInHost, states: list[dict[str, Any]], state: str
) -> None:
    host.place("a")
    states[0] |= {"state": state}
    code, out, err = kd("promote", "3", "--force", "I know better")
    assert (code, out) == (2, "")
    assert "1 of them of token-exactness, which nothing can force" in err
    assert "--force" not in err.partition("which nothing can force")[2]
    assert host.releases.promotions()["live"] is None


def test_a_bad_release_that_is_live_after_all_is_not_bad(kd: Kd, host: StandInHost) -> None:
    """Else the next promotion, which takes the newest that is not bad, would go back behind it."""
    kd("record")
    host.place("old")
    assert kd("promote", "3")[0] == 0
    host.place("new", "dies")
    assert kd("promote", "3")[0] == 1
    assert [one["bad"] for one in host.releases.known()["releases"]] == [False, True]
    (host.root / "releases/new/site/behaviour").write_text("")  # what ailed it was the host's
    assert kd("promote", "3", "--release", "new")[0] == 0
    assert [one["bad"] for one in host.releases.known()["releases"]] == [False, False]
    assert "phase 3 of new is live already" in kd("promote", "3")[2]
    host.is_well("new")


@pytest.mark.parametrize("left", [[], [0, 1], [1, 2, 3, 4], [0, 1, 2, 3]])
def test_gates_that_a_release_does_not_name_are_missing(
    kd: Kd, host: StandInHost, states: list[dict[str, Any]], left: list[int]
) -> None:
    """It says itself which gates it has; without one of token-exactness nothing is forced."""
    host.place("a")
    states[:] = [states[number] for number in left]
    code, out, err = kd("promote", "3", "--force", "I know better")
    assert (code, out) == (2, "")
    assert "is missing: the release knows no such gate" in err
    assert "of token-exactness, which nothing can force" in err
    assert host.releases.promotions()["live"] is None


def test_a_service_is_started_as_the_release_says(
    kd: Kd, host: StandInHost, profile: list[str]
) -> None:
    """Its gates have run with that; the checkout here may say something else by now."""
    kd("record")
    host.place("a")
    profile += ["--its-own", "x"]
    assert kd("promote", "3")[0] == 0
    assert "'--its-own', 'x'" in kd("logs", "-n", "1")[1]
    profile.clear()
    code, out, err = kd("promote", "3")
    assert (code, out) == (2, "")
    assert "phase 3 of release a has no service profile" in err
    host.is_well("a")


def test_what_is_taken_back_is_exit_1_and_what_is_down_is_exit_4(kd: Kd, host: StandInHost) -> None:
    kd("record")
    host.place("good")
    assert kd("promote", "3")[0] == 0
    host.place("wrong", "wrong")
    code, out, err = kd("promote", "3")
    assert (code, out) == (1, "")
    assert "phase 3 of wrong: other tokens than recorded" in err
    assert "phase 3 of good serves again" in err
    host.is_well("good")
    # It is bad now, so the newest that is not is meant by default.
    assert "phase 3 of good is live already" in kd("promote", "3")[2]
    (host.root / "releases/good/site/behaviour").write_text("dies")
    code, out, _ = kd("promote", "3", "--release", "wrong", "--json")
    assert code == 4
    assert json.loads(out)["result"] == "down"


def test_an_end_that_nobody_knows_is_exit_4(
    kd: Kd, host: StandInHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost in the middle, or the job there is killed: 2 would say no change."""

    def lost(*of_no_use: object) -> None:
        raise TransportError("the connection is lost")

    def ended() -> None:
        deadline = time.monotonic() + 40
        while host.releases.lock_holder() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    kd("record")
    host.place("a")
    with monkeypatch.context() as broken:
        broken.setattr(Releases, "look_at_job", lost)
        for name, seconds in {"poll_s": 0.1, "patience_s": 0.3}.items():
            broken.setitem(follow.__kwdefaults__, name, seconds)
        code, _, err = kd("promote", "3")
    assert (code, "what was begun there goes on" in err) == (4, True)
    ended()
    host.is_well("a")

    start = Releases.start_promoter

    def answer_lost(self: Releases, name: str, request: Any) -> None:
        start(self, name, request)
        raise TransportError("the connection is lost")

    with monkeypatch.context() as broken:
        broken.setattr(Releases, "start_promoter", answer_lost)
        code, _, err = kd("restart")
    assert (code, "whether it was begun there is not known" in err) == (4, True)
    ended()

    def killed(self: Releases, name: str, request: Any) -> None:
        self.start_job(name, ["sleep", "60"], {})
        self.end_job(name, signal.SIGKILL)

    with monkeypatch.context() as broken:
        broken.setattr(Releases, "start_promoter", killed)
        code, _, err = kd("restart")
    assert (code, "ended without a result" in err) == (4, True)


def test_another_service_of_the_inventory_is_promoted_anew(kd: Kd, host: StandInHost) -> None:
    kd("record")
    host.place("a")
    assert kd("promote", "3")[0] == 0
    assert "is live already" in kd("promote", "3")[2]
    assert host.host.service is not None
    host.host.service.__dict__["arguments"] = ("--page-size", "1")
    code, out, err = kd("promote", "3")
    assert (code, out) == (0, "here: phase 3 of a is live\n"), err
    assert "'--page-size', '1'" in kd("logs", "-n", "1")[1]
    assert len(host.releases.promotions()["entries"]) == 2
    code, _, err = kd("rollback")
    assert (code, "nothing was live before" in err) == (2, True)


def test_a_model_that_changed_needs_other_tokens(kd: Kd, host: StandInHost) -> None:
    kd("record")
    (host.model / "config.json").write_text('{"vocab_size": 97, "hidden": 2}')
    host.place("a")
    code, _, err = kd("promote", "3")
    assert code == 2
    assert "the recorded tokens are of another model" in err


def test_no_control_character_of_a_host_reaches_a_terminal(
    kd: Kd, host: StandInHost, states: list[dict[str, Any]]
) -> None:
    """What its Python says, its gates, who has its lock, what was released there and done."""
    evil = "a\x1b]52;c;eA==\x07\x9b2Jz"
    seen = "a?]52;c;eA==??2Jz"
    host.place("a")
    states[1] |= {"state": "failed", "why": evil}
    assert f"is failed: {seen}" in kd("promote", "3")[2]
    host.releases.lock(owner=evil, command=evil, token="t")
    host.releases.audit({"did": "x", "by": evil, "result": evil})
    assert f"{seen} has had the lock" in kd("unlock")[2]
    shown = kd("status", "--host", "here")[1]
    assert f"{seen}: x, {seen}" in shown
    about = host.root / "releases/a/release.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"by": evil, "revision": evil}))
    assert seen[:10] in kd("releases")[1]
    host.python.write_text("#!/bin/sh\nprintf 'bad \\033]0;x\\007\\n' >&2; exit 1\n")
    code, _, err = kd("status", "--host", "here")
    assert (code, "no answer: bad ?]0;x?" in err) == (2, True)


def test_a_phase_without_a_profile_is_refused(kd: Kd) -> None:
    code, _, err = kd("promote", "0")
    assert (code, "phase 0 (oracle) has no service profile" in err) == (2, True)
