"""Gates of a release, run on its host by the release itself, on this machine and over SSH."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import ssh_server

from kdtree_engine.errors import UnknownName
from kdtree_engine.machine import Machine, read_machine
from phases.content import gate_content
from phases.evidence import FigureRecord, GateRecord, Record, Store, new_run_id, now
from phases.gate import FailureKind, GateKind, Status, Unit
from phases.promotable import lacking
from phases.registry import find_gate, find_phase, load_phases
from phases.service import server_sglang
from remote.deploy import Deployment, releases_of
from remote.errors import TransportError
from remote.inventory import Host, LocalHost
from remote.local import LocalTransport
from remote.ssh import SshTransport
from remote.transport import Transport
from remote.validation import Validation

pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools 70.1 or newer")
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not on PATH")


@dataclasses.dataclass(frozen=True)
class Placed:
    """A release of this repository, and where it is."""

    root: pathlib.Path
    release: str

    @property
    def source(self) -> pathlib.Path:
        return self.root / "releases" / self.release / "source"


@pytest.fixture(scope="module")
def placed(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Placed:
    if not (root / ".git").exists():
        pytest.skip("a copy without git")
    folder = tmp_path_factory.mktemp("host") / "a root"
    host = LocalHost(name="here", kind="local", root=str(folder), python=sys.executable)
    about = Deployment(root, ("5f30ea020753", False)).run(LocalTransport(), host)
    return Placed(folder, about["release"])


@pytest.fixture
def state(placed: Placed) -> Iterator[pathlib.Path]:
    """The host's state, which each test finds empty."""
    folder = placed.root / "state"
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def reach(
    placed: Placed, transport: Transport, request: pytest.FixtureRequest
) -> Callable[[], Validation]:
    """The host's validation, by each transport in turn."""

    def made() -> Validation:
        fields = {"root": str(placed.root), "python": sys.executable}
        host: Host = LocalHost(name="here", kind="local", **fields)
        if transport.host != "local":
            server: ssh_server.SshServer = request.getfixturevalue("server")
            host = server.host(**fields)
        return Validation(transport, host)

    return made


@pytest.fixture(scope="module")
def machine() -> Machine:
    """As a release's own kd sees it, whose server Python is the one that runs it."""
    before = os.environ.get("KD_SGLANG_PYTHON")
    os.environ["KD_SGLANG_PYTHON"] = sys.executable
    try:
        return dataclasses.replace(read_machine(), sglang=server_sglang())
    finally:
        os.environ.pop("KD_SGLANG_PYTHON")
        if before is not None:
            os.environ["KD_SGLANG_PYTHON"] = before


def keep(
    state: pathlib.Path, source: pathlib.Path, machine: Machine, **statuses: Status | None
) -> None:
    """One record of gates of phase 0 that ended so; None: passed, with other code."""
    entries = []
    for word, status in statuses.items():
        phase, gate = find_gate(load_phases(), word.replace("_", "-"))
        content = gate_content(source, gate) if status else "0" * 64
        ended = status or Status.PASSED
        entries.append(
            GateRecord(
                phase=phase.package,
                gate=gate.name,
                kind=GateKind.CORRECTNESS,
                status=ended,
                content=content,
                seconds=1.0,
                failure=FailureKind.NUMERICAL if ended is Status.FAILED else None,
                message=None if ended is Status.PASSED else "row 3\ndiffers",
                figures=(FigureRecord(name="rows", value=3, unit=Unit.COUNT),),
            )
            if ended in (Status.PASSED, Status.FAILED)
            else GateRecord(
                phase=phase.package,
                gate=gate.name,
                kind=GateKind.CORRECTNESS,
                status=ended,
                content=content,
                message="it ended",
            )
        )
    record = Record(
        run=new_run_id(),
        command=("kd",),
        host="local",
        machine=machine,
        environment={name: os.environ[name] for name in os.environ if name.startswith("KDTREE_")},
        revision=None,
        dirty=None,
        seed=1,
        started=now(),
        finished=now(),
        gates=tuple(entries),
    )
    Store(state / "evidence", state / "kept", source).save(record)


