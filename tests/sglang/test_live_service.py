"""The real SGLang as a host's live service: recorded, promoted, taken back; over a real sshd.

The host is this machine, reached over SSH; its service manager is a real supervisord, and in the
last test a real systemd. Services that are unfit in other ways, with a stand-in that starts at
once, are in tests/remote/test_promotion.py.

All other tests share one host, in the order of this file: what is unfit comes first, where nothing
is live that would have to be started again, as a start of SGLang takes half a minute and more. Each
of them can be run alone too.
"""

from __future__ import annotations

import contextlib
import gzip
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import ssh_server
from systemd_machine import SystemdMachine
from unfit_releases import FAILS, HANGS, SEES_ALL, Break, broken

from phases.recorded import draw_prompts, expected, without_speculation
from phases.registry import find_phase, load_phases
from phases.service import server_python
from phases.service_scale import CPU, kernel
from phases.small_model import write_small_model
from remote import agent
from remote.deploy import Deployment, releases_of
from remote.errors import TransportError
from remote.inventory import Health, Service, SshHost
from remote.promotion import LiveService, Outcome, Target
from remote.ssh import SshTransport

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
pytest.importorskip("supervisor", reason="supervisor is not installed")

STALLED_S = 45.0
ENVIRONMENT = (*CPU.environment, "KD_TEST_SECRET")


class Live:
    """A host with SGLang on it, and this checkout on its way there."""

    def __init__(
        self,
        folder: pathlib.Path,
        server: ssh_server.SshServer,
        checkout: pathlib.Path,
        manager: Literal["supervisor", "systemd"] = "supervisor",
    ) -> None:
        self.said: list[str] = []
        self.checkout = checkout
        self.phase = find_phase(load_phases(), "3")
        self.secret = f"hush-{time.time_ns()}"
        python = folder / "python"
        (support,) = CPU.paths
        # What makes SGLang run on a CPU at all is the host's own affair.
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{support}" exec "{server_python()}" "$@"\n'
        )
        python.chmod(0o755)
        model = write_small_model(folder / "model", seed=1)
        self.host: SshHost = server.host(
            root=str(folder / "root"),
            python=str(python),
            service=Service(
                manager=manager,
                unit="sglang",
                model_path=str(model),
                tensor_parallel=1,
                port=ssh_server.free_port(),
                arguments=(
                    *("--skip-tokenizer-init", *CPU.arguments, "--disable-cuda-graph"),
                    *("--attention-backend", "triton"),
                    *kernel(9).arguments[2:],
                ),
                environment=ENVIRONMENT,
            ),
            health=Health(
                start_ceiling_s=240,
                stalled_log_s=120,
                poll_s=1,
                sustain_s=3,
                prompts=3,
                new_tokens=12,
            ),
        )
        self.transport = SshTransport(self.host, folder=server.person)
        self.releases = releases_of(self.transport, self.host)
        self.service = LiveService(
            self.transport,
            self.releases,
            self.host,
            python=str(python),
            manager_python=sys.executable,
        )
        self.releases.prepare()
        secrets = folder / "root" / "secrets.env"
        values = {**CPU.environment, "KD_TEST_SECRET": self.secret}
        secrets.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        secrets.chmod(0o600)

    def record(self) -> Outcome:
        assert self.host.service is not None
        model = self.service.model()
        prompts = draw_prompts(
            vocabulary=model["vocabulary"],
            positions=model["positions"],
            count=self.host.health.prompts,
            new_tokens=self.host.health.new_tokens,
        )
        arguments = without_speculation(self.host.service.command_line())
        return self.service.record(arguments, prompts, command="kd record", note=self.said.append)

    def recorded(self) -> dict[str, Any]:
        """What plain decoding says, once for all tests."""
        if self.releases.tokens() is None:
            assert self.record().result == "recorded"
        record = self.releases.tokens()
        assert record is not None
        return record

    def deploy(self, *breaks: Break) -> str:
        """A release of this checkout, with these changes."""
        deployment = Deployment(self.checkout, (None, None))
        with broken(self.checkout, *breaks):
            placed = deployment.run(self.transport, self.host, note=self.said.append)
        return str(placed["release"])

    def promote(self, release: str | None, *more: str) -> Outcome:
        profile = self.phase.profile
        target = Target(
            release, self.phase.number, (*profile.arguments, *more), profile.environment
        )
        if release is None:
            target = Target(None, None, (), {})
        checks = expected(self.recorded()).checks
        return self.service.promote(target, checks, command="kd promote", note=self.said.append)

    def back(self) -> Outcome:
        """`kd rollback`."""
        found = self.releases.promotions()
        return self.service.again(
            "rollback",
            found["previous"],
            expected(self.recorded()).checks,
            seen=found["live"],
            command="kd rollback",
            note=self.said.append,
        )

    def good(self) -> str:
        """The release that is live and right: deployed and promoted, where none is."""
        live = self.releases.promotions()["live"]
        if live is None or live["release"] is None:
            assert self.promote(self.deploy()).done
            live = self.releases.promotions()["live"]
        return str(live["release"])

    def serves(self, release: str | None) -> None:
        """This release is live by every account, its process runs, and nobody has the lock."""
        live = self.releases.promotions()["live"]
        assert (live["release"], self.releases.known()["current"]) == (release, release)
        assert self.service.manager.status().pid is not None
        assert self.releases.lock_holder() is None

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[list[Outcome]]:
        """Whatever is promoted in the block leaves what was live, or nothing where nothing was."""
        before = self.releases.promotions()["live"]
        outcomes: list[Outcome] = []
        yield outcomes
        assert self.releases.promotions()["live"] == before
        for outcome in outcomes:
            assert outcome.result == ("stopped" if before is None else "restored"), outcome.text
        if before is not None:
            self.serves(before["release"])
            return
        assert self.service.manager.status().pid is None
        assert self.releases.service_left() == []
        assert self.releases.known()["current"] is None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.service.manager.stop()
        assert self.host.service is not None
        if self.host.service.manager == "systemd":
            self.transport.close()
            return
        conf = pathlib.Path(self.host.root) / "service" / "supervisord.conf"
        line = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(conf), "shutdown"]
        subprocess.run(line, capture_output=True, check=False, timeout=60)
        self.transport.close()


