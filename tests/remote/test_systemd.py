"""What only systemd does, by a real one: see `systemd_machine`.

What it does as supervisord does is in test_service.py and test_promotion.py, for both.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from systemd_machine import SYSTEM_PYTHON, MachineTransport, SystemdMachine

from remote import managers
from remote.releases import ReleaseRefused, Releases
from remote.service import Manager, State, Systemd

pytestmark = pytest.mark.slow

PYTHON = sys.executable
# One that leaves its parent, its session and its group, and ignores being asked to end.
_DAEMON = """
import os, pathlib, signal, subprocess, sys, time
if not os.fork():
    os.setsid()
    os.chdir("/")
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        part = pathlib.Path(sys.argv[1] + ".part")
        part.write_text(str(os.getpid()))
        part.rename(sys.argv[1])
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
_TELLS = """
import json, os, pathlib, sys, time
pathlib.Path(sys.argv[1] + ".part").write_text(json.dumps(dict(os.environ)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
# What systemctl speaks to is below /run.
_NO_SYSTEMD = 'mount -t tmpfs none /run && mkdir -p /run/systemd/system && exec "$@"'
_REQUEST = {"model": "/nowhere", "port": 1, "tensor_parallel": 1, "cuda_arch": None}
HOSTILE = {
    "SPACES": "two  words ",
    "QUOTE": "it's",
    "QUOTES": 'say "x"',
    "DOLLARS": "$HOME ${HOME} $$ `id`",
    "PERCENT": "100% %h %%",
    "BACKSLASH": "a\\n\\",
    "LINES": "a\nb",
    "UNICODE": "ü→",
    "EMPTY": "",
    "NAME_LIKE": "x OTHER=1",
}


@pytest.fixture
def transport(machine: SystemdMachine) -> MachineTransport:
    return MachineTransport(machine.enter)


@pytest.fixture
def host(transport: MachineTransport, tmp_path: pathlib.Path) -> Releases:
    return Releases(transport, python=PYTHON, root=str(tmp_path / "root"))


@pytest.fixture
def systemd(
    machine: SystemdMachine, transport: MachineTransport, host: Releases
) -> Iterator[Systemd]:
    """kd's unit `sglang`, which is not installed yet."""
    machine.drop_in("sglang", "[Service]", "TimeoutStopSec=2")  # of a test that has no minute
    made = Systemd(transport, host, unit="sglang", python=PYTHON)
    yield made
    made.stop()
    machine.forget("sglang")


def serves(host: Releases, *command: str, **more: Any) -> None:
    document = {"command": list(command), "environment": {}, "from_host": [], **more}
    host.put_service("service.json", json.dumps(document))


def until(happens: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def first_of(manager: Manager) -> int:
    pid = manager.status().pid
    assert pid is not None
    return pid


def test_a_process_that_left_its_group_and_session_ends_too(
    systemd: Systemd, host: Releases, machine: SystemdMachine, tmp_path: pathlib.Path
) -> None:
    systemd.install()
    note = tmp_path / "daemon"
    serves(host, PYTHON, "-c", _DAEMON, str(note))
    systemd.start()
    until(note.exists)
    daemon = int(note.read_text())
    assert daemon not in host.group_of(first_of(systemd))
    assert "sglang.service" in machine.run("cat", f"/proc/{daemon}/cgroup")
    systemd.stop()
    assert not machine.has(daemon)
    assert systemd.status().state is State.STOPPED


def test_one_that_dies_by_itself_is_not_started_again(
    systemd: Systemd, host: Releases, machine: SystemdMachine
) -> None:
    systemd.install()
    serves(host, "sh", "-c", "sleep 2; echo it is over; exit 3")
    systemd.start()
    assert systemd.status().state is State.RUNNING
    until(lambda: systemd.status().state is State.FAILED)
    assert systemd.status().said == "exit-code 3"
    time.sleep(1.0)
    assert systemd.status().pid is None
    assert "NRestarts=0" in machine.run("systemctl", "show", "sglang", "--property=NRestarts")


def test_a_long_log_is_begun_anew_at_the_next_start(
    systemd: Systemd, host: Releases, tmp_path: pathlib.Path
) -> None:
    """systemd only adds to it; four that were before stay."""
    systemd.install()
    log = tmp_path / "root/service/service.log"
    serves(host, "sh", "-c", "echo one; exec sleep 600")
    for number in range(6):
        with log.open("a") as printed:
            printed.write(f"{number}\n")
            printed.truncate(managers._LOG_BYTES + number)
        systemd.start()
        until(lambda: log.read_text() == "one\n")
        assert log.stat().st_mode & 0o777 == 0o600
        systemd.stop()
    kept = {one.name: one.stat().st_size for one in log.parent.glob("service.log.*")}
    assert kept == {
        f"service.log.{number}": managers._LOG_BYTES + 6 - number for number in range(1, 5)
    }
    systemd.start()
    until(lambda: log.read_text() == "one\none\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("User=nobody-at-all", r"it cannot be started \(exit-code 217/USER\): journalctl -u sgl"),
        ("WorkingDirectory=/not/there", r"it cannot be started \(exit-code 200/CHDIR\)"),
        ("ExecStartPre=/bin/false", r"it cannot be started \(exit-code\)"),
        ("ExecStart=/bin/true", "Unit sglang.service has a bad unit file setting"),
    ],
)
def test_why_it_cannot_be_started_is_said(
    systemd: Systemd, host: Releases, machine: SystemdMachine, line: str, says: str
) -> None:
    machine.drop_in("sglang", "[Service]", line)
    systemd.install()
    serves(host, "sleep", "600")
    with pytest.raises(ReleaseRefused, match=says):
        systemd.start()


