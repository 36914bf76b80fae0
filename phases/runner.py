"""Runs gates and turns their outcomes into evidence; what to show of it is the caller's business.

The record of a run is written before its first gate starts, with every gate `interrupted`, and
again after each gate. So whatever ends the run, what had not ended is on record as interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import filelock

from kdtree_engine.errors import ConfigError, KdError
from kdtree_engine.machine import Machine
from phases.checkout import Checkout
from phases.content import gate_content
from phases.evidence import (
    Evidence,
    FigureRecord,
    GateRecord,
    Platform,
    Proof,
    Record,
    Store,
    new_run_id,
    now,
)
from phases.gate import Gate, GateKind, Status
from phases.phase import Phase
from phases.worker import Outcome, RunningGate

__all__ = [
    "Event",
    "Selection",
    "engine_environment",
    "phases_below",
    "run",
    "run_that_goes_on",
    "select",
    "signals_interrupt",
    "signals_raise",
    "unproven",
]

_AGAIN_S = 0.05

Selection = Sequence[tuple[Phase, Gate]]


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in a run. `result` is set when the gate ended."""

    phase: Phase
    gate: Gate
    done: int = 0
    total: int = 0
    note: str = ""
    result: GateRecord | None = None


def select(phases: Iterable[Phase], only: Iterable[str] = ()) -> list[tuple[Phase, Gate]]:
    """The gates of `phases` in order, correctness before speed; with `only`, those alone."""
    wanted = set(only)
    chosen: list[tuple[Phase, Gate]] = []
    for phase in phases:
        gates = sorted(phase.gates, key=lambda gate: gate.kind is GateKind.SPEED)
        chosen += [(phase, gate) for gate in gates if not wanted or gate.name in wanted]
    return chosen


def unproven(
    selection: Selection, known: Mapping[str, Evidence], platform: Platform
) -> tuple[list[tuple[Phase, Gate]], list[GateRecord]]:
    """The gates that have not passed with the code as it is, and the entries of those that have.

    platform: this machine's. What passed with another GPU, driver, torch or SGLang does not count.
    """
    to_run = [
        (phase, gate)
        for phase, gate in selection
        if gate.name not in known
        or not known[gate.name].proves
        or not known[gate.name].record.platform.may_be(platform)
    ]
    names = {gate.name for _, gate in to_run}
    fresh = [known[gate.name].gate for _, gate in selection if gate.name not in names]
    return to_run, fresh


def engine_environment() -> dict[str, str]:
    """The variables that choose what the engine runs: evidence holds for these values alone."""
    return {name: os.environ[name] for name in os.environ if name.startswith("KDTREE_")}


def run(
    selection: Selection,
    *,
    checkout: Checkout,
    store: Store,
    machine: Machine,
    host: str,
    seed: int,
    command: Sequence[str],
    fail_fast: bool = False,
    jobs: int = 1,
    watch: Callable[[Event], None] = lambda event: None,
) -> Record:
    """Run the selected gates on this machine and return the finished record.

    jobs: how many gates of correctness may run at once. One: each gate runs alone, in the order of
        the selection. More: those of all phases come first, and a failure further down blocks a
        phase's gates only where it is known when they begin; those of speed run alone, afterwards.

    With `fail_fast`, gates that have not begun when one fails are not run and leave no entry. An
    interruption (Ctrl-C, SIGTERM, SIGHUP) ends the gates in flight, finishes the record with what
    is left marked interrupted, and raises KeyboardInterrupt.
    """
    if not selection:
        raise ConfigError("no gate is selected")
    if jobs > 1:
        selection = sorted(selection, key=lambda pair: pair[1].kind is GateKind.SPEED)
    with _alone(checkout), signals_interrupt():
        store.newest([], host, machine.hostname)  # a broken record is better met now than later
        shutil.rmtree(checkout.scratch, ignore_errors=True)  # of a run that was killed
        revision, dirty = checkout.revision()
        record = Record(
            run=new_run_id(),
            command=tuple(command),
            host=host,
            machine=machine,
            environment=engine_environment(),
            revision=revision,
            dirty=dirty,
            seed=seed,
            started=now(),
            gates=tuple(_interrupted(phase, gate) for phase, gate in selection),
        )
        store.save(record)
        gates = _Gates(record, checkout, store, watch)
        try:
            gates.run(selection, jobs, fail_fast)
        except KeyboardInterrupt:
            store.save(gates.record.model_copy(update={"finished": now()}))
            raise
        # Whatever else ends a run early leaves the record as it is: unfinished, the rest
        # interrupted.
        record = gates.record.model_copy(update={"finished": now()})
        store.save(record)
    return record


