"""From evidence, and from what a service exports, to what a person reads: rows, counts, exit codes.

Nothing here runs or prints.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from kdtree_engine.fragmentation.exported import PREFIX
from kdtree_engine.machine import Machine
from phases.evidence import Evidence, FigureRecord, GateRecord, Record, Store
from phases.exit_code import ExitCode
from phases.gate import Gate, Status, Unit
from phases.phase import Phase
from phases.requirement import Requirement

__all__ = [
    "GATE_COLUMNS",
    "counts",
    "ending",
    "exit_code",
    "figure_text",
    "fragmentation_lines",
    "gate_rows",
    "kept_by_gpu",
    "notes",
    "plain_table",
    "status_now",
    "status_rows",
]


GATE_COLUMNS = ("phase", "gate", "status", "figure", "seconds")


def exit_code(
    entries: Iterable[GateRecord],
    *,
    gates: Mapping[str, Gate],
    machine: Machine,
    required: frozenset[Requirement] = frozenset(),
) -> int:
    """The exit code of a run; `required` turns what is blocked for lack of it into failure."""
    seen = list(entries)
    statuses = {entry.status for entry in seen}
    unmet = any(
        entry.status is Status.BLOCKED
        and any(need in required and need.missing(machine) for need in gates[entry.gate].requires)
        for entry in seen
    )
    if Status.INTERRUPTED in statuses:
        return ExitCode.INTERRUPTED
    if unmet or statuses & {Status.FAILED, Status.ERROR}:
        return ExitCode.FAILED
    return ExitCode.BLOCKED if statuses - {Status.PASSED} else ExitCode.PASSED


def gate_rows(entries: Iterable[GateRecord]) -> list[tuple[str, str, str, str, str]]:
    """(phase, gate, status, figure, seconds) of each entry."""
    return [
        (
            entry.phase,
            entry.gate,
            f"{entry.status}: {entry.failure}" if entry.failure else str(entry.status),
            figure_text(entry.figures[0]) if entry.figures else "",
            f"{entry.seconds:.1f}" if entry.seconds is not None else "",
        )
        for entry in entries
    ]


def notes(entries: Iterable[GateRecord]) -> list[str]:
    """Why gates did not pass, one line for each reason, with the gates that it holds up."""
    reasons: dict[tuple[Status, str], list[str]] = {}
    for entry in entries:
        if entry.status is Status.UNWRITTEN:
            reasons.setdefault((entry.status, "declared in the plan, no body yet"), []).append(
                entry.gate
            )
        elif entry.status is not Status.PASSED:
            told = entry.message or ""
            if entry.log is not None and entry.status in (Status.FAILED, Status.ERROR):
                told += f" (log: {entry.log})"
            reasons.setdefault((entry.status, told), []).append(entry.gate)
    return [f"{status} {', '.join(gates)}: {why}" for (status, why), gates in reasons.items()]


def ending(record: Record) -> list[str]:
    """What `kd` prints at the end of a run, off a terminal, line by line."""
    return [
        *plain_table(GATE_COLUMNS, gate_rows(record.gates)),
        *notes(record.gates),
        f"{counts(record.gates)}; evidence {record.run}",
    ]


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned text, one line for each row, never wrapped."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]


def counts(entries: Iterable[GateRecord]) -> str:
    """`31 gates: 9 passed, 12 blocked, 10 unwritten`."""
    statuses = collections.Counter(entry.status for entry in entries)
    parts = ", ".join(f"{statuses[status]} {status}" for status in Status if statuses[status])
    total = statuses.total()
    return f"{total} {'gate' if total == 1 else 'gates'}: {parts}"


def figure_text(figure: FigureRecord) -> str:
    """`200 prompts`, `worst relative error 2.1e-15`, `rows 16k: 28.1 us`."""
    value = f"{figure.value:.0f}" if figure.value == int(figure.value) else f"{figure.value:.3g}"
    if figure.unit in (Unit.COUNT, Unit.TOKENS):
        return f"{value} {figure.name}"
    if figure.unit in (Unit.RATIO, Unit.PROBABILITY, Unit.RELATIVE_ERROR):
        return f"{figure.name} {value}"
    return f"{figure.name}: {value} {figure.unit}"


def fragmentation_lines(metrics: Mapping[str, float]) -> list[str]:
    """How a service's KV slots lie, from `read_metrics`; nothing where it exports no such thing."""

    def told(name: str) -> float:
        return metrics.get(f"{PREFIX}{name}", 0.0)

    lines = []
    if told("measured_requests"):
        lines.append(
            f"{told('mean_runs'):.0f} runs of {told('mean_run_length'):.1f} slots a request, "
            f"{told('worst_decile_runs'):.0f} in the worst tenth; "
            f"page locality {told('page_locality'):.3f} "
            f"({told('measured_requests'):.0f} requests)"
        )
    if f"{PREFIX}free_runs" in metrics:
        lines.append(
            f"tier0: {told('free_runs'):.0f} free runs, {told('reserved_slots'):.0f} slots "
            f"reserved for growth, {told('allocation_waits'):.0f} allocations that waited"
        )
    if f"{PREFIX}relocations" in metrics:
        lines.append(
            f"tier1: {told('relocated_rows'):.0f} rows moved by {told('relocations'):.0f} "
            f"relocations of {told('relocation_looks'):.0f} looks"
        )
    return lines


_NOT_RUN = (Status.BLOCKED, Status.UNWRITTEN, Status.INTERRUPTED)


def kept_by_gpu(
    store: Store, phases: Sequence[Phase], host: str | None = None
) -> dict[str, dict[str, Evidence]]:
    """The newest kept evidence of each gate, by the GPU and the KDTREE_ variables of its run.

    A gate that ran to its end counts before one that could not, however new. host: of this one
    alone; None: of all.
    """
    sorts: dict[str, list[Record]] = {}
    for record in store.kept_records().values():
        if host not in (None, record.host):
            continue
        gpus = record.machine.gpus
        variables = "".join(f", {name}={value}" for name, value in record.environment.items())
        sorts.setdefault(f"{gpus[0].name if gpus else 'no GPU'}{variables}", []).append(record)
    found = {}
    for label, records in sorted(sorts.items()):
        ran = [
            record.model_copy(
                update={"gates": tuple(g for g in record.gates if g.status not in _NOT_RUN)}
            )
            for record in records
        ]
        found[label] = store.among(records, phases) | store.among(ran, phases)
    return found


def status_rows(
    phases: Sequence[Phase],
    columns: Sequence[Mapping[str, Evidence]],
    running: str | None = None,
) -> list[tuple[str, ...]]:
    """(phase, gate, a cell for each column): the newest status, stale where the code changed.

    running: the run that goes on right now: what it has not ended is not interrupted.
    """
    return [
        (phase.package, gate.name, *(_cell(column.get(gate.name), running) for column in columns))
        for phase in phases
        for gate in phase.gates
    ]


def status_now(evidence: Evidence, running: str | None) -> str:
    """`running` of what the run that goes on right now has not ended; else the status there is."""
    unended = evidence.gate.status is Status.INTERRUPTED and evidence.record.run == running
    return "running" if unended else str(evidence.gate.status)


def _cell(evidence: Evidence | None, running: str | None) -> str:
    if evidence is None:
        return "-"
    return f"{status_now(evidence, running)}{' (stale)' if evidence.stale else ''}"