def test_it_lives_through_what_an_upgrade_of_systemd_does(
    systemd: Systemd, host: Releases, machine: SystemdMachine
) -> None:
    systemd.install()
    serves(host, "sleep", "600")
    systemd.start()
    pid = first_of(systemd)
    upgrade = subprocess.Popen([*machine.enter, "systemctl", "daemon-reexec"])
    while upgrade.poll() is None:
        assert first_of(systemd) == pid
    assert first_of(systemd) == pid


def test_what_cannot_be_asked_is_not_taken_for_a_failure(
    systemd: Systemd, host: Releases, machine: SystemdMachine
) -> None:
    """A promoter that took it so would have a release taken back that serves."""
    systemd.install()
    without = MachineTransport([*machine.enter, "unshare", "--mount", "sh", "-c", _NO_SYSTEMD, "x"])
    there = Releases(without, python=PYTHON, root=str(host.prepare()["root"]))
    cannot = Systemd(without, there, unit="sglang", python=PYTHON)
    with pytest.raises(ReleaseRefused, match="systemctl does not say: Failed to connect to bus"):
        cannot.status()


@pytest.mark.parametrize("where", ["/run/systemd/system", "/etc/systemd/system"])
def test_another_s_unit_is_refused_wherever_it_is(
    systemd: Systemd, machine: SystemdMachine, where: str
) -> None:
    """One of Debian's would be hidden by kd's, and end with it."""
    machine.run("mkdir", "-p", where)
    there = f"{where}/sglang.service"
    machine.run("sh", "-c", f"printf '[Service]\\nExecStart=/bin/sleep 600\\n' >{there}")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "sglang")
    with pytest.raises(ReleaseRefused, match=f"{there} is there, and kd has not written it"):
        systemd.install()
    assert systemd.status().pid is None, "nothing of kd's runs"
    systemd.stop()
    assert machine.run("systemctl", "is-active", "sglang") == "active\n", "it is left alone"
    machine.run("systemctl", "stop", "sglang")
    machine.run("rm", there)
    machine.run("systemctl", "daemon-reload")
    systemd.install()


def test_a_unit_of_another_root_is_refused_and_left(
    systemd: Systemd, host: Releases, transport: MachineTransport, tmp_path: pathlib.Path
) -> None:
    """Two people on one host, or two entries of the inventory, with one name for their units."""
    systemd.install()
    serves(host, "sleep", "600")
    systemd.start()
    pid = first_of(systemd)
    other = Releases(transport, python=PYTHON, root=str(tmp_path / "other root"))
    theirs = Systemd(transport, other, unit="sglang", python=PYTHON)
    with pytest.raises(
        ReleaseRefused, match=r"sglang\.service is kd's, for the service in .*root/"
    ):
        theirs.install()
    assert theirs.status().pid is None
    theirs.stop()
    assert first_of(systemd) == pid


@pytest.mark.parametrize("damage", [None, "", "# Written by kd. [Unit", "junk"])
def test_one_whose_unit_file_is_gone_or_damaged_can_be_stopped(
    systemd: Systemd, host: Releases, machine: SystemdMachine, damage: str | None
) -> None:
    systemd.install()
    serves(host, "sleep", "600")
    systemd.start()
    pid = first_of(systemd)
    there = machine.units / "sglang.service"
    if damage is None:
        there.unlink()
    else:
        there.write_text(damage)
    assert first_of(systemd) == pid
    systemd.stop()
    assert not machine.has(pid)


def test_an_alias_of_another_s_unit_is_refused(systemd: Systemd, machine: SystemdMachine) -> None:
    machine.run("mkdir", "-p", "/run/systemd/system")
    (machine.units / "other.service").write_text("[Service]\nExecStart=/bin/sleep 600\n")
    machine.run(
        "ln", "-s", "/etc/systemd/system/other.service", "/run/systemd/system/sglang.service"
    )
    machine.run("systemctl", "daemon-reload")
    with pytest.raises(ReleaseRefused, match=r"other\.service is there, and kd has not written it"):
        systemd.install()
    machine.run("rm", "/run/systemd/system/sglang.service")
    machine.forget("other")