@pytest.mark.slow
def test_each_gate_says_where_it_stands_and_none_runs(
    placed: Placed, state: pathlib.Path, reach: Callable[[], Validation], machine: Machine
) -> None:
    keep(
        state,
        placed.source,
        machine,
        tree_brute_force=Status.PASSED,
        tree_properties=None,
        mask_paths=Status.FAILED,
        mask_layouts=Status.INTERRUPTED,
        library_builds=Status.INTERRUPTED,
    )
    before = sorted(path for path in state.rglob("*"))
    found = {one["gate"]: one for one in reach().states(placed.release, "offline_kernel")}
    assert {name: found[name]["state"] for name in list(found)[:5]} == {
        "tree-brute-force": "proven",
        "tree-properties": "stale",
        "mask-paths": "failed",
        "mask-layouts": "missing",
        "attention-paths": "missing",
    }
    assert found["mask-paths"]["why"] == "failed: numerical: row 3 differs"
    blocked = found["split-kv-matches-oracle"]
    assert (blocked["state"], blocked["kind"], blocked["token_exact"]) == (
        "blocked",
        "correctness",
        False,
    )
    assert "has failed: mask-paths" in blocked["why"]
    assert max(one["phase"] for one in found.values()) == "p1_offline_kernel"
    assert sorted(path for path in state.rglob("*")) == before
    assert lacking(found.values())[0].startswith("p0_oracle tree-properties is stale: passed, and")


@pytest.mark.slow
def test_what_is_not_proven_is_run_and_is_proven_then(
    placed: Placed, state: pathlib.Path, reach: Callable[[], Validation], machine: Machine
) -> None:
    """All of phase 0 but what would take long is proven before."""
    quick = {"mask_paths": Status.FAILED, "mask_layouts": None}
    names = [gate.name.replace("-", "_") for gate in load_phases()[0].gates]
    keep(state, placed.source, machine, **dict.fromkeys(names, Status.PASSED) | quick)
    notes: list[str] = []
    found = reach().run(placed.release, 0, notes.append, poll_s=0.1)
    assert {one["state"] for one in found} == {"proven"}
    assert [line.partition(":")[0] for line in notes] == [
        "[1/2] p0_oracle mask-paths",
        "[2/2] p0_oracle mask-layouts",
    ]
    store = Store(state / "evidence", state / "kept", placed.source)
    newest = store.own_records()[-1]
    assert newest.revision == "5f30ea020753"
    audited = (placed.root / "audit.jsonl").read_text().splitlines()[-1]
    assert '"result": {"proven": 9}' in audited
    folder = placed.source.parent
    assert not list(folder.rglob("__pycache__")), "a release never changes"
    again: list[str] = []
    reach().run(placed.release, 0, again.append, poll_s=0.1)
    assert len(store.own_records()) == 2, "what has not changed is not run again"


def test_several_gates_at_once(
    placed: Placed, state: pathlib.Path, reach: Callable[[], Validation], machine: Machine
) -> None:
    quick = {"mask_paths": None, "mask_layouts": None}
    names = [gate.name.replace("-", "_") for gate in load_phases()[0].gates]
    keep(state, placed.source, machine, **dict.fromkeys(names, Status.PASSED) | quick)
    notes: list[str] = []
    found = reach().run(placed.release, 0, notes.append, jobs=2, poll_s=0.1)
    assert {one["state"] for one in found} == {"proven"}
    store = Store(state / "evidence", state / "kept", placed.source)
    record = store.own_records()[-1]
    assert "--jobs 2" in " ".join(record.command)


@pytest.mark.slow
def test_all_of_phase_0_is_run_on_a_host(
    placed: Placed, state: pathlib.Path, server: ssh_server.SshServer
) -> None:
    host = server.host(root=str(placed.root), python=sys.executable)
    transport = SshTransport(host, folder=server.person)
    try:
        notes: list[str] = []
        found = Validation(transport, host).run(placed.release, "oracle", notes.append)
    finally:
        transport.close()
    assert {one["state"] for one in found} == {"proven"}
    assert len(notes) == len(found) == 9


