"""What a host does with its releases: the real program, sent through the local transport."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remote import agent, validation
from remote import releases as client
from remote.agent import file_digest
from remote.errors import TransportError
from remote.local import LocalTransport
from remote.releases import ReleaseRefused, Releases
from remote.transport import Transport

HOSTILE = ["two words", "it's $(id)", "-n", "new\nline", "ü", "a;b", '"', "..."]

# At its n-th change of anything below the root, the program is killed: no handler runs, no buffer
# is written.
_KILLED = """
import os, sys
left = {count}
changes = ('os.rename', 'os.mkdir', 'os.remove', 'os.rmdir', 'os.link', 'os.symlink', 'os.truncate')
def hook(event, arguments):
    global left
    writes = event == 'open' and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if (event in changes or writes) and {root!r} in os.fsdecode(str(arguments)):
        left -= 1
        if left < 0:
            os._exit(137)
sys.addaudithook(hook)
"""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "a root" / "it's $HOME"


@pytest.fixture
def host(root: pathlib.Path) -> Iterator[Releases]:
    transport = LocalTransport()
    yield Releases(transport, python=sys.executable, root=str(root))
    transport.close()


def test_it_is_the_same_over_ssh(ssh: Transport, root: pathlib.Path) -> None:
    """Hostile names too: they go as JSON, through a shell on the other side."""
    host = Releases(ssh, python=sys.executable, root=str(root))
    host.prepare()
    files = {f"source/{name}/{name}": name.encode() for name in HOSTILE}
    host.place("first", arrives(root, files), {"revision": "abc"})
    host.switch("first")
    assert host.known()["current"] == "first"
    with pytest.raises(ReleaseRefused, match="host near: switch: there is no release second"):
        host.switch("second")


def arrives(root: pathlib.Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Put files where a transfer puts them; their manifest."""
    manifest = {}
    for name, content in files.items():
        path = root / "incoming" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        manifest[name] = {"sha256": file_digest(path), "executable": False}
    return manifest


def placed(host: Releases, root: pathlib.Path, release: str, text: str = "text") -> None:
    host.prepare()
    manifest = arrives(root, {"source/file": text.encode()})
    host.place(release, manifest, {"revision": release})


def test_what_arrived_becomes_a_release(host: Releases, root: pathlib.Path) -> None:
    assert host.prepare()["current"] is None
    files = {f"source/{name}/{name}": name.encode() for name in HOSTILE}
    about = host.place("first", arrives(root, files), {"revision": "abc"})
    assert (about["release"], about["revision"], about["files"]) == ("first", "abc", len(HOSTILE))
    for name, content in files.items():
        assert (root / "releases/first" / name).read_bytes() == content
    (known,) = host.known()["releases"]
    assert known["release"] == "first"
    assert [known[what] for what in ("current", "promoted", "bad")] == [False] * 3
    assert not (root / "incoming").exists()
    modes = {path.stat().st_mode & 0o077 for path in root.rglob("*.json")}
    assert modes | {root.stat().st_mode & 0o077} == {0}, "for this user alone"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "source/file").write_text("other"), "'source/file' has other"),
        (lambda folder: (folder / "source/file").unlink(), "'source/file' is missing"),
        (lambda folder: (folder / "source/more").write_text(""), "'source/more' was not sent"),
        (lambda folder: (folder / "source/file").chmod(0o700), "'source/file' has another mode"),
        (
            lambda folder: [
                (folder / "source/file").unlink(),
                (folder / "source/file").symlink_to("/etc/hostname"),
            ],
            "'source/file' is no plain file",
        ),
    ],
)
def test_what_is_not_what_was_sent_is_no_release(
    host: Releases, root: pathlib.Path, spoil: Any, says: str
) -> None:
    host.prepare()
    manifest = arrives(root, {"source/file": b"text"})
    spoil(root / "incoming")
    with pytest.raises(ReleaseRefused, match=says):
        host.place("first", manifest, {})
    assert host.known()["releases"] == []


