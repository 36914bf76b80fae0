"""What was not measured, or no longer holds, and why: as gates, plans and the README say it."""

from __future__ import annotations

import re

from phases.gate import Gate
from phases.phase import Phase
from phases.reporting.decisions import part, plain
from phases.reporting.gates import GateStanding, standing_cell, standing_of
from phases.reporting.kept import Kept
from phases.reporting.model import Block, Entries, Entry, Listing, Missing, Section, Table

__all__ = ["bullets", "not_shown", "unmeasured_section"]

_NOT_DONE = "Not done"


def unmeasured_section(kept: Kept) -> Section:
    rows = [
        row
        for phase in kept.phases
        for gate in phase.gates
        if (row := _gate(kept, phase, gate)) is not None
    ]
    blocks: list[Block] = []
    if rows:
        blocks.append(Entries("Gates that are not proven", tuple(rows)))
    if parts := not_shown(_readme(kept)):
        blocks.append(Table.of("What README says is not shown", ("part", "not shown"), parts))
    blocks += [
        Listing(f"Not done, by plan {plan.id:04d}: {plan.title}", tuple(items))
        for plan in kept.plans
        if (items := bullets(plan.text, _NOT_DONE))
    ]
    if not blocks:
        blocks.append(Missing("nothing", "every gate is proven, and no document names a gap"))
    return Section(
        "unmeasured",
        "What was not measured, and why",
        "Every gate that is not proven by kept evidence with the code as it is, and every gap that "
        "a document owns up to.",
        tuple(blocks),
    )


def _gate(kept: Kept, phase: Phase, gate: Gate) -> Entry | None:
    standing = standing_of(kept, gate)
    if standing is GateStanding.PROVEN:
        return None
    why = kept.why_not(gate.name)
    if standing is GateStanding.UNWRITTEN:
        why = "declared in the plan, no body yet"
    note = f"phase {phase.number} {phase.name}: {gate.title}"
    return Entry(gate.name, standing_cell(standing), note, (("why", why),))


def _readme(kept: Kept) -> str:
    path = kept.root / "README.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


_ROW = re.compile(r"^\|(?P<part>[^|\n]+)\|[^|\n]*\|(?P<gap>[^|\n]+)\|[ \t]*$", re.M)


def not_shown(readme: str) -> list[tuple[str, str]]:
    """The rows of the table whose last column is `not shown`, where that says something."""
    begin = re.search(r"^\|[^|\n]*\|[^|\n]*\| not shown \|\n", readme, re.M)
    if begin is None:
        return []
    table = readme[begin.end() :].split("\n\n", 1)[0]
    return [
        (plain(row["part"]), plain(row["gap"]))
        for row in _ROW.finditer(table)
        if row["gap"].strip(" -")
    ]


def bullets(text: str, heading: str) -> list[str]:
    """The items of the list in the section `## heading`, each as one line."""
    return [plain(item) for item in re.split(r"^[-*] ", part(text, heading), flags=re.M)[1:]]
