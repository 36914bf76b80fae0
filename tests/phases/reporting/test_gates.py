"""Where a gate stands by all that is kept."""

from __future__ import annotations

import pathlib

import pytest
from kept_evidence import H200, blocked, ended, keep, phases, read

from phases.registry import find_gate
from phases.reporting.gates import GateStanding, gates_headline, gates_section, standing_of
from phases.reporting.model import Missing, Table


@pytest.mark.parametrize(
    ("on_cpu", "on_gpu", "standing"),
    [
        (ended("op-check"), None, GateStanding.PROVEN),
        (ended("op-check", stale=True), None, GateStanding.STALE),
        (blocked("op-check"), ended("op-check"), GateStanding.PROVEN),
        (ended("op-check"), ended("op-check", failed="wrong"), GateStanding.FAILED),
        (ended("op-check"), ended("op-check", failed="wrong", stale=True), GateStanding.PROVEN),
        (blocked("op-check"), None, GateStanding.BLOCKED),
        (None, None, GateStanding.MISSING),
    ],
)
def test_a_gate_stands_by_its_newest_end_on_each_kind_of_machine(
    tmp_path: pathlib.Path, on_cpu: object, on_gpu: object, standing: GateStanding
) -> None:
    if on_cpu is not None:
        keep(tmp_path, "cpu", on_cpu)  # type: ignore[arg-type]
    if on_gpu is not None:
        keep(tmp_path, "gpu", on_gpu, machine=H200)  # type: ignore[arg-type]
    assert standing_of(read(tmp_path), find_gate(phases(), "op-check")[1]) is standing


def test_each_gate_has_a_row_with_a_cell_for_each_kind_of_machine(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "cpu", ended("mask-paths"), blocked("peers", "no GPU here"))
    overview, *tables = gates_section(read(tmp_path)).blocks
    assert isinstance(overview, Table)
    assert overview.rows[0][0].text == "0 oracle"
    rows = {row[0].text: row[1:] for table in tables for row in table.rows}  # type: ignore[union-attr]
    assert set(rows) == {gate.name for phase in phases() for gate in phase.gates}
    assert rows["mask-paths"][0].text == "✓ passed"
    assert rows["mask-paths"][0].note == "3 cases · 2026-11-02, cpu.json"
    assert rows["peers"][0].note.startswith("no GPU here")
    assert gates_headline(read(tmp_path)).figure.startswith("1 of ")


def test_without_any_record_it_says_so(tmp_path: pathlib.Path) -> None:
    (only,) = gates_section(read(tmp_path)).blocks
    assert only == Missing("every gate", "no record is kept in plans/evidence")
