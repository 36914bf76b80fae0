"""Work that outlives the connection it was begun over, on this machine and over SSH."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from remote import agent
from remote.errors import TransportError
from remote.jobs import Heard, follow, new_job_name, run_job
from remote.local import LocalTransport
from remote.releases import ReleaseRefused, Releases
from remote.transport import Transport


@pytest.fixture
def releases(transport: Transport, tmp_path: pathlib.Path) -> Releases:
    return Releases(transport, python=sys.executable, root=str(tmp_path / "root"))


def test_its_lines_and_exit_code_arrive(releases: Releases) -> None:
    program = "import sys; print('one', sys.stdin.read()); print('zwei ü'); sys.exit(3)"
    releases.start_job("a", [sys.executable, "-c", program], {}, "given")
    lines: list[str] = []
    assert follow(releases, "a", lines.append, poll_s=0.05) == 3
    assert lines == ["one given", "zwei ü"]


def test_it_goes_on_when_the_connection_is_gone(releases: Releases, transport: Transport) -> None:
    releases.start_job("a", ["sh", "-c", "sleep 1; echo $WORD"], {"WORD": "a'b $(c)"})
    transport.close()
    lines: list[str] = []
    assert follow(releases, "a", lines.append, poll_s=0.05) == 0
    assert lines == ["a'b $(c)"]


def test_a_signal_reaches_all_that_it_started(releases: Releases) -> None:
    releases.start_job("a", ["sh", "-c", "sleep 60 & sleep 61"], {})
    time.sleep(0.3)
    assert releases.end_job("a")
    assert follow(releases, "a", print, poll_s=0.05) == -signal.SIGTERM
    assert not releases.end_job("a")


def test_one_that_takes_too_long_is_ended_with_all_that_it_started(releases: Releases) -> None:
    notes: list[str] = []
    lines: list[str] = []
    with pytest.raises(TransportError, match=r"host here: job a was not done after 8 s, and was"):
        run_job(
            releases,
            "a",
            ["sh", "-c", "echo $$; sleep 160 & sleep 161"],
            {},
            lines.append,
            host="here",
            note=notes.append,
            poll_s=0.05,
            limit_s=8.0,
        )
    assert notes == ["its time is up: ends the run on here", "the run on here has ended"]
    assert not releases.look_at_job("a")["alive"]
    assert releases.group_of(int(lines[0])) == []


def test_one_that_nobody_saw_the_end_of_is_told_apart(releases: Releases) -> None:
    releases.start_job("a", ["sleep", "60"], {})
    releases.end_job("a", signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (found := releases.look_at_job("a"))["alive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (found["alive"], found["exit_code"]) == (False, None)
    with pytest.raises(Exception, match="nothing says how"):
        follow(releases, "a", print, poll_s=0.05)


def test_a_program_that_is_not_there_says_so(releases: Releases) -> None:
    releases.start_job("a", ["/no/such program"], {})
    lines: list[str] = []
    assert follow(releases, "a", lines.append, poll_s=0.05) == 127
    assert lines == ["/no/such program cannot be run: No such file or directory"]


def test_a_name_is_taken_once_and_is_no_path(releases: Releases) -> None:
    name = new_job_name("test")
    releases.start_job(name, ["true"], {})
    with pytest.raises(ReleaseRefused, match="already"):
        releases.start_job(name, ["true"], {})
    with pytest.raises(ReleaseRefused, match="cannot be a job's name"):
        releases.start_job("../a", ["true"], {})
    with pytest.raises(ReleaseRefused, match="there is no job"):
        releases.look_at_job("b")


def test_what_has_ended_long_ago_goes_and_what_goes_on_stays(
    releases: Releases, tmp_path: pathlib.Path
) -> None:
    releases.start_job("goes-on", ["sleep", "600"], {})
    folder = tmp_path / "root" / "jobs"
    (folder / "start-was-killed").mkdir()
    os.utime(folder / "start-was-killed", (0, 0))
    for number in range(agent._JOBS_KEPT + 3):
        releases.start_job(f"ended-{number}", ["true"], {})
        follow(releases, f"ended-{number}", print, poll_s=0.01)
    there = {path.name for path in folder.iterdir()}
    assert there == {"goes-on", *(f"ended-{number}" for number in range(2, 23))}
    assert [one["name"] for one in releases.jobs()] == ["goes-on"]
    releases.end_job("goes-on", signal.SIGKILL)
    deadline = time.monotonic() + 20
    while releases.jobs() and time.monotonic() < deadline:  # the kernel takes a moment
        time.sleep(0.1)
    assert releases.jobs() == []


def test_an_interrupted_reader_goes_on_where_it_was(releases: Releases) -> None:
    program = "for number in range(6): print('line', number)"
    releases.start_job("a", [sys.executable, "-c", program], {})
    lines: list[str] = []

    def said(line: str) -> None:
        if line == "line 2" and not again:
            raise KeyboardInterrupt
        lines.append(line)

    heard, again = Heard(), False
    with pytest.raises(KeyboardInterrupt):
        follow(releases, "a", said, heard=heard, poll_s=0.05)
    assert lines == ["line 0", "line 1"]
    again = True
    assert follow(releases, "a", said, heard=heard, poll_s=0.05) == 0
    assert lines == [f"line {number}" for number in range(6)]


def test_a_character_is_not_cut_in_two(releases: Releases) -> None:
    program = """
