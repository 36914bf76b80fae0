"""Where each gate stands on this machine, and what a run would find in its way. Runs nothing."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from kdtree_engine.machine import Machine
from phases.evidence import Evidence, Platform
from phases.gate import Gate, GateKind, Status
from phases.phase import Phase
from phases.report import status_now
from phases.runner import Selection, phases_below

__all__ = ["GateState", "State", "gate_states"]


class State(enum.StrEnum):
    """Only PROVEN counts."""

    PROVEN = "proven"
    """It passed here, with the code as it is."""
    STALE = "stale"
    """It ran with other code, or on what is another machine by now."""
    MISSING = "missing"
    """It did not run here to its end."""
    FAILED = "failed"
    """It failed, or broke, with the code as it is."""
    BLOCKED = "blocked"
    """A run would not get to it."""
    UNWRITTEN = "unwritten"


@dataclasses.dataclass(frozen=True)
class GateState:
    """Where one gate stands. why: in one line; None where it is proven. run: of its evidence."""

    phase: str
    gate: str
    kind: GateKind
    token_exact: bool
    state: State
    why: str | None = None
    run: str | None = None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def gate_states(
    selection: Selection,
    known: Mapping[str, Evidence],
    machine: Machine,
    platform: Platform,
    running: str | None = None,
) -> list[GateState]:
    """One for each selected gate, in that order, which must be that of `runner.select`.

    known: the newest evidence of each gate on this machine. running: the run that goes on there
    right now. A gate that builds on one that failed
    counts as blocked, as it is in a run where that one fails again.
    """
    found: list[GateState] = []
    for phase, gate in selection:
        evidence = known.get(gate.name)
        state, why = _state(phase, gate, evidence, selection, found, machine, platform)
        if state is State.MISSING and evidence and status_now(evidence, running) == "running":
            why = "a run that goes on right now has not ended it yet"
        found.append(
            GateState(
                phase=phase.package,
                gate=gate.name,
                kind=gate.kind,
                token_exact=gate.token_exact,
                state=state,
                why=" ".join(why.split()) if why else None,
                run=evidence.record.run if evidence else None,
            )
        )
    return found


def _state(
    phase: Phase,
    gate: Gate,
    evidence: Evidence | None,
    selection: Selection,
    before: list[GateState],
    machine: Machine,
    platform: Platform,
) -> tuple[State, str | None]:
    if gate.check is None:
        return State.UNWRITTEN, "declared in the plan, no body yet"
    same = evidence is not None and evidence.record.platform.may_be(platform)
    if evidence is not None and evidence.proves and same:
        return State.PROVEN, None
    obstacle = _obstacle(phase, gate, selection, before, machine)
    if obstacle is not None:
        return State.BLOCKED, obstacle
    if evidence is None:
        return State.MISSING, "it was never run here"
    entry = evidence.gate
    if evidence.stale:
        return State.STALE, f"{entry.status}, and the code has changed since"
    if not same:
        other = "another GPU, driver, CUDA, torch, SGLang or environment"
        return State.STALE, f"{entry.status} with {other}"
    if entry.status in (Status.FAILED, Status.ERROR):
        how = f"{entry.status}: {entry.failure}" if entry.failure else str(entry.status)
        return State.FAILED, f"{how}: {entry.message}"
    if entry.status is Status.BLOCKED and entry.seconds is not None:
        # It ran and found out on the way, such as a library that is not built.
        return State.BLOCKED, entry.message
    return State.MISSING, f"it was {entry.status} when it was last to run: {entry.message}"


def _obstacle(
    phase: Phase, gate: Gate, selection: Selection, before: list[GateState], machine: Machine
) -> str | None:
    """Why a run would not start the gate, as far as can be known without one."""
    lacking = [need for need in gate.requires if need.missing(machine)]
    if lacking:
        return "; ".join(f"{need.missing(machine)} ({need.remedy})" for need in lacking)
    below = phases_below(phase, selection)
    for other in before:
        if other.phase in below and other.state is State.FAILED:
            return f"{other.phase}, which this phase builds on, has failed: {other.gate}"
    if gate.kind is GateKind.SPEED:
        hopeless = (State.FAILED, State.BLOCKED, State.UNWRITTEN)
        lacks = [
            f"{other.gate} {other.state}"
            for other in before
            if other.phase == phase.package
            and other.kind is GateKind.CORRECTNESS
            and other.state in hopeless
        ]
        if lacks:
            return f"no speed before correctness: {'; '.join(lacks)}"
    return None