def test_the_wheel_is_unpacked_before_the_release_is_there(
    host: Releases, root: pathlib.Path
) -> None:
    host.prepare()
    (root / "incoming/wheel").mkdir(parents=True)
    wheel = root / "incoming/wheel/engine-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("engine/__init__.py", "value = 7\n")
    manifest = {
        "wheel/engine-1-py3-none-any.whl": {"sha256": file_digest(wheel), "executable": False}
    }
    host.place("first", manifest, {})
    assert (root / "releases/first/site/engine/__init__.py").read_text() == "value = 7\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [("../evil.py", "outside of it"), ("engine-1.data/scripts/x", "scripts or data")],
)
def test_a_wheel_that_unpacking_cannot_install_is_refused(
    host: Releases, root: pathlib.Path, name: str, says: str
) -> None:
    host.prepare()
    (root / "incoming/wheel").mkdir(parents=True)
    wheel = root / "incoming/wheel/e.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(name, "")
    manifest = {"wheel/e.whl": {"sha256": file_digest(wheel), "executable": False}}
    with pytest.raises(ReleaseRefused, match=says):
        host.place("first", manifest, {})
    assert host.known()["releases"] == []
    assert not list(root.parent.rglob("evil.py"))


def test_current_is_switched(host: Releases, root: pathlib.Path) -> None:
    placed(host, root, "first")
    placed(host, root, "second")
    assert host.switch("first") == {"before": None, "current": "first"}
    assert host.switch("second") == {"before": "first", "current": "second"}
    assert (root / "current/source/file").is_file()
    with pytest.raises(ReleaseRefused, match="there is no release third"):
        host.switch("third")
    assert host.known()["current"] == "second"


@pytest.mark.parametrize("real", [pathlib.Path.mkdir, pathlib.Path.touch])
def test_a_current_that_is_no_link_is_said_with_what_to_do(
    host: Releases, root: pathlib.Path, real: Callable[[pathlib.Path], None]
) -> None:
    placed(host, root, "first")
    real(root / "current")
    what = "folder" if real is pathlib.Path.mkdir else "file"
    for ask in (host.prepare, host.known, lambda: host.switch("first"), lambda: host.compare({})):
        with pytest.raises(ReleaseRefused) as caught:
            ask()
        assert f"/current: expected a link to a release, got a {what}: move" in str(caught.value)
        assert str(root) in str(caught.value)
    (root / "current").rename(root / "elsewhere")
    assert host.switch("first")["before"] is None


def test_where_current_points_nowhere_the_newest_is_the_base(
    host: Releases, root: pathlib.Path
) -> None:
    for name in ("b", "a", "gone"):
        placed(host, root, name)
    host.switch("gone")
    (root / "releases/gone").rename(root / "gone")
    manifest = {"source/file": {"sha256": file_digest(root / "gone/source/file")}}
    assert host.prepare()["base"] == "a"
    assert host.compare(manifest)["new"] == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-x", "a\nb", "x" * 101])
def test_a_release_has_a_plain_name(host: Releases, root: pathlib.Path, name: str) -> None:
    host.prepare()
    with pytest.raises(ReleaseRefused, match="cannot be a release's name"):
        host.place(name, {}, {})
    with pytest.raises(ReleaseRefused, match="cannot be a release's name"):
        host.switch(name)


def test_previous_is_what_the_promotion_log_says(host: Releases, root: pathlib.Path) -> None:
    for name in ("a", "b", "c"):
        placed(host, root, name)
        host.switch(name)
        host.promoted({"release": name, "result": "promoted" if name != "b" else "failed"})
    known = host.known()
    assert (known["current"], known["previous"]) == ("c", "a")
    assert [one["promoted"] for one in known["releases"]] == [True, False, True]


def test_a_line_that_a_crash_cut_short_never_happened(host: Releases, root: pathlib.Path) -> None:
    placed(host, root, "a")
    host.promoted({"release": "a", "result": "promoted"})
    log = root / "promotions.jsonl"
    with log.open("a") as taken:
        taken.write('{"release": "b", "resu')
    assert host.known()["previous"] == "a"
    host.promoted({"release": "c", "result": "promoted"})
    assert [json.loads(line)["release"] for line in log.read_text().splitlines()] == ["a", "c"]
    log.write_text("nonsense\n" + log.read_text())
    with pytest.raises(
        ReleaseRefused, match=r"promotions\.jsonl, line 1: expected JSON with a release"
    ):
        host.known()


