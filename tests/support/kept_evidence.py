"""Kept evidence that is made up: records of the real gates in a folder of its own."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import sample_gates

from kdtree_engine.machine import Gpu, Machine
from phases.checkout import Checkout
from phases.content import gate_content
from phases.evidence import FigureRecord, GateRecord, Platform, Proof, ProofEntry, Record
from phases.gate import FailureKind, GateKind, Status, Unit
from phases.moe_imbalance import Imbalance
from phases.phase import Phase
from phases.registry import find_gate, load_phases
from phases.reporting.experts import predicted
from phases.reporting.kept import Kept, read_kept

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU = sample_gates.MACHINE
H200 = dataclasses.replace(CPU, gpus=(Gpu("NVIDIA H200", (9, 0), 150 << 30, 132, True),))
OTHER_CODE = "0" * 64

Figures = Sequence[tuple[str, float, Unit]]


@functools.cache
def phases() -> tuple[Phase, ...]:
    return tuple(load_phases())


@functools.cache
def content_of(gate: str) -> str | None:
    """The hash of the gate with the code as it is."""
    return gate_content(ROOT, find_gate(phases(), gate)[1])


@functools.cache
def imbalance() -> Imbalance:
    """A prediction of few steps, as drawing many takes seconds."""
    return predicted(steps=32)


def run_of(day: int) -> str:
    return f"202611{day:02d}T120000Z-{day:06x}"


def ended(
    gate: str,
    figures: Figures = (("cases", 3, Unit.COUNT),),
    *,
    machine: Machine = CPU,
    failed: str | None = None,
    stale: bool = False,
    environment: Mapping[str, str] | None = None,
) -> GateRecord:
    """How `gate` ended, with what its kind asks for. failed: the message of its failure."""
    phase, declared = find_gate(phases(), gate)
    proof = None
    if declared.kind is GateKind.SPEED:
        gates = {
            one.name: ProofEntry(run=run_of(1), content=str(content_of(one.name)))
            for one in phase.correctness_gates
        }
        platform = Platform.of(machine, environment or {})
        proof = Proof(phase=phase.package, host="local", platform=platform, gates=gates)
    return GateRecord(
        phase=phase.package,
        gate=gate,
        kind=declared.kind,
        status=Status.FAILED if failed else Status.PASSED,
        failure=FailureKind.TOO_SLOW if failed else None,
        message=failed,
        figures=tuple(FigureRecord(name=n, value=v, unit=u) for n, v, u in figures),
        content=OTHER_CODE if stale else content_of(gate),
        seconds=1.0,
        proof=proof,
    )


def blocked(gate: str, why: str = "no GPU") -> GateRecord:
    phase, declared = find_gate(phases(), gate)
    return GateRecord(
        phase=phase.package,
        gate=gate,
        kind=declared.kind,
        status=Status.BLOCKED,
        message=why,
    )


def keep(
    folder: pathlib.Path,
    name: str,
    *entries: GateRecord,
    day: int = 2,
    machine: Machine = CPU,
    **changes: Any,
) -> None:
    """Write one record, of noon on a day of November."""
    at = datetime.datetime(2026, 11, day, 12, tzinfo=datetime.UTC)
    fields: dict[str, Any] = {
        "run": run_of(day),
        "command": ("kd", "verify"),
        "host": "local",
        "machine": machine,
        "revision": "f" * 40,
        "dirty": False,
        "seed": 1,
        "started": at,
        "finished": at,
        "gates": entries,
    }
    record = Record(**(fields | changes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(record.as_text())


def read(folder: pathlib.Path) -> Kept:
    """What lies in `folder`, judged by the code of this checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    return read_kept(Checkout(ROOT, folder / "state"), phases(), folder)
