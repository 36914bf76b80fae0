"""A service that is started, looked at and ended: by a real supervisord and a real systemd."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from systemd_machine import MachineTransport, SystemdMachine

from kdtree_engine.errors import ConfigError
from remote import agent, launch, managers
from remote.errors import TransportError
from remote.inventory import LocalHost, Service
from remote.local import LocalTransport
from remote.releases import ReleaseRefused, Releases
from remote.service import (
    Manager,
    State,
    Status,
    Supervisor,
    Systemd,
    manager_of,
    service_document,
)

PYTHON = sys.executable
SERVICE = Service(
    manager="supervisor",
    unit="sglang",
    model_path="/models/it's a model",
    tensor_parallel=8,
    arguments=("--page-size", "1", "$(id) 100%"),
    environment=("TOKEN",),
)
# Serves until it is ended; what it was started with stands in a file. Its child ignores TERM.
_SERVER = """
import json, os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
told = {"arguments": sys.argv[1:], "environment": dict(os.environ), "child": child.pid}
part = pathlib.Path("told.part")
part.write_text(json.dumps(told))
part.rename("told.json")
print("serves", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "a root's#;"


@pytest.fixture
def host(root: pathlib.Path) -> Releases:
    return Releases(LocalTransport(), python=PYTHON, root=str(root))


@pytest.fixture
def supervisor(host: Releases, root: pathlib.Path) -> Iterator[Supervisor]:
    """kd's supervisord under `root`; it and all that it runs are gone afterwards."""
    pytest.importorskip("supervisor", reason="supervisor is not installed")
    made = Supervisor(LocalTransport(), host, unit="sglang", python=PYTHON)
    yield made
    control = [PYTHON, "-m", "supervisor.supervisorctl", "-c", f"{root}/service/supervisord.conf"]
    subprocess.run([*control, "shutdown"], capture_output=True, check=False, timeout=60)
    until(lambda: not (root / "service/supervisord.pid").exists(), 40)


def until(happens: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def serves(host: Releases, *command: str, **more: Any) -> None:
    document = {"command": list(command), "environment": {}, "from_host": [], **more}
    host.put_service("service.json", json.dumps(document))


def told(root: pathlib.Path) -> dict[str, Any]:
    until((root / "service/told.json").exists, 20)
    found: dict[str, Any] = json.loads((root / "service/told.json").read_text())
    return found


@dataclasses.dataclass
class Managed:
    """A service of one manager, on a host whose processes may have other numbers than here."""

    manager: Manager
    host: Releases
    root: pathlib.Path
    transport: LocalTransport

    def kill(self, pid: int) -> None:
        self.transport.run(["kill", "-KILL", str(pid)], timeout=20)

    def lives(self, pid: int) -> bool:
        done = self.transport.run(["cat", f"/proc/{pid}/stat"], timeout=20, check=False)
        return done.exit_code == 0 and ") Z " not in done.stdout

    def serves(self, *command: str, **more: Any) -> None:
        serves(self.host, *command, **more)


@pytest.fixture(params=["supervisor", "systemd"])
def managed(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Managed]:
    if request.param == "supervisor":
        made = Managed(
            request.getfixturevalue("supervisor"),
            request.getfixturevalue("host"),
            request.getfixturevalue("root"),
            LocalTransport(),
        )
        yield made
        return
    machine: SystemdMachine = request.getfixturevalue("machine")
    machine.drop_in("sglang", "[Service]", "TimeoutStopSec=3")  # of a test that has no minute
    transport = MachineTransport(machine.enter)
    root = tmp_path / 'a root\'s#; 100% "%h" ${HOME} $$ \\x ü'
    python = tmp_path / "my $x  ${HOME} $$ 100% #;ü" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    python.chmod(0o755)
    host = Releases(transport, python=PYTHON, root=str(root))
    manager = Systemd(transport, host, unit="sglang", python=str(python))
    yield Managed(manager, host, root, transport)
    manager.stop()
    machine.forget("sglang")


@pytest.mark.slow
def test_a_service_is_started_and_its_whole_group_ended(managed: Managed) -> None:
    manager, host, root = managed.manager, managed.host, managed.root
    manager.install()
    assert manager.status().state is State.STOPPED
    hostile = ["two words", "it's", "$(id)", "$HOME ${HOME} $$", "100%", "%(here)s %h", '"', "ü"]
    hostile += ["\\", "\\n", " ", "", "a\nb", "\x1b[0m"]
    given = {f"V{number}": word for number, word in enumerate(hostile)}
    managed.serves(PYTHON, "-c", _SERVER, *hostile, environment={**given, "PYTHONPATH": "/a"})
    manager.start()
    found = told(root)
    assert found["arguments"] == hostile
    assert {name: found["environment"][name] for name in given} == given
    assert found["environment"]["PYTHONPATH"] == "/a"
    status = manager.status()
    assert status.state is State.RUNNING
    assert status.pid is not None
    group = host.group_of(status.pid)
    assert {status.pid, found["child"]} <= set(group)
    manager.install()
    assert manager.status().pid == status.pid, "a running one is left alone"
    manager.stop()
    assert manager.status().state is State.STOPPED
    assert host.group_of(status.pid) == []
    assert "serves" in (root / "service/service.log").read_text()
    manager.stop()  # nothing to do


def test_sudo_never_asks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would ask for a password is one line at once."""
    sudo = tmp_path / "sudo"
    sudo.write_text(
        '#!/bin/sh\n[ "$1" = -n ] || exec sleep 60\n'
        'echo "sudo: a password is required" >&2; exit 1\n'
    )
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(managers, "_LIMIT_S", 5.0)
    unit = managers.Systemd(str(tmp_path), "sglang", PYTHON, tmp_path)
    with pytest.raises(agent.Refused, match=r"sudo -n systemctl start.*a password is required"):
        unit._as_root("systemctl", "start", "sglang", limit_s=5.0)


@pytest.mark.slow
def test_what_made_a_session_of_its_own_ends_too(managed: Managed) -> None:
    """A rank that did so, works elsewhere and ignores being asked to end would hold its GPU."""
    manager = managed.manager
    manager.install()
    alone = 'time.sleep(600)"], start_new_session=True, cwd="/")'
    own = _SERVER.replace('time.sleep(600)"])', alone)
    assert own != _SERVER
    managed.serves(PYTHON, "-c", own)
    manager.start()
    child = told(managed.root)["child"]
    first = manager.status().pid
    assert first is not None
    assert child not in managed.host.group_of(first)
    assert managed.lives(child)
    manager.stop()
    assert not managed.lives(child)


@pytest.mark.slow
def test_the_next_start_is_of_what_it_says_then(managed: Managed) -> None:
    managed.manager.install()
    for name in ("first", "second"):
        (managed.root / "service/told.json").unlink(missing_ok=True)
        managed.serves(PYTHON, "-c", _SERVER.replace("SIG_IGN", "SIG_DFL"), name)
        managed.manager.start()
        assert told(managed.root)["arguments"] == [name]
        managed.manager.stop()


@pytest.mark.slow
def test_a_service_that_ends_at_once_has_failed(managed: Managed) -> None:
    manager = managed.manager
    manager.install()
    managed.serves(PYTHON, "-c", "raise SystemExit('no such model')")
    with pytest.raises(TransportError, match=f"{manager.kind}: sglang: "):
        manager.start()
    assert manager.status().state is State.FAILED
    assert "no such model" in (managed.root / "service/service.log").read_text()
    time.sleep(1.5)
    assert manager.status().pid is None, "it is not started again and again"


@pytest.mark.slow
def test_a_service_that_is_killed_has_failed(managed: Managed) -> None:
    manager = managed.manager
    manager.install()
    managed.serves(PYTHON, "-c", _SERVER)
    manager.start()
    found = told(managed.root)
    pid = manager.status().pid
    assert pid is not None
    managed.kill(pid)
    until(lambda: manager.status().state is State.FAILED, 2)
    assert managed.lives(found["child"])
    manager.stop()
    assert not managed.lives(found["child"]), "what it had started is ended too"


@pytest.mark.slow
def test_nothing_is_started_beside_what_lives_of_an_earlier_one(managed: Managed) -> None:
    manager = managed.manager
    manager.install()
    managed.serves(PYTHON, "-c", _SERVER)
    manager.start()
    child = told(managed.root)["child"]
    pid = manager.status().pid
    assert pid is not None
    managed.kill(pid)
    until(lambda: manager.status().state is State.FAILED, 2)
    (managed.root / "service/told.json").unlink()
    manager.start()
    assert not managed.lives(child)
    told(managed.root)
    manager.stop()


@pytest.mark.slow
def test_it_may_be_started_again_and_again(managed: Managed) -> None:
    """systemd has a limit of its own for that, and a promotion that fails at once needs more."""
    manager = managed.manager
    manager.install()
    managed.serves("sleep", "600")
    for _ in range(7):
        manager.start()
        pid = manager.status().pid
        assert pid is not None
        managed.kill(pid)
        until(lambda: manager.status().state is State.FAILED, 5)
    manager.start()
    assert manager.status().state is State.RUNNING


Launched = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def launched(host: Releases, root: pathlib.Path) -> Iterator[Launched]:
    """Launch the service of `_SERVER` in a session of its own, as a manager does."""
    started: list[subprocess.Popen[bytes]] = []

    def launch_it() -> subprocess.Popen[bytes]:
        serves(host, PYTHON, "-c", _SERVER)
        host.put_service("launch.py", pathlib.Path(launch.__file__).read_text())
        line = [PYTHON, str(root / "service/launch.py")]
        started.append(subprocess.Popen(line, start_new_session=True, cwd="/"))
        told(root)
        return started[-1]

    yield launch_it
    for one in started:
        one.kill()
        one.wait()
        host.kill_group(one.pid)


class TestLeft:
    """What lives of a service, as `launch.py` noted it, and no manager knows."""

    def test_the_whole_group_of_a_first_process_that_lives(
        self, host: Releases, launched: Launched
    ) -> None:
        assert host.service_left() == []
        first = launched()
        assert host.service_left() == host.group_of(first.pid)
        assert first.pid in host.service_left()

    def test_what_outlived_a_first_process(
        self,
        host: Releases,
        root: pathlib.Path,
        launched: Launched,
    ) -> None:
        first = launched()
        first.kill()
        first.wait()
        child = told(root)["child"]
        assert host.service_left() == [child]
        host.end_service_left(kill=True)
        until(lambda: host.service_left() == [], 10)

    def test_a_number_that_is_another_s_by_now_is_left_alone(
        self,
        host: Releases,
        root: pathlib.Path,
        launched: Launched,
    ) -> None:
        """One that lives was started at another time; one that has died worked elsewhere."""
        first = launched()
        note = root / "service/service.pid"
        noted = json.loads(note.read_text())
        assert noted["pid"] == first.pid
        note.write_text(json.dumps({**noted, "started": noted["started"] - 1}))
        assert host.service_left() == []
        other = "import subprocess; subprocess.Popen(['sleep', '600'])"
        daemon = subprocess.Popen([PYTHON, "-c", other], start_new_session=True, cwd="/")
        daemon.wait()
        note.write_text(json.dumps({**noted, "pid": daemon.pid}))
        (sleeps,) = host.group_of(daemon.pid)
        assert host.service_left() == []
        os.kill(sleeps, 9)

    @pytest.mark.parametrize(
        "noted",
        [
            *("", "[]", "{}", '{"pid": 0, "started": 0}', '{"pid": "x"}'),
            *('{"pid": 1e999, "started": 1}', "[" * 100_000),
        ],
    )
    def test_a_note_that_says_nothing_is_of_nobody(self, host: Releases, noted: str) -> None:
        host.put_service("service.pid", noted)
        assert host.service_left() == []


@pytest.fixture
def systemd(
    host: Releases, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Systemd, pathlib.Path]:
    """A manager beside a systemctl that runs what it starts in words alone; its folder of units."""
    programs, units = tmp_path / "bin", tmp_path / "units"
    programs.mkdir()
    units.mkdir()
    for name, text in (
        (
            "systemctl",
            '[ "$1" != start ] || touch "$0.on"; echo MainPID=0; echo LoadState=loaded\n'
            'if [ -e "$0.on" ]; then echo ActiveState=active; else echo ActiveState=failed; fi',
        ),
        ("sudo", 'shift; exec "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(Systemd, "units", str(units))
    return Systemd(LocalTransport(), host, unit="sglang", python=PYTHON), units


class TestSystemd:
    @pytest.mark.parametrize("act", [Systemd.stop, Systemd.start])
    def test_what_outlived_its_first_process_is_ended(
        self,
        systemd: tuple[Systemd, pathlib.Path],
        root: pathlib.Path,
        launched: Launched,
        act: Callable[[Systemd], None],
    ) -> None:
        first = launched()
        child = told(root)["child"]
        first.kill()
        first.wait()
        assert lives(child)
        act(systemd[0])
        assert not lives(child)

    def test_its_own_unit_is_written_again(self, systemd: tuple[Systemd, pathlib.Path]) -> None:
        manager, units = systemd
        for _ in range(2):
            manager.install()
        assert (units / "sglang.service").read_text().startswith("# Written by kd.")

    @pytest.mark.parametrize("text", ["[Unit]\n", "", "# Written by kdump\n"])
    def test_another_s_unit_is_refused(
        self, systemd: tuple[Systemd, pathlib.Path], text: str
    ) -> None:
        manager, units = systemd
        (units / "sglang.service").write_text(text)
        with pytest.raises(ReleaseRefused, match="is there, and kd has not written it") as caught:
            manager.install()
        assert f"{units}/sglang.service" in str(caught.value)
        assert "name another `unit` in remote/hosts.yaml" in str(caught.value)
        assert (units / "sglang.service").read_text() == text

    def test_a_unit_that_is_a_link_is_refused(
        self, systemd: tuple[Systemd, pathlib.Path], tmp_path: pathlib.Path
    ) -> None:
        """As a masked one is, and one that was linked from elsewhere."""
        manager, units = systemd
        for target in ("/dev/null", str(tmp_path / "nowhere")):
            (units / "sglang.service").unlink(missing_ok=True)
            (units / "sglang.service").symlink_to(target)
            with pytest.raises(ReleaseRefused, match="kd has not written it"):
                manager.install()
            assert (units / "sglang.service").is_symlink()


@pytest.mark.slow
def test_a_python_without_supervisor_is_one_line(host: Releases, tmp_path: pathlib.Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {PYTHON} -S "$@"\n')
    bare.chmod(0o755)
    manager = Supervisor(LocalTransport(), host, unit="sglang", python=str(bare))
    with pytest.raises(ReleaseRefused, match="has no supervisor") as caught:
        manager.install()
    assert "pip install supervisor" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 120, "root is too long for a socket"),
        ("100%", "cannot have a percent sign in root"),
        ("kd #1", "cannot have a space before # or ; in root"),
        ("kd ;x", "cannot have a space before # or ; in root"),
    ],
)
def test_a_root_that_supervisor_cannot_have_is_refused(
    tmp_path: pathlib.Path, name: str, says: str
) -> None:
    releases = Releases(LocalTransport(), python=PYTHON, root=str(tmp_path / name))
    manager = Supervisor(LocalTransport(), releases, unit="sglang", python=PYTHON)
    with pytest.raises(ConfigError, match=says):
        manager.install()


@pytest.mark.parametrize("folder", ["it's", '"q"', "back\\slash"])
def test_a_python_that_systemd_cannot_have_is_refused(host: Releases, folder: str) -> None:
    manager = Systemd(LocalTransport(), host, unit="sglang", python=f"/opt/{folder}/python")
    with pytest.raises(ConfigError, match="cannot have a quote or a backslash in python: /opt/"):
        manager.install()


def test_a_python_that_supervisor_cannot_have_is_refused(host: Releases) -> None:
    manager = Supervisor(LocalTransport(), host, unit="sglang", python="/opt/my #1/python")
    with pytest.raises(ConfigError, match="space before # or ; in python: /opt/my #1/python"):
        manager.install()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("sglang  RUNNING   pid 12, uptime 0:00:03", (State.RUNNING, 12)),
        ("sglang  STARTING", (State.RUNNING, None)),
        ("sglang  STOPPED   Not started", (State.STOPPED, None)),
        ("sglang  EXITED    Nov 29 10:00 AM", (State.FAILED, None)),
        ("sglang  FATAL     Exited too quickly", (State.FAILED, None)),
        ("", (State.STOPPED, None)),
    ],
)
def test_what_supervisor_says(said: str, status: tuple[State, int | None]) -> None:
    state, pid = status
    assert managers.supervisor_status(said) == {"state": state, "pid": pid, "said": said}


@pytest.mark.parametrize(
    ("active", "pid", "result", "code", "status"),
    [
        ("active", "12", "success", "0", Status(State.RUNNING, 12, "success")),
        ("inactive", "0", "success", "0", Status(State.STOPPED, None, "success")),
        ("failed", "0", "exit-code", "3", Status(State.FAILED, None, "exit-code 3")),
        ("failed", "0", "exit-code", "203", Status(State.FAILED, None, "exit-code 203/EXEC")),
        ("failed", "0", "timeout", "15", Status(State.FAILED, None, "timeout")),
        ("deactivating", "12", "success", "0", Status(State.RUNNING, 12, "success")),
        ("deactivating", "0", "signal", "9", Status(State.FAILED, None, "signal 9")),
        ("deactivating", "0", "success", "0", Status(State.STOPPED, None, "success")),
        ("", "", "", "", Status(State.FAILED, None, "")),
    ],
)
def test_what_systemd_says(active: str, pid: str, result: str, code: str, status: Status) -> None:
    found = managers.systemd_status(
        {"ActiveState": active, "MainPID": pid, "Result": result, "ExecMainStatus": code}
    )
    assert Status(State(found["state"]), found["pid"], found["said"]) == status


@pytest.mark.parametrize("root", ["/srv/kd", '/srv/100% "kd" $HOME\\x'])
def test_a_unit_is_one_that_systemd_takes(
    host: Releases, tmp_path: pathlib.Path, root: str
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on PATH")
    manager = Systemd(LocalTransport(), host, unit="sglang", python=PYTHON)
    unit = tmp_path / "sglang.service"
    unit.write_text(manager.unit_text(root, "root", PYTHON))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_promotion_is_one_document() -> None:
    document = service_document(
        SERVICE,
        python="/opt/python",
        site="/srv/kd/releases/a/site",
        arguments=("--attention-backend", "kdtree_mla"),
        environment={"KDTREE_VERIFY": "1"},
    )
    assert document == {
        "command": [
            *("/opt/python", "-m", "sglang.launch_server"),
            *("--model-path", "/models/it's a model", "--tp-size", "8", "--port", "30000"),
            *("--page-size", "1", "$(id) 100%"),
            *("--attention-backend", "kdtree_mla"),
        ],
        "environment": {"KDTREE_VERIFY": "1", "PYTHONPATH": "/srv/kd/releases/a/site"},
        "from_host": ["TOKEN"],
    }


@pytest.mark.parametrize("name", ["PYTHONPATH", "KDTREE_VERIFY"])
def test_what_a_promotion_sets_cannot_come_from_the_host(name: str) -> None:
    wants = SERVICE.model_copy(update={"environment": ("TOKEN", name)})
    with pytest.raises(ConfigError, match=f"service sglang: {name} is set for the release"):
        service_document(
            wants,
            python="/opt/python",
            site="/srv/kd/releases/a/site",
            arguments=(),
            environment={"KDTREE_VERIFY": "1"},
        )


def test_a_host_without_a_service_is_said_so(host: Releases) -> None:
    bare = LocalHost(name="here", kind="local", root="/tmp/kd")
    with pytest.raises(ConfigError, match="host here has no service"):
        manager_of(LocalTransport(), host, bare, PYTHON)
    for manager, made in (("supervisor", Supervisor), ("systemd", Systemd)):
        changed = SERVICE.model_copy(update={"manager": manager})
        named = bare.model_copy(update={"service": changed})
        assert isinstance(manager_of(LocalTransport(), host, named, PYTHON), made)


class TestLaunch:
    """What runs under the manager."""

    @pytest.fixture
    def folder(self, tmp_path: pathlib.Path) -> pathlib.Path:
        (tmp_path / "service").mkdir()
        return tmp_path / "service"

    def test_secrets_are_taken_by_name(
        self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = folder.parent / "secrets.env"
        path.write_text("# of this host\nTOKEN=s3cr=t $x\nOTHER=hidden\n\n")
        path.chmod(0o600)
        monkeypatch.setenv("FROM_MANAGER", "here")
        found = launch.environment(
            {"environment": {"A": "1"}, "from_host": ["TOKEN", "FROM_MANAGER"]}, folder
        )
        assert (found["A"], found["TOKEN"], found["FROM_MANAGER"]) == ("1", "s3cr=t $x", "here")
        assert "OTHER" not in found

    @pytest.mark.parametrize("odd", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r"])
    def test_a_newline_alone_ends_a_value(self, folder: pathlib.Path, odd: str) -> None:
        path = folder.parent / "secrets.env"
        path.write_bytes(f"TOKEN=a{odd}b\nOTHER=c\r\nLAST=d".encode())
        path.chmod(0o600)
        assert launch.secrets(path) == {"TOKEN": f"a{odd}b", "OTHER": "c", "LAST": "d"}

    def test_a_secret_cannot_be_what_is_set_for_the_release(
        self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = folder.parent / "secrets.env"
        path.write_text("PYTHONPATH=/another/engine\nA=2\n")
        path.chmod(0o600)
        for name, given in (("A", {"A": "1"}), ("PYTHONPATH", {})):
            with pytest.raises(launch.Refused, match=f"{name}: set for the release") as caught:
                launch.environment({"environment": given, "from_host": [name]}, folder)
            assert "/another/engine" not in str(caught.value)

    def test_the_model_s_path_may_begin_in_the_home_folder(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No shell reads it, and SGLang would take it for a name to be fetched."""
        monkeypatch.setenv("HOME", "/home/kd")
        line = ["~/python", "-m", "x", "--model-path", "~/model", "--other", "~/as it is"]
        assert launch.in_home(line) == [
            *("/home/kd/python", "-m", "x", "--model-path", "/home/kd/model"),
            *("--other", "~/as it is"),
        ]

    def test_a_missing_secret_is_named(self, folder: pathlib.Path) -> None:
        with pytest.raises(launch.Refused, match="KD_NOT_THERE: named for this service"):
            launch.environment({"environment": {}, "from_host": ["KD_NOT_THERE"]}, folder)

    def test_secrets_that_others_can_read_are_refused(self, folder: pathlib.Path) -> None:
        path = folder.parent / "secrets.env"
        path.write_text("TOKEN=secret\n")
        path.chmod(0o640)
        with pytest.raises(launch.Refused, match="can be read by others: chmod 600") as caught:
            launch.secrets(path)
        assert "secret\n" not in str(caught.value)

    def test_a_wrong_line_is_named_and_not_shown(self, folder: pathlib.Path) -> None:
        path = folder.parent / "secrets.env"
        for wrong in ("export B=hush", "B=hush\0"):  # no program can be given a NUL
            path.write_text(f"TOKEN=a\n{wrong}\n")
            path.chmod(0o600)
            with pytest.raises(launch.Refused, match=r"secrets\.env, line 2: expected NAM") as e:
                launch.secrets(path)
            assert "hush" not in str(e.value)

    @pytest.mark.parametrize(
        ("document", "says"),
        [
            (None, "No such file"),
            ("no json", "Expecting value"),
            ([], "service.json: expected an object with command, environment, from_host"),
            ({"environment": {}, "from_host": []}, "service.json: expected an object with command"),
            ({"command": [], "environment": {}, "from_host": []}, "a command that is not empty"),
            ({"command": "id", "environment": {}, "from_host": []}, "expected an object with"),
            ({"command": [1], "environment": {}, "from_host": []}, "expected texts in command"),
            ({"command": ["/x\0"], "environment": {}, "from_host": []}, "embedded null byte"),
            ({"command": ["/not/there"], "environment": {}, "from_host": []}, "No such file"),
        ],
    )
    def test_what_cannot_be_started_is_one_line(
        self, folder: pathlib.Path, document: Any, says: str
    ) -> None:
        shutil.copy(launch.__file__, folder / "launch.py")
        if document is not None:
            text = document if isinstance(document, str) else json.dumps(document)
            (folder / "service.json").write_text(text)
        done = subprocess.run(
            [PYTHON, str(folder / "launch.py")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 78
        assert done.stderr.startswith("kd: the service cannot be started: ")
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