def test_old_releases_go_and_what_is_needed_stays(host: Releases, root: pathlib.Path) -> None:
    for name in ("a", "b", "never", "c", "bad", "d", "e", "waiting"):
        placed(host, root, name)
        if name not in ("never", "waiting"):
            host.switch(name)
            host.promoted({"release": name, "result": "promoted"})
    host.mark_bad("bad", "wrong tokens")
    host.switch("b")
    assert host.prune(2) == ["a", "never", "c", "bad"]
    # The last two that were promoted and are good; current; what came before; what waits.
    assert [one["release"] for one in host.known()["releases"]] == ["b", "d", "e", "waiting"]
    assert host.prune(2) == []
    with pytest.raises(ReleaseRefused, match="keep: expected 1 or more, got 0"):
        host.prune(0)


def test_releases_are_counted_and_no_clock_orders_them(
    host: Releases, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is placed a day before the one that it came after. Two are from before the count."""
    for name in ("z", "y"):
        placed(host, root, name)
        path = root / "releases" / name / "release.json"
        about = json.loads(path.read_text())
        about.pop("sequence", None)
        path.write_text(json.dumps(about))
    for number, name in enumerate(("first", "never", "last", "waiting")):
        back = f"import time; now = time.time; time.time = lambda: now() - {number + 1} * 86400\n"
        monkeypatch.setattr(client, "_BOOT", back + _BOOT)
        placed(host, root, name)
        if name in ("first", "last"):
            host.promoted({"release": name, "result": "promoted"})
    known = host.known()["releases"]
    assert [one["release"] for one in known] == ["z", "y", "first", "never", "last", "waiting"]
    assert [one.get("sequence") for one in known] == [None, None, 1, 2, 3, 4]
    assert host.prepare()["base"] == "waiting"
    # "first" is what a rollback goes to, and "waiting" is younger than what was promoted.
    assert host.prune(1) == ["z", "y", "never"]


def test_a_release_that_gates_run_with_stays_until_they_end(
    host: Releases, root: pathlib.Path
) -> None:
    """However they end: the mark is the process's own, and nobody has to take it away."""
    for name in "abc":
        placed(host, root, name)
        host.promoted({"release": name, "phase": 3, "result": "promoted"})
    host.switch("c")
    mark = root / "releases" / "a" / "release.json"
    gates = subprocess.Popen(
        [sys.executable, "-c", validation._USING, str(mark), "-c", "print(1); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert gates.stdout is not None
    assert gates.stdout.readline() == b"1\n"
    assert host.prune(1) == []
    assert mark.is_file()
    gates.kill()
    gates.communicate()
    assert host.prune(1) == ["a"]


def test_gates_of_a_release_that_is_gone_say_so(host: Releases, root: pathlib.Path) -> None:
    line = [
        sys.executable,
        "-c",
        validation._USING,
        str(root / "releases/a/release.json"),
        "-c",
        "",
    ]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "it is not there any more: a promotion has removed it as an old one\n"


def test_a_damaged_line_of_the_promotion_log_comes_with_what_mends_it(
    host: Releases, root: pathlib.Path
) -> None:
    host.prepare()
    for name in "ab":
        host.promoted({"release": name, "phase": 3, "result": "promoted"})
    log = root / "promotions.jsonl"
    first, second = log.read_bytes().splitlines(keepends=True)
    for damaged in (b"\xffgarbage\n", b'{"release": 7}\n', b"[1]\n"):
        log.write_bytes(first + damaged + second)
        with pytest.raises(ReleaseRefused, match=r"promotions\.jsonl, line 2: expected") as caught:
            host.promotions()
        assert "\n" not in str(caught.value)
        (mend,) = re.findall(r"\((sed -i.*)\)$", str(caught.value))
        subprocess.run(["sh", "-c", mend], check=True)
        found = host.promotions()
        assert (found["live"]["release"], found["previous"]["release"]) == ("b", "a")
        assert damaged in (root / "promotions.jsonl.damaged").read_bytes()


def test_a_damaged_release_comes_with_what_mends_it(host: Releases, root: pathlib.Path) -> None:
    for name in "ab":
        placed(host, root, name)
    for damaged in ("{", "{}", '{"gates": 5, "phase": "3"}', '{"gates": [5], "phase": "3"}'):
        (root / "releases/a/evidence.json").write_text(damaged)
        assert [one["evidence"] for one in host.known()["releases"]] == [None, None]
    (root / "releases/a/release.json").write_text("{")
    with pytest.raises(ReleaseRefused, match=r"release\.json cannot be read") as caught:
        host.known()
    (mend,) = re.findall(r"\((mv .*) ELSEWHERE\)$", str(caught.value))
    subprocess.run(["sh", "-c", f"{mend} {shlex.quote(str(root))}/moved"], check=True)
    assert [one["release"] for one in host.known()["releases"]] == ["b"]


def test_a_prune_that_was_killed_is_taken_up(host: Releases, root: pathlib.Path) -> None:
    for name in ("a", "b"):
        placed(host, root, name)
        host.switch(name)
        host.promoted({"release": name, "result": "promoted"})
    (root / "releases/a").rename(root / "releases/.removed.a")
    known = host.known()
    assert [one["release"] for one in known["releases"]] == ["b"]
    assert known["previous"] is None, "it is not there any more"
    assert host.prune(5) == []
    assert not (root / "releases/.removed.a").exists()


def test_a_transfer_that_was_given_up_does_not_go_on_in_a_release(
    host: Releases, root: pathlib.Path
) -> None:
    """A kd that was killed leaves its rsync, whose other end works in `incoming`.

    It would follow that into the release that a second try makes of it, and change it after the
    look.
    """
    host.prepare()
    host.expect([])
    rsync = root.parent / "rsync"
    shutil.copy("/bin/sh", rsync)

    def writes(program: str | pathlib.Path) -> subprocess.Popen[bytes]:
        late = "sleep 2; echo other >a; sleep 60"
        return subprocess.Popen([program, "-c", late], cwd=root / "incoming/source")

    with writes(rsync) as first, writes("/bin/sh") as person:
        host.expect([])
        assert first.wait(10) == -signal.SIGKILL, "whoever has the lock ends it"
        assert person.poll() is None, "somebody who looks is left alone"
        person.kill()
    manifest = arrives(root, {"source/a": b"right"})
    with writes(rsync) as second:
        with pytest.raises(ReleaseRefused, match=rf"an rsync works there \(process {second.pid}\)"):
            host.place("a", manifest, {})
        second.kill()
    host.place("a", manifest, {})
    assert (root / "releases/a/source/a").read_bytes() == b"right"


def test_a_build_that_was_given_up_is_ended(host: Releases, root: pathlib.Path) -> None:
    """Its library would be taken for that of the next release, which may be of other sources."""
    host.prepare()
    for name in ("build-1", "validate-1"):
        host.start_job(name, ["sleep", "60"], {})
    host.expect([])
    assert [one["name"] for one in host.jobs()] == ["validate-1"]
    host.end_job("validate-1", signal.SIGKILL)


def test_an_old_release_that_is_a_link_goes_and_what_it_leads_to_stays(
    host: Releases, root: pathlib.Path
) -> None:
    """Somebody has moved it to another disk. It ended every later prune too."""
    for name in ("a", "b", "c"):
        placed(host, root, name)
        host.switch(name)
        host.promoted({"release": name, "result": "promoted"})
    elsewhere = root.parent / "elsewhere"
    (root / "releases/a").rename(elsewhere)
    (root / "releases/a").symlink_to(elsewhere)
    assert host.prune(1) == ["a"]
    assert (elsewhere / "release.json").is_file()
    assert sorted(path.name for path in (root / "releases").iterdir()) == ["b", "c"]
    assert host.prune(1) == []


def test_incoming_that_is_a_link_is_refused(host: Releases, root: pathlib.Path) -> None:
    host.prepare()
    other = root.parent / "precious"
    other.mkdir()
    (other / "file").write_text("")
    (root / "incoming").rmdir()
    (root / "incoming").symlink_to(other)
    with pytest.raises(ReleaseRefused, match="expected a folder, got a link"):
        host.expect([])
    assert (other / "file").exists()


def test_one_at_a_time_has_the_lock(host: Releases) -> None:
    host.lock(owner="ann@there", command="kd promote 3", token="one")
    with pytest.raises(ReleaseRefused, match=r"locked by ann@there since \d{4}-.* kd promote 3"):
        host.lock(owner="bob@here", command="kd rollback", token="two")
    with pytest.raises(ReleaseRefused, match="locked by ann@there since"):
        host.unlock("two")
    holder = host.lock_holder()
    assert holder is not None
    assert "token" not in holder
    assert host.unlock("one")
    assert not host.unlock("one")
    assert host.lock_holder() is None


def test_a_lock_is_broken_only_as_it_was_looked_at(host: Releases) -> None:
    host.lock(owner="ann", command="x", token="one")
    holder = host.lock_holder()
    assert holder is not None
    host.unlock("one")
    host.lock(owner="ann", command="x", token="other")
    with pytest.raises(ReleaseRefused, match="another one by now"):
        host.break_lock(holder)
    now = host.lock_holder()
    assert now is not None
    host.break_lock(now)
    assert host.lock_holder() is None


@pytest.mark.parametrize("gives_back", [True, False])
def test_a_lock_that_is_taken_meanwhile_is_not_removed(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, gives_back: bool
) -> None:
    """Once ann's lock was looked at, somebody breaks it, and bob takes the lock."""
    agent.lock(str(root), "ann", "x", "one")
    holder = agent.lock_holder(str(root))["holder"]
    read_bytes = pathlib.Path.read_bytes
    looks = 0

    def others() -> None:
        with contextlib.suppress(agent.Refused):
            agent.break_lock(str(root), holder["owner"], holder["at"])
        agent.lock(str(root), "bob", "y", "two")

    other = threading.Thread(target=others)

    def looked_at(path: pathlib.Path) -> bytes:
        nonlocal looks
        content = read_bytes(path)
        if threading.current_thread() is not other:
            looks += 1
            if looks == 2:  # the look that is acted on
                other.start()
                other.join(0.5)
        return content

    monkeypatch.setattr(pathlib.Path, "read_bytes", looked_at)
    if gives_back:
        agent.unlock(str(root), "one")
    else:
        agent.break_lock(str(root), holder["owner"], holder["at"])
    other.join()
    now = agent.lock_holder(str(root))["holder"]
    assert now is not None
    assert now["owner"] == "bob"


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"owner": "ann"}', '{"owner": "a", "command": "x", "at": "y"}']
)
def test_a_lock_file_that_was_damaged_is_broken_by_that_name(
    host: Releases, root: pathlib.Path, text: str
) -> None:
    host.prepare()
    (root / "lock.json").write_text(text)
    holder = host.lock_holder()
    assert holder is not None
    assert holder["owner"] == "damaged"
    with pytest.raises(ReleaseRefused, match=r"lock\.json is damaged: .* \(.*`kd unlock`"):
        host.lock(owner="ann", command="x", token="one")
    with pytest.raises(ReleaseRefused, match=r"lock\.json is damaged"):
        host.unlock("one")
    host.break_lock(holder)
    host.lock(owner="ann", command="x", token="one")


def test_a_release_that_half_came_keeps_what_is_wanted(host: Releases, root: pathlib.Path) -> None:
    host.prepare()
    arrives(root, {"source/a/kept": b"1", "source/b/old": b"2", "release.json": b"{}"})
    assert host.expect(["source/a/kept", "source/c/new"]) == 1
    left = [path for path in (root / "incoming").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["kept"]
    assert not (root / "incoming/source/b").exists()


def test_what_would_change_is_told_and_nothing_is_written(
    host: Releases, root: pathlib.Path
) -> None:
    host.prepare()
    first = arrives(root, {"source/same": b"1", "source/old": b"2", "source/text": b"3"})
    host.place("first", first, {})
    host.switch("first")
    wanted = {name: first[name] for name in ("source/same",)}
    wanted["source/text"] = first["source/text"] | {"sha256": "0" * 64}
    wanted["source/new"] = first["source/old"]
    before = sorted(root.rglob("*"))
    assert host.compare(wanted) == {
        "base": "first",
        "libraries": {},
        "new": ["source/new"],
        "changed": ["source/text"],
        "removed": ["source/old"],
    }
    assert sorted(root.rglob("*")) == before


def test_nothing_is_written_where_there_is_nothing_yet(host: Releases, root: pathlib.Path) -> None:
    assert host.compare({"source/a": {}})["new"] == ["source/a"]
    assert not root.exists()


def test_faults_of_the_host_are_one_line(host: Releases, root: pathlib.Path) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("a file is in the way")
    with pytest.raises(ReleaseRefused, match=r"prepare: .*: expected a folder, got a file"):
        host.prepare()
    relative = Releases(LocalTransport(), python=sys.executable, root="somewhere")
    with pytest.raises(ReleaseRefused, match="root: expected an absolute path, got 'somewhere'"):
        relative.prepare()


def killed_at(monkeypatch: pytest.MonkeyPatch, root: pathlib.Path, count: int) -> None:
    hook = _KILLED.format(count=count, root=str(root))
    monkeypatch.setattr(client, "_BOOT", f"{hook}\n{_BOOT}")


_BOOT = client._BOOT


@pytest.mark.parametrize("what", ["place", "switch", "promoted", "lock", "prune", "mark_bad"])
def test_killed_at_any_step_nothing_is_lost(
    host: Releases, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Killed at its first change, at its second ...; then the same again, which has to do it."""
    for name in ("a", "b", "c"):
        placed(host, root, name)
        host.switch(name)
        host.promoted({"release": name, "result": "promoted"})
    manifest = arrives(root, {"source/file": b"new", "source/other": b"more"})
    for count in itertools.count():
        assert count < 60
        killed_at(monkeypatch, root, count)
        release = f"new{count}"
        done: dict[str, Any] = {
            "place": lambda release=release: host.place(release, manifest, {}),
            "switch": lambda: host.switch("b"),
            "promoted": lambda: host.promoted({"release": "b", "result": "promoted"}),
            "lock": lambda: host.lock(owner="ann", command="x", token="one"),
            "prune": lambda: host.prune(1),
            "mark_bad": lambda: host.mark_bad("a", "why"),
        }
        survived = True
        try:
            done[what]()
        except TransportError as error:
            survived = False
            killed = str(error)
        monkeypatch.setattr(client, "_BOOT", _BOOT)
        known = host.known()  # whatever happened, it can be read, and is one of two states
        assert known["current"] in ("b", "c")
        assert (root / "current/source/file").is_file()
        for one in known["releases"]:
            source = root / "releases" / one["release"] / "source"
            assert len(list(source.iterdir())) == one["files"]
        if survived:
            assert count > 0
            break
        assert "exit code 137" in killed
        if what == "place" and any(one["release"] == release for one in known["releases"]):
            break  # the last step was done, and its answer lost
        if what == "lock" and host.lock_holder() is not None:
            host.unlock("one")
    assert not list((root / "releases").glob(".removed.*")) or what != "prune"


def test_two_at_once_get_one_lock(root: pathlib.Path) -> None:
    def take(number: int) -> bool:
        one = Releases(LocalTransport(), python=sys.executable, root=str(root))
        try:
            one.lock(owner=str(number), command="x", token=str(number))
        except ReleaseRefused:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(take, range(6))) == 1
    assert [path.name for path in root.glob(".lock*")] == [".lock.guard"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("5", ": 5"),
        ("[]", ": []"),
        ("null", ": null"),
        ("{}", ": {}"),
        ('"error"', ': "error"'),
        ('{"done": 5}', ': {"done": 5}'),
        ('{"error": 5}', ': {"error": 5}'),
        ("[" * 100_000, ": [[["),
        ("", ""),
    ],
)
def test_whatever_a_host_answers_is_one_line(tmp_path: pathlib.Path, said: str, told: str) -> None:
    """A login script may print last, and what it prints may be JSON as well."""
    (tmp_path / "said").write_text(f"{said}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncat "{tmp_path}/said"\n')
    python.chmod(0o755)
    with pytest.raises(TransportError) as caught:
        Releases(LocalTransport(), python=str(python), root="/srv/kd").known()
    text = str(caught.value)
    assert f"releases: {python} ended with exit code 0 and no answer{told}" in text
    assert len(text) < 1000
    assert "\n" not in text