def clone(root: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The tracked files as they are, in a repository of their own."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def live(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if ssh_server.SSHD is None or shutil.which("rsync") is None:
        pytest.skip("sshd and rsync are needed (apt-get install openssh-server rsync)")
    server = ssh_server.SshServer(tmp_path_factory.mktemp("sshd"))
    checkout = clone(root, tmp_path_factory.mktemp("checkout"))
    made = Live(tmp_path_factory.mktemp("host"), server, checkout)
    yield made
    made.close()
    server.stop()


def test_what_plain_decoding_says_is_recorded(live: Live) -> None:
    record = live.recorded()
    assert record["server"]["version"] == "0.5.23"
    assert len({tuple(one["tokens"]) for one in record["together"]}) == 3
    if live.releases.promotions()["live"] is None:
        assert live.service.manager.status().pid is None, "nothing was live, and nothing is"


def test_one_that_does_not_even_start(live: Live) -> None:
    release = live.deploy()
    with live.taken_back() as outcomes:
        outcomes.append(live.promote(release, "--no-such-argument"))
    assert "--no-such-argument" in outcomes[0].text


def test_one_that_hangs_while_it_loads(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives, and its log says nothing more: it is given up long before any ceiling."""
    release = live.deploy(HANGS)
    monkeypatch.setitem(live.host.health.__dict__, "stalled_log_s", STALLED_S)
    with live.taken_back() as outcomes:
        outcomes.append(live.promote(release))
    assert f"not healthy, and its log has stood still for {STALLED_S:g} s" in outcomes[0].text
    assert "kd test: hangs here" in live.releases.look_at_log(None, 2000)["text"]


def test_one_that_is_healthy_and_cannot_generate(live: Live) -> None:
    release = live.deploy(FAILS)
    seen = len(live.said)
    with live.taken_back() as outcomes:
        outcomes.append(live.promote(release))
    assert any(line.startswith("healthy") for line in live.said[seen:])
    assert "it does not generate" in outcomes[0].text
    assert "kd test: no kernel for this batch" in live.releases.look_at_log(None, 5000)["text"]
    assert release in [one["release"] for one in live.releases.known()["releases"] if one["bad"]]


def test_killed_while_it_loads_nothing_is_lost_and_a_rerun_serves(live: Live) -> None:
    """The promoter, by SIGKILL, as where memory lacks; the server that it began goes on."""
    assert live.promote(None).done
    live.serves(None)
    release, seen = live.deploy(), len(live.said)

    def kill() -> None:
        while f"starts: phase 3 of {release}" not in live.said[seen:]:
            time.sleep(0.1)
        time.sleep(5.0)  # by then it is importing itself
        jobs = pathlib.Path(live.host.root, "jobs").glob("promote-*")
        agent.end_job(live.host.root, max(job.name for job in jobs), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TransportError, match="ended without a result") as caught:
        live.promote(release)
    killer.join()
    assert "kd unlock" in str(caught.value)
    found = live.releases.promotions()
    assert (found["live"]["name"], found["followed"]) == ("stock SGLang", False)
    half_loaded = live.service.manager.status().pid
    assert half_loaded is not None
    holder = live.releases.lock_holder()
    assert holder is not None
    live.releases.break_lock(holder)

    outcome = live.promote(release)
    assert (outcome.result, outcome.text) == ("promoted", f"phase 3 of {release} is live")
    live.serves(release)
    assert live.releases.group_of(half_loaded) == []
    log = live.releases.look_at_log(None, 400)["text"]
    assert "kdtree_mla: SGLang 0.5.23" in log
    assert "verify: kernel" in log


def test_one_that_gives_other_tokens(live: Live) -> None:
    live.good()
    release = live.deploy(SEES_ALL)
    with live.taken_back() as outcomes:
        outcomes.append(live.promote(release))
    assert "other tokens than recorded" in outcomes[0].text


def test_back_twice_and_stopped_on_purpose(live: Live) -> None:
    if live.releases.promotions()["previous"] is None:
        assert live.promote(None).done
    good = live.good()
    newest = live.deploy()
    assert live.promote(newest).done
    live.serves(newest)

    assert live.back().done
    live.serves(good)
    assert live.back().done
    live.serves(None)
    assert live.releases.promotions()["previous"] is None, "what came after is what was fled from"

    now = live.releases.promotions()["live"]
    outcome = live.service.stop(now, command="kd stop", note=live.said.append)
    assert (outcome.result, outcome.text) == ("off", "stock SGLang is stopped, on purpose")
    assert live.service.manager.status().pid is None
    assert live.releases.promotions()["stopped"] is not None


def test_the_live_service_profiles_itself(live: Live, tmp_path: pathlib.Path) -> None:
    """Over SSH: the trace comes here, and nothing of it stays there."""
    release = live.good()
    asked = {"name": "here-48-1", "context": 48, "batch": 1, "steps": 3, "vocabulary": 480}
    found = live.service.profile({**asked, "seed": 1, "new_tokens": 4096}, tmp_path)
    (trace,) = map(pathlib.Path, found["traces"])
    assert trace.parent == tmp_path
    assert b"step[VERIFY" in gzip.decompress(trace.read_bytes())
    assert found["server"]["attention_backend"] == "kdtree_mla"
    assert list((pathlib.Path(live.host.root) / "profiles").iterdir()) == []
    live.serves(release)


def test_no_secret_is_anywhere_but_where_the_host_keeps_it(live: Live) -> None:
    live.recorded()
    for path in pathlib.Path(live.host.root).rglob("*"):
        if path.is_file() and path.name != "secrets.env":
            assert live.secret.encode() not in path.read_bytes(), path
    assert not any(live.secret in line for line in live.said)


def test_under_a_real_systemd(
    root: pathlib.Path, machine: SystemdMachine, tmp_path: pathlib.Path
) -> None:
    """Made live, killed, started again, replaced by stock SGLang, and taken back to."""
    if ssh_server.SSHD is None or shutil.which("rsync") is None:
        pytest.skip("sshd and rsync are needed (apt-get install openssh-server rsync)")
    for name in ("sshd", "checkout", "host"):
        (tmp_path / name).mkdir()
    server = ssh_server.SshServer(tmp_path / "sshd", enter=machine.enter)
    checkout = clone(root, tmp_path / "checkout")
    there = Live(tmp_path / "host", server, checkout, "systemd")
    try:
        good = there.good()
        there.serves(good)
        status = there.service.manager.status()
        assert machine.has(status.pid or 0)
        group = there.releases.group_of(status.pid or 0)
        assert len(group) > 2, "SGLang has processes of its own"

        machine.run("kill", "-KILL", str(status.pid))
        deadline = time.monotonic() + 60
        while there.service.manager.status().pid is not None and time.monotonic() < deadline:
            time.sleep(0.5)
        assert there.service.manager.status().pid is None
        assert not any(map(machine.has, group)), "the unit's other processes end with it"

        live = there.releases.promotions()["live"]
        checks = expected(there.recorded()).checks
        again = there.service.again(
            "restart", live, checks, seen=live, command="kd restart", note=there.said.append
        )
        assert again.done, again.text
        there.serves(good)
        assert there.promote(None).done
        there.serves(None)
        assert there.back().done
        there.serves(good)
        assert "kdtree_mla: SGLang 0.5.23" in there.releases.look_at_log(None, 400)["text"]
    finally:
        there.close()
        server.stop()
    assert there.secret not in "".join(there.said)
