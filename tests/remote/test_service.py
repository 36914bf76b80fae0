"""A service that is started, looked at and ended: by a real supervisord, and as systemd units."""

from __future__ import annotations

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

from kdtree_engine.errors import ConfigError
from remote import launch, managers
from remote.errors import TransportError
from remote.inventory import LocalHost, Service
from remote.local import LocalTransport
from remote.releases import ReleaseRefused, Releases
from remote.service import (
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
    return tmp_path / "a root's"


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


def serves(host: Releases, *command: str, **more: Any) -> None:
    document = {"command": list(command), "environment": {}, "from_host": [], **more}
    host.put_service("service.json", json.dumps(document))


def told(root: pathlib.Path) -> dict[str, Any]:
    until((root / "service/told.json").exists, 20)
    found: dict[str, Any] = json.loads((root / "service/told.json").read_text())
    return found


@pytest.mark.slow
def test_a_service_is_started_and_its_whole_group_ended(
    supervisor: Supervisor, host: Releases, root: pathlib.Path
) -> None:
    supervisor.install()
    assert supervisor.status().state is State.STOPPED
    hostile = ["two words", "it's", "$(id)", "100%", "%(here)s", '"', "ü"]
    serves(host, PYTHON, "-c", _SERVER, *hostile, environment={"PYTHONPATH": "/a release"})
    supervisor.start()
    found = told(root)
    assert found["arguments"] == hostile
    assert found["environment"]["PYTHONPATH"] == "/a release"
    status = supervisor.status()
    assert status.state is State.RUNNING
    assert status.pid is not None
    group = host.group_of(status.pid)
    assert {status.pid, found["child"]} <= set(group)
    supervisor.install()
    assert supervisor.status().pid == status.pid, "a running one is left alone"
    supervisor.stop()
    assert supervisor.status().state is State.STOPPED
    assert host.group_of(status.pid) == []
    assert "serves" in (root / "service/service.log").read_text()
    supervisor.stop()  # nothing to do


@pytest.mark.slow
def test_the_next_start_is_of_what_it_says_then(
    supervisor: Supervisor, host: Releases, root: pathlib.Path
) -> None:
    supervisor.install()
    for name in ("first", "second"):
        (root / "service/told.json").unlink(missing_ok=True)
        serves(host, PYTHON, "-c", _SERVER.replace("SIG_IGN", "SIG_DFL"), name)
        supervisor.start()
        assert told(root)["arguments"] == [name]
        supervisor.stop()


@pytest.mark.slow
def test_a_service_that_ends_at_once_has_failed(
    supervisor: Supervisor, host: Releases, root: pathlib.Path
) -> None:
    supervisor.install()
    serves(host, PYTHON, "-c", "raise SystemExit('no such model')")
    with pytest.raises(TransportError, match="supervisor: sglang: ERROR"):
        supervisor.start()
    assert supervisor.status().state is State.FAILED
    assert "no such model" in (root / "service/service.log").read_text()
    time.sleep(1.5)
    assert supervisor.status().pid is None, "it is not started again and again"


@pytest.mark.slow
def test_a_service_that_is_killed_has_failed(
    supervisor: Supervisor, host: Releases, root: pathlib.Path
) -> None:
    supervisor.install()
    serves(host, PYTHON, "-c", _SERVER)
    supervisor.start()
    found = told(root)
    pid = supervisor.status().pid
    assert pid is not None
    os.kill(pid, 9)
    until(lambda: supervisor.status().state is State.FAILED, 10)
    os.kill(found["child"], 9)


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
    [("x" * 120, "root is too long for a socket"), ("100%", "cannot have a percent sign in root")],
)
def test_a_root_that_supervisor_cannot_have_is_refused(
    tmp_path: pathlib.Path, name: str, says: str
) -> None:
    releases = Releases(LocalTransport(), python=PYTHON, root=str(tmp_path / name))
    manager = Supervisor(LocalTransport(), releases, unit="sglang", python=PYTHON)
    with pytest.raises(ConfigError, match=says):
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
    ("said", "status"),
    [
        ("ActiveState=active\nMainPID=12\nResult=success\n", Status(State.RUNNING, 12, "success")),
        ("MainPID=0\nActiveState=inactive\nResult=success", Status(State.STOPPED, None, "success")),
        (
            "ActiveState=failed\nMainPID=0\nResult=exit-code",
            Status(State.FAILED, None, "exit-code"),
        ),
    ],
)
def test_what_systemd_says(said: str, status: Status) -> None:
    found = managers.systemd_status(said)
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


def test_a_host_without_a_service_is_said_so(host: Releases) -> None:
    bare = LocalHost(name="here", kind="local", root="/tmp/kd")
    with pytest.raises(ConfigError, match="host here has no service"):
        manager_of(LocalTransport(), host, bare, PYTHON)
    for manager, made in (("supervisor", Supervisor), ("systemd", Systemd)):
        service = SERVICE.model_copy(update={"manager": manager})
        named = bare.model_copy(update={"service": service})
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
        path.write_text("TOKEN=a\nexport B=hush\n")
        path.chmod(0o600)
        with pytest.raises(launch.Refused, match=r"secrets\.env, line 2: expected NAME=value") as e:
            launch.secrets(path)
        assert "hush" not in str(e.value)

    @pytest.mark.parametrize(
        ("document", "says"),
        [
            (None, "No such file"),
            ("no json", "Expecting value"),
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