def running(what: str) -> list[str]:
    """Commands of processes that have `what` in their command or environment."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            told = command + (folder / "environ").read_bytes()
        except OSError:
            continue
        if what.encode() in told and folder.name != str(os.getpid()):
            found.append(f"{folder.name}: {command.decode(errors='replace')[:200]}")
    return found


def left(what: str) -> list[str]:
    """What of it is still running after a while.

    A process that only waits for its parent may first have to end an import, on a busy machine.
    """
    deadline = time.monotonic() + 60
    while running(what) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running(what)


@pytest.mark.slow
def test_an_interruption_here_ends_all_of_the_run_there(
    placed: Placed, state: pathlib.Path, reach: Callable[[], Validation]
) -> None:
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 1:
            assert running(placed.release)
            raise KeyboardInterrupt  # as from the keyboard, when the first gate has ended

    with pytest.raises(KeyboardInterrupt):
        reach().run(placed.release, 0, note, poll_s=0.1)
    assert [text.partition(":")[0] for text in notes][1:] == [
        "interrupted",
        notes[-1],
    ]
    assert notes[-1].endswith("has ended")
    assert left(placed.release) == []
    (record,) = Store(state / "evidence", state / "kept", placed.source).own_records()
    assert record.finished is not None
    assert Status.INTERRUPTED in {gate.status for gate in record.gates}


def test_a_release_that_is_not_there_is_named(
    placed: Placed, reach: Callable[[], Validation]
) -> None:
    with pytest.raises(UnknownName, match="unknown release 'first'"):
        reach().states("first", 0)
    with pytest.raises(UnknownName, match="unknown release 'first'"):
        reach().run("first", 0)


@pytest.mark.slow
def test_a_run_that_does_not_come_to_its_end_says_why(
    placed: Placed, state: pathlib.Path, reach: Callable[[], Validation]
) -> None:
    with pytest.raises(TransportError, match=r"cannot tell how .*unknown phase 'nonsense'"):
        reach().states(placed.release, "nonsense")
    with pytest.raises(TransportError, match=r"not run to the end .*unknown phase 'nonsense'"):
        reach().run(placed.release, "nonsense", poll_s=0.1)
    state.write_text("no folder")
    try:
        with pytest.raises(TransportError, match="not run to the end") as why:
            reach().run(placed.release, 0, poll_s=0.1)
    finally:
        state.unlink()
    assert "\n" not in str(why.value)


@pytest.mark.slow
def test_ctrl_c_at_the_command_line(
    placed: Placed, state: pathlib.Path, root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """`local` of the inventory keeps its releases below HOME."""
    shelf = tmp_path / ".local/share"
    shelf.mkdir(parents=True)
    (shelf / "kd").symlink_to(placed.root)
    process = subprocess.Popen(
        [sys.executable, str(root / "tasks.py"), "validate", "0"],
        env=os.environ | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("[1/9]"):
            process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert lines[-3:] == ["the run on local has ended\n", "\n", "kd: interrupted\n"]
    assert left(placed.release) == []


class TestWhateverAReleaseAnswers:
    """Its own kd is asked, and is what somebody has sent there."""

    STATE: ClassVar[dict[str, object]] = {
        **{"phase": "p0_oracle", "gate": "a", "kind": "correctness", "token_exact": False},
        **{"state": "proven", "why": None, "run": None},
    }

    @pytest.fixture
    def answers(self, tmp_path: pathlib.Path) -> Callable[[str], Validation]:
        """The validation of a host whose release `a` prints that, whatever it is asked."""

        def made(text: str) -> Validation:
            host = LocalHost(name="here", kind="local", root=str(tmp_path), python=sys.executable)
            releases_of(LocalTransport(), host).prepare()
            source = tmp_path / "releases/a/source"
            source.mkdir(parents=True)
            (source.parent / "release.json").write_text("{}")
            (source / "tasks.py").write_text(f"print({text!r})")
            return Validation(LocalTransport(), host)

        return made

    @pytest.mark.parametrize(
        "said",
        [
            *("", "5", "null", "[]", "{}", "{\n", "[" * 100_000, "{\n" + '"a":[' * 100_000),
            *('{\n"gates": 5}', '{\n"gates": []}', '{\n"gates": {}}', '{\n"gates": [[]]}'),
            json.dumps({"gates": [STATE | {"why": 5}]}, indent=1),
            json.dumps({"gates": [STATE | {"token_exact": None}]}, indent=1),
            json.dumps({"gates": [STATE | {"state": ["proven"]}]}, indent=1),
        ],
    )
    def test_no_states_are_none_that_count(
        self, answers: Callable[[str], Validation], said: str
    ) -> None:
        with pytest.raises(TransportError, match="its kd cannot tell how its gates stand") as why:
            answers(said).states("a", 0)
        assert "\n" not in str(why.value)

    def test_states_are_read_after_a_login_message(
        self, answers: Callable[[str], Validation]
    ) -> None:
        said = "Welcome {you}!\n" + json.dumps({"gates": [self.STATE]}, indent=1)
        assert answers(said).states("a", 0) == [self.STATE]

    @pytest.mark.parametrize(
        "said",
        [
            *("", "5", "[]", "[\n", "[\n5]", '[\n{"number": 3}]', "[\n" * 100_000),
            '[\n{"number": 3, "profile": {"arguments": [5], "environment": {}}}]',
            '[\n{"number": 3, "profile": {"arguments": "x", "environment": []}}]',
            '[\n{"number": 3, "profile": {"arguments": [], "environment": {"A": 1}}}]',
        ],
    )
    def test_no_profile_is_one_line(self, answers: Callable[[str], Validation], said: str) -> None:
        with pytest.raises(TransportError, match="cannot tell what phase 3 gives a service") as why:
            answers(said).profile("a", 3)
        assert "\n" not in str(why.value)


_GATES = """
import pathlib, sys
if "--dry-run" in sys.argv:
    print({said!r})
