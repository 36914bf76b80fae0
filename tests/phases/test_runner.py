"""Runs, from the first record to the last, and every way that a run can end."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import filelock
import pytest
import sample_gates
from sample_gates import MACHINE, phase, speed_gate

from kdtree_engine.errors import ConfigError
from phases.checkout import Checkout
from phases.evidence import Platform, Record, Store
from phases.gate import FailureKind, Gate, GateKind, Status
from phases.phase import Phase
from phases.report import status_rows
from phases.requirement import Requirement
from phases.runner import Event, run, run_that_goes_on, select, signals_interrupt, unproven
from phases.states import gate_states


@pytest.fixture
def start(checkout: Checkout, store: Store):
    """Run all gates of the given phases; returns the record."""

    def start_(*phases: Phase, **options: object) -> Record:
        settings: dict[str, object] = {
            "checkout": checkout,
            "store": store,
            "machine": MACHINE,
            "host": "local",
            "seed": 5,
            "command": ["kd", "phase", "run", "all"],
        }
        return run(select(phases), **(settings | options))  # type: ignore[arg-type]

    return start_


def test_a_run_leaves_one_record_with_all_that_was_found(start, store: Store) -> None:
    events: list[Event] = []
    record = start(phase(0, Gate("right", "", sample_gates.passes)), watch=events.append)

    (entry,) = record.gates
    assert entry.status is Status.PASSED
    assert [(f.name, f.value) for f in entry.figures] == [("prompts", 200), ("seed", 5)]
    assert entry.seconds is not None
    assert entry.content is not None
    assert record.finished is not None
    assert record.revision is not None
    assert store.own_records() == [record]
    assert [event.note for event in events] == ["", "case 0", "case 1", "case 2", ""]
    assert events[-1].result == entry


@pytest.mark.parametrize(
    ("check", "status", "failure", "message"),
    [
        (sample_gates.fails, Status.FAILED, FailureKind.NUMERICAL, "row 3 of request 1 differs"),
        (sample_gates.breaks, Status.ERROR, None, "IndexError at sample_gates.py:"),
        (sample_gates.misses_a_library, Status.BLOCKED, None, "is not built (run `kd build`)"),
        (sample_gates.answers_nothing, Status.ERROR, None, "a gate returns its figures, got ()"),
        (sample_gates.gives_infinity, Status.ERROR, None, "refused: "),
        (sample_gates.measures, Status.ERROR, None, "a correctness gate has no speed figure"),
        (sample_gates.crashes, Status.ERROR, None, "died (signal SIGSEGV)"),
        (sample_gates.exits, Status.ERROR, None, "died (exit code 7)"),
        (sample_gates.exits_before_its_child, Status.ERROR, None, "died (exit code 7)"),
        (sample_gates.ends_by_an_unnamed_signal, Status.ERROR, None, "died (signal 3"),
        (sample_gates.sends_what_cannot_be_read, Status.ERROR, None, "sent cannot be read: "),
    ],
)
def test_what_goes_wrong_in_a_gate_stays_in_the_gate(
    start, check, status: Status, failure: FailureKind | None, message: str
) -> None:
    bad, good = Gate("bad", "", check, time_limit_s=60.0), Gate("good", "", sample_gates.passes)
    first, second = start(phase(0, bad, good)).gates
    assert (first.status, first.failure) == (status, failure)
    assert message in (first.message or "")
    assert second.status is Status.PASSED


def test_what_a_gate_prints_goes_to_its_log(start, checkout: Checkout, capfd) -> None:
    (entry,) = start(phase(0, Gate("loud", "", sample_gates.prints))).gates
    log = checkout.root / (entry.log or "")
    assert sorted(log.read_text().splitlines()) == ["from Python", "from a child"]
    assert capfd.readouterr() == ("", "")


def gone(process: int) -> bool:
    """Whether `process` is gone within a few seconds (or only waits to be reaped)."""
    for _ in range(100):
        try:
            state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_gate_over_its_time_limit_is_ended_with_its_children(
    start, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    # Of a busy machine too, where the first worker loads torch for all that follow.
    hang = dataclasses.replace(with_environment("hangs", pids), time_limit_s=8.0)
    (entry,) = start(phase(0, hang)).gates
    assert (entry.status, entry.failure) == (Status.FAILED, FailureKind.TIMEOUT)
    assert "not done after 8 s" in (entry.message or "")
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_child_that_a_gate_leaves_behind_is_ended(start, tmp_path: pathlib.Path) -> None:
    pids = tmp_path / "pids"
    (entry,) = start(phase(0, with_environment("leaves_a_child", pids))).gates
    assert entry.status is Status.PASSED
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def with_environment(name: str, pids: pathlib.Path) -> Gate:
    """The sample gate `name`, which writes process numbers to `pids`."""
    import functools

    return Gate("child", "", functools.partial(sample_gates.with_pid_file, name, str(pids)))


def test_a_gate_that_patches_the_clock_does_not_change_the_time_on_record(start) -> None:
    (entry,) = start(phase(0, Gate("clock", "", sample_gates.patches_the_clock))).gates
    assert entry.seconds is not None
    assert 0 < entry.seconds < 30


def test_what_the_machine_lacks_blocks_with_the_remedy(start) -> None:
    gate = Gate("cuda", "", sample_gates.passes, requires=(Requirement.GPU, Requirement.NVCC))
    (entry,) = start(phase(0, gate)).gates
    assert entry.status is Status.BLOCKED
    assert "no CUDA GPU" in (entry.message or "")
    assert "install the CUDA toolkit" in (entry.message or "")


def test_an_unwritten_gate_is_unwritten_whatever_the_machine_lacks(start) -> None:
    (entry,) = start(phase(0, Gate("later", "", requires=(Requirement.GPU,)))).gates
    assert entry.status is Status.UNWRITTEN


def test_a_failure_blocks_the_phases_that_build_on_it_however_far(start) -> None:
    record = start(
        phase(0, Gate("bad", "", sample_gates.fails)),
        phase(1, Gate("later", ""), depends_on=(0,)),
        phase(2, Gate("above", "", sample_gates.passes), depends_on=(1,)),
        phase(3, Gate("beside", "", sample_gates.passes)),
    )
    statuses = {entry.gate: entry.status for entry in record.gates}
    assert statuses == {
        "bad": Status.FAILED,
        "later": Status.UNWRITTEN,
        "above": Status.BLOCKED,
        "beside": Status.PASSED,
    }
    assert "p0_sample, which this phase builds on, has failed: bad" in (
        record.gates[2].message or ""
    )


def test_speed_is_measured_after_correctness_passed_and_not_otherwise(start) -> None:
    right, wrong = Gate("right", "", sample_gates.passes), Gate("wrong", "", sample_gates.fails)
    fast = start(phase(0, speed_gate(), right)).gates
    assert [entry.gate for entry in fast] == ["right", "sample-speed"]
    assert fast[1].status is Status.PASSED
    assert fast[1].proof is not None

    slow = start(phase(1, speed_gate("other-speed"), wrong)).gates
    assert slow[1].status is Status.BLOCKED
    assert slow[1].message == "no speed before correctness: wrong failed"


def test_verify_runs_what_has_not_passed_with_this_code_and_not_again_what_has(
    start, store: Store
) -> None:
    phases = phase(0, Gate("right", "", sample_gates.passes), Gate("bad", "", sample_gates.fails))
    platform = start(phases).platform
    known = store.newest([phases], "local", "bench-1")
    to_run, fresh = unproven(select([phases]), known, platform)
    assert [gate.name for _, gate in to_run] == ["bad"]
    assert [entry.gate for entry in fresh] == ["right"]
    other = platform.model_copy(update={"driver": "another"})
    to_run, fresh = unproven(select([phases]), known, other)
    assert len(to_run) == 2
    assert fresh == []


def test_fail_fast_stops_and_leaves_no_entry_for_what_did_not_run(start) -> None:
    bad, good = Gate("bad", "", sample_gates.fails), Gate("good", "", sample_gates.passes)
    record = start(phase(0, bad, good), fail_fast=True)
    assert [entry.gate for entry in record.gates] == ["bad"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_gates_run_beside_each_other_where_that_is_asked_for(start, jobs: int) -> None:
    """Of several phases too; and one that is wrong there is seen by neither alone."""
    record = start(
        phase(0, Gate("first", "", sample_gates.meets_another)),
        phase(1, Gate("second", "", sample_gates.meets_another), depends_on=(0,)),
        jobs=jobs,
    )
    assert [entry.figures[0].value for entry in record.gates] == [jobs, jobs]


def test_speed_is_measured_alone_after_every_other_gate(start, store: Store) -> None:
    events: list[Event] = []
    alone = Gate("alone-speed", "", sample_gates.meets_nobody, kind=GateKind.SPEED)
    record = start(
        phase(0, Gate("right", "", sample_gates.passes), alone, speed_gate()),
        phase(1, Gate("beside", "", sample_gates.meets_another), depends_on=(0,)),
        phase(2, Gate("other", "", sample_gates.meets_another), depends_on=(0,)),
        jobs=3,
        watch=events.append,
    )
    assert {entry.status for entry in record.gates} == {Status.PASSED}
    ended = [event.gate.name for event in events if event.result is not None]
    assert set(ended[:3]) == {"right", "beside", "other"}
    assert ended[3:] == ["alone-speed", "sample-speed"]
    assert store.own_records() == [record]


def test_a_failure_that_is_known_blocks_what_begins_later_beside_others(start) -> None:
    record = start(
        phase(0, Gate("bad", "", sample_gates.fails), Gate("right", "", sample_gates.passes)),
        phase(1, Gate("above", "", sample_gates.passes), speed_gate(), depends_on=(0,)),
        jobs=2,
    )
    found = {entry.gate: entry.status for entry in record.gates}
    assert found["bad"] is Status.FAILED
    assert found["right"] is Status.PASSED
    assert found["sample-speed"] is Status.BLOCKED


def test_fail_fast_lets_those_end_that_have_begun(start) -> None:
    gates = (
        Gate("bad", "", sample_gates.fails_before_another_ends),
        Gate("begun", "", sample_gates.outlives_another),
        Gate("not-begun", "", sample_gates.passes),
    )
    record = start(phase(0, *gates), jobs=2, fail_fast=True)
    assert [(entry.gate, entry.status) for entry in record.gates] == [
        ("bad", Status.FAILED),
        ("begun", Status.PASSED),
    ]


def test_each_of_several_gates_has_its_own_time_limit(start) -> None:
    short = Gate("short", "", sample_gates.sleeps, time_limit_s=1.0)
    record = start(phase(0, short, Gate("right", "", sample_gates.meets_nobody)), jobs=2)
    assert [entry.failure for entry in record.gates] == [FailureKind.TIMEOUT, None]


def test_who_talks_without_an_end_is_ended_in_time_and_keeps_no_other_from_ending(start) -> None:
    ended: list[str] = []

    def watch(event: Event) -> None:
        time.sleep(0.01)  # as where each is shown
        if event.result is not None:
            ended.append(event.gate.name)

    loud = Gate("loud", "", sample_gates.talks, time_limit_s=8.0)
    gates = (loud, Gate("right", "", sample_gates.passes))
    record = start(phase(0, *gates), jobs=2, watch=watch)
    assert [entry.failure for entry in record.gates] == [FailureKind.TIMEOUT, None]
    assert ended == ["right", "loud"]


def test_a_watcher_that_fails_while_a_gate_runs_is_no_failure_of_the_gate(
    start, store: Store
) -> None:
    def watch(event: Event) -> None:
        if event.note == "case 1":
            raise BrokenPipeError("nobody reads on")

    with pytest.raises(BrokenPipeError, match="nobody reads on"):
        start(phase(0, Gate("right", "", sample_gates.passes)), watch=watch)
    (record,) = store.own_records()
    assert record.finished is None
    assert [entry.status for entry in record.gates] == [Status.INTERRUPTED]


def test_a_gate_that_ended_is_on_record_before_another_is_heard(start, store: Store) -> None:
    heard: list[str] = []

    def watch(event: Event) -> None:
        if event.note == "case 0":
            time.sleep(2.0)  # the others go on: both have something to say then
        if event.note == "still here" and "case 0" in heard:
            raise OSError("killed here")
        heard.append(event.note)

    gates = (Gate("right", "", sample_gates.passes), Gate("loud", "", sample_gates.talks))
    with pytest.raises(OSError, match="killed here"):
        start(phase(0, *gates), jobs=2, watch=watch)
    (record,) = store.own_records()
    assert [entry.status for entry in record.gates] == [Status.PASSED, Status.INTERRUPTED]


def test_fail_fast_stops_where_a_gate_cannot_be_begun(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phases import runner

    def broken(root: pathlib.Path, gate: Gate) -> str | None:
        raise SyntaxError("invalid syntax (slots.py, line 3)")

    monkeypatch.setattr(runner, "gate_content", broken)
    gates = [Gate(name, "", sample_gates.passes) for name in ("first", "second")]
    record = start(phase(0, *gates), fail_fast=True)
    assert [(entry.gate, entry.status) for entry in record.gates] == [("first", Status.ERROR)]


def test_a_run_that_dies_of_its_watcher_stays_unfinished_with_the_rest_interrupted(
    start, store: Store
) -> None:
    def watch(event: Event) -> None:
        if event.result is not None:
            raise OSError("nobody reads on")

    gates = [Gate(name, "", sample_gates.passes) for name in ("first", "second")]
    with pytest.raises(OSError, match="nobody reads on"):
        start(phase(0, *gates), watch=watch)
    (record,) = store.own_records()
    assert record.finished is None
    assert [entry.status for entry in record.gates] == [Status.PASSED, Status.INTERRUPTED]


def test_what_a_run_has_not_ended_is_running_and_interrupted_once_it_is_gone(
    start, checkout: Checkout, store: Store
) -> None:
    one = phase(0, *(Gate(name, "", sample_gates.passes) for name in ("first", "second")))

    def seen() -> tuple[str, str | None]:
        running, known = run_that_goes_on(checkout, store), store.newest([one], "local", "bench-1")
        (row,) = [row for row in status_rows([one], [known], running) if row[1] == "second"]
        states = gate_states(select([one]), known, MACHINE, Platform.of(MACHINE, {}), running)
        return row[2], states[1].why

    def watch(event: Event) -> None:
        if event.result is not None and event.gate.name == "first":
            assert seen() == ("running", "a run that goes on right now has not ended it yet")
            raise OSError("killed here")

    with pytest.raises(OSError, match="killed here"):
        start(one, watch=watch)
    status, why = seen()
    assert (status, why) == (
        "interrupted",
        "it was interrupted when it was last to run: the run ended before this gate did",
    )


def test_what_cannot_be_hashed_is_an_error_of_that_gate_alone(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phases import runner

    hash_it = runner.gate_content

    def broken(root: pathlib.Path, gate: Gate) -> str | None:
        if gate.name == "first":
            raise SyntaxError("invalid syntax (slots.py, line 3)")
        return hash_it(root, gate)

    monkeypatch.setattr(runner, "gate_content", broken)
    first, second = start(
        phase(0, *(Gate(name, "", sample_gates.passes) for name in ("first", "second")))
    ).gates
    assert first.status is Status.ERROR
    assert "slots.py, line 3" in (first.message or "")
    assert second.status is Status.PASSED


def test_a_broken_record_stops_a_run_before_its_first_gate(start, checkout: Checkout) -> None:
    checkout.evidence.mkdir(parents=True)
    (checkout.evidence / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json: is not JSON"):
        start(phase(0, Gate("right", "", sample_gates.passes)))


def test_what_a_killed_run_left_in_scratch_is_gone_after_the_next(
    start, checkout: Checkout
) -> None:
    (checkout.scratch / "old").mkdir(parents=True)
    start(phase(0, Gate("right", "", sample_gates.passes)))
    assert not (checkout.scratch / "old").exists()


def test_a_second_run_at_the_same_time_is_refused(start, checkout: Checkout) -> None:
    checkout.state.mkdir()
    with (
        filelock.FileLock(checkout.state / "run.lock"),
        pytest.raises(ConfigError, match="another run of kd holds"),
    ):
        start(phase(0, Gate("right", "", sample_gates.passes)))


RUN_THAT_HANGS = """
import pathlib, sys
import sample_gates
from phases.checkout import Checkout
from phases.evidence import Store
from phases.gate import Gate
from phases.runner import run, select