def test_a_unit_may_have_the_name_of_another_kind(
    machine: SystemdMachine, transport: MachineTransport, host: Releases
) -> None:
    manager = Systemd(transport, host, unit="sglang.socket", python=PYTHON)
    manager.install()
    serves(host, "sleep", "600")
    manager.start()
    assert manager.status().state is State.RUNNING
    manager.stop()
    assert manager.status().state is State.STOPPED
    machine.forget("sglang.socket")


def test_a_stop_of_what_has_no_unit_any_more(
    systemd: Systemd, host: Releases, machine: SystemdMachine
) -> None:
    systemd.stop()  # there never was one
    systemd.install()
    serves(host, "sleep", "600")
    systemd.start()
    pid = first_of(systemd)
    (machine.units / "sglang.service").unlink()
    machine.run("systemctl", "daemon-reload")
    assert first_of(systemd) == pid
    systemd.stop()
    assert not machine.has(pid)
    systemd.stop()


def test_it_has_no_limit_of_tasks(systemd: Systemd, machine: SystemdMachine) -> None:
    systemd.install()
    said = machine.run("systemctl", "show", "sglang", "--property=TasksMax,LimitMEMLOCK")
    assert said.split() == ["TasksMax=infinity", "LimitMEMLOCK=infinity"]


def test_a_drop_in_s_environment_is_known_as_the_service_gets_it(
    systemd: Systemd, host: Releases, machine: SystemdMachine, tmp_path: pathlib.Path
) -> None:
    """What `kd hosts check` looks for there; with hostile values, and ones that are taken back."""
    quoted = {
        name: value.replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("%", "%%")
        .replace("\n", "\\n")
        for name, value in HOSTILE.items()
    }
    lines = [f'Environment="{name}={value}"' for name, value in quoted.items()]
    drop_in = ["[Service]", *lines, "Environment=GONE=1", "UnsetEnvironment=GONE"]
    machine.drop_in("sglang", *drop_in, "TimeoutStopSec=2")
    machine.run("systemctl", "set-environment", "OF_ALL=$HOME it's\nNOT_ONE=1")
    systemd.install()
    note = tmp_path / "environment"
    serves(host, PYTHON, "-c", _TELLS, str(note), from_host=["QUOTES", "OF_ALL"])
    systemd.start()
    until(note.exists)
    given = json.loads(note.read_text())
    machine.run("systemctl", "unset-environment", "OF_ALL")
    assert {name: given.get(name) for name in HOSTILE} == HOSTILE
    assert given["OF_ALL"] == "$HOME it's\nNOT_ONE=1"
    absent = {"GONE", "NOT_ONE", "OTHER"}
    assert not absent & given.keys()

    def lacks(*names: str) -> str | None:
        request = {**_REQUEST, "manager": systemd.about, "environment": names}
        (secrets,) = (one for one in host.readiness(request) if one["what"] == "secrets")
        return None if secrets["ok"] else str(secrets["said"])

    machine.run("systemctl", "set-environment", "OF_ALL=$HOME it's\nNOT_ONE=1")
    assert lacks(*HOSTILE, "OF_ALL", "HOME", "USER", "PATH") is None
    for name in absent:
        assert f"{name} is named for the service, and not in" in str(lacks(name))
    machine.run("systemctl", "unset-environment", "OF_ALL")
    machine.drop_in("sglang", "[Service]", f"EnvironmentFile={tmp_path}/more", "TimeoutStopSec=2")
    machine.run("systemctl", "daemon-reload")
    assert f"the unit reads more from {tmp_path}/more" in str(lacks("ELSEWHERE"))


class TestOfAPerson:
    """One that is not root, and may use `sudo -n` for systemctl and install."""

    @pytest.fixture
    def theirs(self, machine: SystemdMachine, person: str) -> Iterator[tuple[Systemd, Releases]]:
        transport = MachineTransport(machine.enter_as_person)
        host = Releases(transport, python=SYSTEM_PYTHON, root="~/a root's")
        made = Systemd(transport, host, unit="of-person", python=SYSTEM_PYTHON)
        yield made, host
        made.stop()
        machine.forget("of-person")
        shutil.rmtree(machine.home / "a root's")

    def test_a_service_of_theirs(
        self, theirs: tuple[Systemd, Releases], person: str, machine: SystemdMachine
    ) -> None:
        manager, host = theirs
        manager.install()
        serves(host, "sh", "-c", 'echo "$HOME of $(id -un)"; exec sleep 600')
        manager.start()
        assert manager.status().state is State.RUNNING
        pid = first_of(manager)
        assert machine.run("stat", "--format=%U", f"/proc/{pid}").strip() == person
        until(lambda: host.look_at_log(None, 10)["text"])
        assert host.look_at_log(None, 10)["text"] == f"/run/kd-person of {person}\n"
        manager.stop()
        assert manager.status().state is State.STOPPED
        assert not machine.has(pid)
        looked = {
            one["what"]: one["said"]
            for one in host.readiness(
                {**_REQUEST, "manager": manager.about, "environment": ["USER"]}
            )
            if one["ok"]
        }
        assert (looked["manager"], looked["secrets"]) == ("systemd", "USER")