@dataclasses.dataclass(frozen=True)
class _Running:
    """A gate in flight, and its entry so far."""

    phase: Phase
    gate: Gate
    base: GateRecord
    proof: Proof | None
    log: str
    process: RunningGate


class _Gates:
    """The gates of one run. `record` is what is known of them, and is saved at each change."""

    def __init__(
        self, record: Record, checkout: Checkout, store: Store, watch: Callable[[Event], None]
    ) -> None:
        self.record = record
        self._checkout, self._store, self._watch = checkout, store, watch
        self._running: list[_Running] = []

    def run(self, selection: Selection, jobs: int, fail_fast: bool) -> None:
        """Begins gates in order, as far as they may run beside each other, until all have ended."""
        waiting = list(selection)
        try:
            while waiting or self._running:
                while waiting and self._may_begin(waiting[0][1], jobs):
                    phase, gate = waiting.pop(0)
                    self._watch(Event(phase, gate))
                    began = self._begin(phase, gate, phases_below(phase, selection))
                    if isinstance(began, _Running):
                        self._running.append(began)
                    else:
                        self._note(phase, gate, began, fail_fast, waiting)
                for one, outcome in self._ended():
                    result = _result(one.base, outcome, one.proof, one.log)
                    self._note(one.phase, one.gate, result, fail_fast, waiting)
        finally:
            for one in self._running:
                one.process.end()

    def _may_begin(self, gate: Gate, jobs: int) -> bool:
        together = [gate, *(one.gate for one in self._running)]
        alone = any(other.kind is GateKind.SPEED for other in together)
        return len(together) <= (1 if alone else jobs)

    def _ended(self) -> Iterator[tuple[_Running, Outcome]]:
        """Those in flight that have ended, once one has something to say or no time left.

        Each by itself, so that it is on record before another one is heard, which may take seconds.
        """
        if not self._running:
            return
        first = min(one.process.deadline for one in self._running)
        multiprocessing.connection.wait(
            [each for one in self._running for each in one.process.waits],
            max(0.0, first - time.monotonic()),
        )
        for one in tuple(self._running):
            outcome = one.process.hear()
            if outcome is not None:
                self._running.remove(one)
                yield one, outcome

    def _note(
        self,
        phase: Phase,
        gate: Gate,
        result: GateRecord,
        fail_fast: bool,
        waiting: list[tuple[Phase, Gate]],
    ) -> None:
        """fail_fast: a failure leaves out those that are `waiting`, of which none is left then."""
        self.record = self.record.with_gate(result)
        if fail_fast and result.status in (Status.FAILED, Status.ERROR):
            self._leave_out([other.name for _, other in waiting])
            waiting.clear()
        self._store.save(self.record)
        self._watch(Event(phase, gate, result=result))

    def _leave_out(self, names: Sequence[str]) -> None:
        kept = tuple(entry for entry in self.record.gates if entry.gate not in names)
        self.record = self.record.model_copy(update={"gates": kept})

    def _begin(self, phase: Phase, gate: Gate, below: set[str]) -> GateRecord | _Running:
        """The gate in flight; or its entry, where nothing is to run."""
        record, checkout = self.record, self._checkout
        base = GateRecord(
            phase=phase.package,
            gate=gate.name,
            kind=gate.kind,
            status=Status.UNWRITTEN,
            seed=record.seed,
            started=now(),
        )
        if gate.check is None:
            return base
        proof: Proof | None = None
        try:
            base = _with(base, content=gate_content(checkout.root, gate))
            obstacle = _obstacle(gate, below, record)
            if obstacle is None and gate.kind is GateKind.SPEED:
                answer = self._store.prove(phase, record.host, record.platform)
                if isinstance(answer, Proof):
                    proof = answer
                else:
                    obstacle = f"no speed before correctness: {'; '.join(answer)}"
        except (KdError, OSError, SyntaxError) as error:  # a file changed under the run
            message = f"what the gate depends on cannot be read: {error}"
            return _with(base, status=Status.ERROR, message=message)
        if obstacle is not None:
            return _with(base, status=Status.BLOCKED, message=obstacle)
        log = checkout.logs / record.run / f"{gate.name}.log"
        process = RunningGate(
            gate,
            seed=record.seed,
            log=log,
            scratch=checkout.scratch / gate.name,
            progress=lambda done, total, note: self._watch(Event(phase, gate, done, total, note)),
        )
        return _Running(phase, gate, base, proof, os.path.relpath(log, checkout.root), process)


