"""What a person reads of evidence, and what a script gets as exit code."""

from __future__ import annotations

from typing import Any

import pytest
from sample_gates import MACHINE

from phases.evidence import Evidence, FigureRecord, GateRecord
from phases.gate import FailureKind, Gate, GateKind, Status, Unit
from phases.report import (
    counts,
    exit_code,
    figure_text,
    gate_rows,
    notes,
    status_rows,
)
from phases.requirement import Requirement


def entry(status: Status, gate: str = "right", **changes: Any) -> GateRecord:
    fields: dict[str, Any] = {
        "phase": "p0_sample",
        "gate": gate,
        "kind": GateKind.CORRECTNESS,
        "status": status,
        "message": None if status in (Status.PASSED, Status.UNWRITTEN) else "the reason",
    }
    if status is Status.PASSED:
        fields |= {"content": "a" * 64, "seconds": 1.25}
        fields |= {"figures": (FigureRecord(name="prompts", value=200, unit=Unit.COUNT),)}
    if status is Status.FAILED:
        fields |= {"failure": FailureKind.SHAPE}
    return GateRecord(**(fields | changes))


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([Status.PASSED, Status.PASSED], 0),
        ([Status.PASSED, Status.FAILED, Status.BLOCKED], 1),
        ([Status.PASSED, Status.ERROR], 1),
        ([Status.PASSED, Status.BLOCKED], 3),
        ([Status.PASSED, Status.UNWRITTEN], 3),
        ([Status.PASSED, Status.FAILED, Status.INTERRUPTED], 130),
    ],
)
def test_the_worst_status_decides_the_exit_code(statuses: list[Status], code: int) -> None:
    entries = [entry(status) for status in statuses]
    gates = {"right": Gate("right", "")}
    assert exit_code(entries, gates=gates, machine=MACHINE) == code


@pytest.mark.parametrize(
    ("required", "code"), [("gpu", 1), ("nvcc", 3)], ids=["what it lacks", "what it does not need"]
)
def test_required_turns_what_is_blocked_for_lack_of_it_into_failure(
    required: str, code: int
) -> None:
    gates = {"right": Gate("right", "", requires=(Requirement.GPU,))}
    needs = frozenset({Requirement(required)})
    blocked = [entry(Status.BLOCKED)]
    assert exit_code(blocked, gates=gates, machine=MACHINE, required=needs) == code


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (("prompts", 200, Unit.COUNT), "200 prompts"),
        (("worst error", 2.13e-15, Unit.RELATIVE_ERROR), "worst error 2.13e-15"),
        (("16k prefix", 28.14, Unit.MICROSECONDS), "16k prefix: 28.1 us"),
        (("peak", 0.0, Unit.BYTES), "peak: 0 bytes"),
    ],
)
def test_a_figure_is_told_with_its_unit(figure: tuple[str, float, Unit], text: str) -> None:
    name, value, unit = figure
    assert figure_text(FigureRecord(name=name, value=value, unit=unit)) == text


def test_rows_have_phase_gate_status_figure_and_seconds() -> None:
    assert gate_rows([entry(Status.PASSED), entry(Status.FAILED), entry(Status.UNWRITTEN)]) == [
        ("p0_sample", "right", "passed", "200 prompts", "1.2"),
        ("p0_sample", "right", "failed: shape", "", ""),
        ("p0_sample", "right", "unwritten", "", ""),
    ]


def test_notes_name_each_reason_once_with_the_gates_that_it_holds_up() -> None:
    entries = [
        entry(Status.BLOCKED, "a", message="no GPU"),
        entry(Status.BLOCKED, "b", message="no GPU"),
        entry(Status.UNWRITTEN, "c"),
        entry(Status.PASSED, "d"),
    ]
    assert notes(entries) == [
        "blocked a, b: no GPU",
        "unwritten c: declared in the plan, no body yet",
    ]
    failed = entry(Status.FAILED, log=".kd/logs/x/right.log")
    assert notes([failed]) == ["failed right: the reason (log: .kd/logs/x/right.log)"]
    assert counts(entries) == "4 gates: 1 passed, 2 blocked, 1 unwritten"
    assert counts(entries[:1]) == "1 gate: 1 blocked"


def test_status_cells_mark_what_is_stale_and_what_was_never_run() -> None:
    from sample_gates import phase

    gates = phase(0, Gate("right", ""), Gate("exact", ""))
    stale = Evidence.model_construct(gate=entry(Status.PASSED), stale=True)
    assert status_rows([gates], [{"right": stale}]) == [
        ("p0_sample", "right", "passed (stale)"),
        ("p0_sample", "exact", "-"),
    ]
