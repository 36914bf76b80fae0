"""Phases and gates: where each stands, on each kind of machine that kept evidence is of."""

from __future__ import annotations

import collections
import enum
from collections.abc import Sequence

from phases.gate import Gate, GateKind, Status
from phases.phase import Phase
from phases.report import figure_text
from phases.reporting.kept import Kept, KeptGate
from phases.reporting.model import Block, Cell, Headline, Missing, Section, Table, Tone

__all__ = ["GateStanding", "gates_headline", "gates_section", "standing_cell", "standing_of"]


class GateStanding(enum.StrEnum):
    """Where a gate stands by all that is kept. Only PROVEN counts. The first that fits is it."""

    FAILED = "failed"
    """With the code as it is, somewhere."""
    PROVEN = "proven"
    """It passed with the code as it is."""
    STALE = "stale"
    """It passed or failed with other code."""
    BLOCKED = "blocked"
    UNWRITTEN = "unwritten"
    MISSING = "never run"


_TONES = {
    GateStanding.FAILED: Tone.BAD,
    GateStanding.PROVEN: Tone.GOOD,
    GateStanding.STALE: Tone.WARN,
    GateStanding.BLOCKED: Tone.MUTED,
    GateStanding.UNWRITTEN: Tone.MUTED,
    GateStanding.MISSING: Tone.MUTED,
}
_MARKS = {
    GateStanding.FAILED: "✗",
    GateStanding.PROVEN: "✓",
    GateStanding.STALE: "△",
    GateStanding.BLOCKED: "·",
    GateStanding.UNWRITTEN: "·",
    GateStanding.MISSING: "·",
}


def standing_of(kept: Kept, gate: Gate) -> GateStanding:
    """By the newest that ran to an end on each kind of machine."""
    if gate.check is None:
        return GateStanding.UNWRITTEN
    newest = [one for place in kept.places() if (one := kept.newest(gate.name, place))]
    return min(
        (_standing(one) for one in newest),
        key=list(GateStanding).index,
        default=GateStanding.MISSING,
    )


def standing_cell(standing: GateStanding) -> Cell:
    return Cell(f"{_MARKS[standing]} {standing}", _TONES[standing])


def gates_section(kept: Kept) -> Section:
    """How many gates of each phase stand how, and each gate by itself."""
    if not kept.records:
        blocks: list[Block] = [Missing("every gate", "no record is kept in plans/evidence")]
    else:
        blocks = [_overview(kept), *(_phase(kept, phase) for phase in kept.phases)]
    return Section(
        "gates",
        "Phases and gates",
        "A phase is done when its gates pass on evidence. Proven: passed with the code as it is, "
        "on some machine. Stale: the code that the gate depends on has changed since. Of each kind "
        "of machine the newest run that came to an end counts.",
        tuple(blocks),
    )


def gates_headline(kept: Kept) -> Headline:
    gates = [gate for phase in kept.phases for gate in phase.gates]
    counts = collections.Counter(standing_of(kept, gate) for gate in gates)
    rest = ", ".join(
        f"{counts[one]} {one}"
        for one in GateStanding
        if counts[one] and one is not GateStanding.PROVEN
    )
    what = "gates proven" + (f"; {rest}" if rest else "")
    return Headline(f"{counts[GateStanding.PROVEN]} of {len(gates)}", what, "gates", None)


def _overview(kept: Kept) -> Table:
    counts = {
        phase.package: collections.Counter(standing_of(kept, gate) for gate in phase.gates)
        for phase in kept.phases
    }
    shown = [one for one in GateStanding if any(count[one] for count in counts.values())]
    rows = []
    for phase in kept.phases:
        count = counts[phase.package]
        done = count[GateStanding.PROVEN] == len(phase.gates)
        rows.append(
            (
                Cell(f"{phase.number} {phase.name}", note=phase.title),
                Cell("✓ done", Tone.GOOD) if done else Cell("not yet", Tone.MUTED),
                *(Cell(str(count[one]), _TONES[one]) if count[one] else Cell("") for one in shown),
            )
        )
    heads = (f"#{_MARKS[one]} {one}" for one in shown)
    return Table.of("Gates of each phase, by where they stand", ("phase", "done", *heads), rows)


def _phase(kept: Kept, phase: Phase) -> Table:
    places = [
        place
        for place in kept.places()
        if any(kept.newest(gate.name, place) for gate in phase.gates)
    ]
    return Table.of(
        f"Phase {phase.number}, {phase.name}: each gate",
        ("gate", *places),
        [_gate(kept, gate, places) for gate in phase.gates],
        folded=True,
    )


def _gate(kept: Kept, gate: Gate, places: Sequence[str]) -> tuple[Cell, ...]:
    kind = ", speed" if gate.kind is GateKind.SPEED else ""
    return (
        Cell(gate.name, note=gate.title + kind),
        *(_cell(kept.newest(gate.name, place)) for place in places),
    )


def _cell(one: KeptGate | None) -> Cell:
    if one is None:
        return Cell("not run", Tone.MUTED)
    standing, entry = _standing(one), one.entry
    mark = f"{_MARKS[standing]} {entry.status}" + (" (stale)" if one.evidence.stale else "")
    if entry.status is Status.PASSED:
        told = figure_text(entry.figures[0])
    else:
        told = entry.message or "no body yet"
    origin = f"{one.source.date}, {one.file.rpartition('/')[2]}"
    return Cell(mark, _TONES[standing], f"{told} · {origin}")


def _standing(one: KeptGate) -> GateStanding:
    if not one.ended:
        unwritten = one.entry.status is Status.UNWRITTEN
        return GateStanding.UNWRITTEN if unwritten else GateStanding.BLOCKED
    if one.evidence.stale:
        return GateStanding.STALE
    return GateStanding.PROVEN if one.evidence.proves else GateStanding.FAILED