else:
    print("[1/1] a gate")
sys.stdout.flush()
pathlib.Path("at").write_text(sys.argv[-1])
while pathlib.Path("at").exists():
    pass
sys.exit(3)
"""


def test_a_release_stays_until_it_is_known_how_its_gates_stand(tmp_path: pathlib.Path) -> None:
    """Nothing marked it between their end and the look; and what ran counts where it is gone."""
    host = LocalHost(name="here", kind="local", root=str(tmp_path), python=sys.executable)
    releases = releases_of(LocalTransport(), host)
    releases.prepare()
    for name in "abc":
        (tmp_path / "releases" / name / "source").mkdir(parents=True)
        (tmp_path / "releases" / name / "release.json").write_text("{}")
        releases.promoted({"release": name, "result": "promoted"})
    state = TestWhateverAReleaseAnswers.STATE
    said = json.dumps({"gates": [state]}, indent=1)
    (tmp_path / "releases/a/source/tasks.py").write_text(_GATES.format(said=said))
    pruned: list[list[str]] = []

    def prunes() -> None:
        for step in ("--no-input", "--dry-run"):
            deadline = time.monotonic() + 60
            while not [one for one in (tmp_path / "jobs").glob("*/at") if one.read_text() == step]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            pruned.append(releases.prune(1))
            (one,) = (tmp_path / "jobs").glob("*/at")
            one.unlink()

    thread = threading.Thread(target=prunes)
    thread.start()
    notes: list[str] = []
    assert Validation(LocalTransport(), host).run("a", 0, notes.append, poll_s=0.1) == [state]
    thread.join()
    assert pruned == [[], []]
    assert notes == ["[1/1] a gate"]
    assert releases.known()["releases"][0]["evidence"]["gates"] == [state]
    assert releases.prune(1) == ["a"]


@pytest.mark.slow
def test_the_profile_is_the_releases_own(placed: Placed, reach: Callable[[], Validation]) -> None:
    phase = find_phase(load_phases(), "3")
    known = (phase.profile.arguments, dict(phase.profile.environment))
    assert reach().profile(placed.release, 3) == known