import os, time
os.write(1, b'a\\xf0\\x9f')
time.sleep(0.6)
os.write(1, b'\\x8c\\xb3\\n')
"""
    releases.start_job("a", [sys.executable, "-c", program], {})
    lines: list[str] = []
    assert follow(releases, "a", lines.append, poll_s=0.05) == 0
    assert lines == ["a\N{DECIDUOUS TREE}"]


def _start(root: pathlib.Path, name: str, *command: str) -> pathlib.Path:
    """By a process of its own, as a request does: the job has to have another parent."""
    Releases(LocalTransport(), python=sys.executable, root=str(root)).start_job(
        name, list(command), {}
    )
    return root / "jobs" / name


@pytest.mark.parametrize(
    "content",
    [
        '{"pid": 1e999, "since": 1, "at": 1}',
        f'{{"pid": 1, "since": 1, "at": 1{"0" * 400}}}',
        '{"pid": 1, "since": 1, "at": 1e999}',
        '{"pid": 1, "since": 1, "at": NaN}',
        f'{{"pid": 9{"9" * 400}, "since": 1, "at": 1}}',
        '{"pid": NaN, "since": [], "at": 1}',
        "[" * 100_000,
        "[]",
        "\0\xff",
        "",
    ],
)
def test_a_damaged_job_is_in_nobody_s_way(tmp_path: pathlib.Path, content: str) -> None:
    damaged = tmp_path / "jobs" / "damaged"
    damaged.mkdir(parents=True)
    (damaged / "job.json").write_text(content, encoding="latin-1")
    _start(tmp_path, "next", "true")
    assert [one["name"] for one in agent.jobs(str(tmp_path))["jobs"]] in ([], ["next"])
    found = agent.look_at_job(str(tmp_path), "damaged")
    assert (found["text"], found["alive"], found["exit_code"]) == ("", False, None)
    assert agent.end_job(str(tmp_path), "damaged") == {"was_alive": False}


@pytest.mark.parametrize("content", ["{", None])
def test_a_job_whose_file_is_damaged_is_followed_and_ended(
    releases: Releases, tmp_path: pathlib.Path, content: str | None
) -> None:
    """Or was never written, as its start was killed: what keeps it says which job that is."""
    releases.start_job("other", ["sleep", "60"], {})
    releases.start_job("a", ["sh", "-c", "echo runs; sleep 60 & sleep 61"], {})
    file = tmp_path / "root/jobs/a/job.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert {one["name"] for one in releases.jobs()} == {"a", "other"}
    lines: list[str] = []
    end = threading.Timer(1.0, lambda: releases.end_job("a"))
    end.start()
    assert follow(releases, "a", lines.append, poll_s=0.05) == -signal.SIGTERM
    end.join()
    assert lines == ["runs"]
    assert [one["name"] for one in releases.jobs()] == ["other"]
    assert releases.end_job("other", signal.SIGKILL)


def test_a_damaged_job_goes_once_nothing_of_it_can_run(tmp_path: pathlib.Path) -> None:
    runs, ended, young = (
        _start(tmp_path, name, *line)
        for name, line in (("runs", ("sleep", "60")), ("ended", ("true",)), ("young", ("true",)))
    )
    deadline = time.monotonic() + 20
    while not (ended / "exit").exists() or not (young / "exit").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for folder in (runs, ended, young):
        (folder / "job.json").write_text("{")
    time.sleep(0.2)  # the process itself ends a moment after it has said how
    for folder in (runs, ended):
        os.utime(folder, (0, 0))
    os.utime(young, (time.time() - agent._JOB_STARTS_S / 2,) * 2)
    for number in range(agent._JOBS_KEPT):
        (tmp_path / "jobs" / f"other-{number}").mkdir()
    _start(tmp_path, "next", "true")
    assert (runs.exists(), ended.exists(), young.exists()) == (True, False, True)
    assert "runs" in [one["name"] for one in agent.jobs(str(tmp_path))["jobs"]]
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        if agent._works_in(int(process.name), runs):
            os.kill(int(process.name), signal.SIGKILL)