def _result(base: GateRecord, outcome: Outcome, proof: Proof | None, log: str) -> GateRecord:
    try:
        return _with(
            base,
            status=outcome.status,
            failure=outcome.failure,
            message=outcome.message,
            seconds=outcome.seconds,
            figures=tuple(FigureRecord.of(figure) for figure in outcome.figures),
            proof=proof,
            log=log,
        )
    except ValueError as error:  # the gate gave figures that evidence refuses
        faults = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        return _with(
            base,
            status=Status.ERROR,
            seconds=outcome.seconds,
            log=log,
            message=f"refused: {faults}",
        )


def _with(base: GateRecord, **changes: object) -> GateRecord:
    return GateRecord.model_validate(dict(base) | changes)


def phases_below(phase: Phase, selection: Selection) -> set[str]:
    """The packages of the selected phases that `phase` builds on, directly or not."""
    selected = {other.number: other for other, _ in selection}
    waiting, found = list(phase.depends_on), set[str]()
    while waiting:
        other = selected.get(waiting.pop())
        if other is not None and other.package not in found:
            found.add(other.package)
            waiting.extend(other.depends_on)
    return found


def _obstacle(gate: Gate, below: set[str], record: Record) -> str | None:
    """Why `gate` cannot run here, or None: what the machine lacks, or a failure further down."""
    lacking = [need for need in gate.requires if need.missing(record.machine)]
    if lacking:
        return "; ".join(f"{need.missing(record.machine)} ({need.remedy})" for need in lacking)
    for entry in record.gates:
        if entry.phase in below and entry.status in (Status.FAILED, Status.ERROR):
            return f"{entry.phase}, which this phase builds on, has {entry.status}: {entry.gate}"
    return None


def _interrupted(phase: Phase, gate: Gate) -> GateRecord:
    return GateRecord(
        phase=phase.package,
        gate=gate.name,
        kind=gate.kind,
        status=Status.INTERRUPTED,
        message="the run ended before this gate did",
    )


def run_that_goes_on(checkout: Checkout, store: Store) -> str | None:
    """The run of this checkout that has not ended: its gates are `interrupted` until each ends.

    None where none goes on: a record that was never finished is one of a run that was killed.
    """
    records = store.own_records()
    if not records or records[-1].finished is not None:
        return None
    try:
        with filelock.FileLock(_run_lock(checkout), timeout=0):
            return None
    except (filelock.Timeout, OSError):
        return records[-1].run


def _run_lock(checkout: Checkout) -> pathlib.Path:
    return checkout.state / "run.lock"


@contextlib.contextmanager
def _alone(checkout: Checkout) -> Iterator[None]:
    """One run at a time: two would spoil each other's times."""
    checkout.state.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(_run_lock(checkout))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ConfigError(
            f"another run of kd holds {lock.lock_file}", remedy="wait until it ends"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does; what comes after the first is ignored.

    A signal that is ignored already, as SIGHUP under nohup, stays so. Only the main thread may
    set handlers.
    """
    heard = False

    def interrupt() -> KeyboardInterrupt | None:
        nonlocal heard
        first, heard = not heard, True
        return KeyboardInterrupt() if first else None

    with signals_raise(interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def signals_raise(
    what: Callable[[], BaseException | None], *numbers: signal.Signals
) -> Iterator[None]:
    """What `what` gives is raised in the main thread when one of these signals comes, if any.

    For certain: Python drops what a handler raises while an object is being finalized, which a
    collection of garbage may do at any time. It is raised once more then, a moment later.

    A signal that is ignored already stays so. Only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    raised: list[BaseException] = []
    dropped: list[BaseException] = []
    timers: list[threading.Timer] = []

    def handle(number: int, frame: object) -> None:
        error = dropped.pop() if dropped else what()
        if error is not None:
            raised.append(error)
            raise error

    def drops(about: Any) -> None:
        if not any(about.exc_value is error for error in raised):
            told(about)
            return
        dropped.append(about.exc_value)
        again = (threading.main_thread().ident, next(iter(before)))
        timers.append(threading.Timer(_AGAIN_S, signal.pthread_kill, again))
        timers[-1].daemon = True
        timers[-1].start()

    before = {
        number: signal.signal(number, handle)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    told, sys.unraisablehook = sys.unraisablehook, drops
    try:
        yield
    finally:
        sys.unraisablehook = told
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
        raised.clear()  # its frames lead here