if __name__ == "__main__":
    root, state = map(pathlib.Path, sys.argv[1:3])
    checkout = Checkout(root, state)
    gates = [Gate(name, "", getattr(sample_gates, name)) for name in ("passes", "hangs", "prints")]
    run(
        select([sample_gates.phase(0, *gates)]),
        checkout=checkout,
        store=Store(checkout.evidence, state / "kept", root),
        machine=sample_gates.MACHINE,
        host="local",
        seed=1,
        command=["kd"],
    )
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_stopped_or_killed_leaves_interrupted_and_no_process(
    root: pathlib.Path, checkout: Checkout, store: Store, tmp_path: pathlib.Path, number: int
) -> None:
    script, pids = tmp_path / "run.py", tmp_path / "pids"
    script.write_text(RUN_THAT_HANGS)
    paths = os.pathsep.join([*sys.path, str(root / "tests/support")])
    process = subprocess.Popen(
        [sys.executable, str(script), str(root), str(checkout.state)],
        env=os.environ | {"PYTHONPATH": paths, "SAMPLE_PID_FILE": str(pids)},
        stderr=subprocess.DEVNULL,
    )
    for _ in range(2400):  # a busy machine loads torch for half a minute
        if pids.exists() and pids.read_text().count(" "):
            break
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(20)

    (record,) = store.own_records()
    assert [entry.status for entry in record.gates] == [
        Status.PASSED,
        Status.INTERRUPTED,
        Status.INTERRUPTED,
    ]
    assert (record.finished is None) == (number == signal.SIGKILL)
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert json.loads((checkout.evidence / f"{record.run}.json").read_text())["run"] == record.run


class _Finalized:
    """While it is, a signal comes, as one may in any collection of garbage."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __del__(self) -> None:
        signal.raise_signal(self._number)


def test_an_interruption_while_an_object_is_finalized_is_not_lost() -> None:
    """Python drops what is raised there, and the run went on as if nobody had pressed Ctrl-C."""

    def goes_on() -> None:
        _Finalized(signal.SIGINT)
        time.sleep(20)

    begun = time.monotonic()
    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), signals_interrupt():
        goes_on()
    assert time.monotonic() - begun < 10
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_lost_as_the_run_ends_hits_nobody_later() -> None:
    with signals_interrupt():
        _Finalized(signal.SIGTERM)
    time.sleep(0.2)


def test_other_errors_of_finalizers_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: told.append(str(about.exc_value)))

    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    with signals_interrupt():
        Broken()
    assert told == ["broken"]
