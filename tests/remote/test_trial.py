"""A server of a release to try, beside the live service: a real process, a stand-in for SGLang."""

from __future__ import annotations

import pathlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import ssh_server
from stand_in_host import StandInHost

from kdtree_engine.errors import ConfigError
from remote.local import LocalTransport
from remote.promotion import Target, _port_of
from remote.releases import ReleaseRefused
from remote.transport import Transport
from remote.trial import taken

pytest.importorskip("supervisor", reason="supervisor is not installed")


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Iterator[StandInHost]:
    made = StandInHost(tmp_path, LocalTransport())
    yield made
    made.close()


def until(port: int, listens: bool) -> None:
    deadline = time.monotonic() + 30
    while taken(port) != listens:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def target(release: str) -> Target:
    return Target(release, 3, ("--x", "1"), {"KDTREE_TRY": "yes"})


def test_a_server_is_tried_and_ended_and_the_service_goes_on(host: StandInHost) -> None:
    assert host.promote(host.place("a")).done
    host.place("b")
    port = ssh_server.free_port()
    trial = host.live.trial(target("b"), ("--port", str(port)))
    assert trial["service"]["command"][-2:] == ["--port", str(port)]
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        until(port, listens=True)
        host.is_well("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        host.live.serve(trial, said=hear, note=host.said.append)
    until(port, listens=False)
    (line,) = said
    assert line.startswith("starts ")
    assert str(port) in line
    assert host.said[-2:] == [
        "interrupted: ends the run on local",
        "the run on local has ended",
    ]
    host.is_well("a")


def test_what_it_is_given_is_the_releases(tmp_path: pathlib.Path, ssh: Transport) -> None:
    """Over SSH too; and its exit code is the server's."""
    host = StandInHost(tmp_path, ssh)
    try:
        host.place("a", "dies")
        trial = host.live.trial(target("a"), ())
        assert trial["service"]["environment"] == {
            "KDTREE_TRY": "yes",
            "PYTHONPATH": f"{host.root}/releases/a/site",
        }
        said: list[str] = []
        assert host.live.serve(trial, said=said.append, note=host.said.append) != 0
        assert said[-1] == "no such model"
        assert host.releases.promotions()["live"] is None
        assert host.releases.audited(9) == []
    finally:
        host.close()


def test_the_port_of_the_live_service_is_not_taken(host: StandInHost) -> None:
    assert host.promote(host.place("a")).done
    for extra in ((), ("--port", str(host.port))):
        with pytest.raises(ConfigError, match=f"port {host.port} is that of its live service"):
            host.live.trial(target("a"), extra)
    host.is_well("a")


def test_a_service_that_is_to_come_back_keeps_its_port(host: StandInHost) -> None:
    """A restart would find it held, and what was live would stay down."""
    assert host.promote(host.place("a")).done
    host.live.manager.stop()
    with pytest.raises(ConfigError, match=f"port {host.port} is that of its live service"):
        host.live.trial(target("a"), ())


def test_a_port_that_is_in_use_is_named(host: StandInHost) -> None:
    host.place("a")
    said: list[str] = []
    trial = host.live.trial(target("a"), ())
    with socket.create_server(("127.0.0.1", host.port)):
        assert host.live.serve(trial, said=said.append, note=host.said.append) == 78
    assert said == [f"kd: port {host.port} is in use there: name another, -- --port N"]


def test_a_job_of_another_kind_is_not_ended(host: StandInHost) -> None:
    host.releases.prepare()
    host.releases.start_job("promote-x", ["sleep", "60"], {})
    try:
        with pytest.raises(ConfigError, match="job promote-x is no server that kd serve has"):
            host.live.end_trial("promote-x", host.said.append)
        assert host.releases.look_at_job("promote-x")["alive"]
    finally:
        host.releases.end_job("promote-x")


def test_a_release_that_is_gone_is_named(host: StandInHost) -> None:
    host.place("a")
    said: list[str] = []
    trial = {**host.live.trial(target("a"), ()), "release": "b"}
    assert host.live.serve(trial, said=said.append, note=host.said.append) == 78
    assert said == ["kd: release b is not there any more"]


def test_a_secret_that_the_host_lacks_is_named(host: StandInHost) -> None:
    host.place("a")
    said: list[str] = []
    trial = host.live.trial(target("a"), ())
    trial["service"]["from_host"] = ["HF_TOKEN"]
    assert host.live.serve(trial, said=said.append, note=host.said.append) == 78
    assert re.match("kd: HF_TOKEN: named for this service, and neither in ", said[0])


def test_one_left_running_is_ended_by_its_job(host: StandInHost) -> None:
    host.place("a")
    trial = host.live.trial(target("a"), ())
    running = threading.Thread(
        target=host.live.serve, args=(trial,), kwargs={"said": lambda _: 0, "note": lambda _: 0}
    )
    running.start()
    until(host.port, listens=True)
    (job,) = host.releases.jobs()
    host.live.end_trial(job["name"], host.said.append)
    running.join(30)
    until(host.port, listens=False)
    assert host.said[-1] == "the run on local has ended"
    with pytest.raises(ReleaseRefused, match="there is no job serve-x"):
        host.live.end_trial("serve-x", host.said.append)


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ((), None),
        (("--x", "--por"), None),
        (("--port", "30001"), 30_001),
        (("--port=30001", "--y", "1"), 30_001),
        (("--port", "1", "--port", "2"), 2),
    ],
)
def test_the_port_that_arguments_name(arguments: tuple[str, ...], port: int | None) -> None:
    assert _port_of(arguments) == port


@pytest.mark.parametrize(
    "arguments", [("--port",), ("--port", "x"), ("--port=0",), ("--port=99999",)]
)
def test_what_is_no_port_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--port: expected a number from 1 to 65535"):
        _port_of(arguments)
