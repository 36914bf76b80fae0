"""Every phase of the repository, found by its package, in an order that respects dependencies."""

from __future__ import annotations

import graphlib
import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence

import phases as _phases
from kdtree_engine.errors import ConfigError, UnknownName
from phases.gate import Gate
from phases.phase import Phase

__all__ = ["find_gate", "find_phase", "in_order", "load_phases"]


def load_phases() -> list[Phase]:
    """The `PHASE` of each package `phases.pN_name`, in dependency order."""
    names = [
        module.name
        for module in pkgutil.iter_modules(_phases.__path__)
        if module.ispkg and re.match(r"p\d", module.name)
    ]
    found: list[Phase] = []
    for name in names:
        try:
            phase: Phase = importlib.import_module(f"phases.{name}").PHASE
        except Exception as error:  # whatever a broken package raises is told in one line
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"phases/{name}: cannot be imported: {said}") from error
        if phase.package != name:
            raise ConfigError(f"phases/{name}: declares phase {phase.number}, '{phase.name}'")
        found.append(phase)
    return in_order(found)


def in_order(phases: Iterable[Phase]) -> list[Phase]:
    """Dependencies first, smaller numbers first among those that are ready.

    With 0 <- 1 <- 2 <- 3 and 4 on (2, 3): [0, 1, 2, 3, 4]. Raises ConfigError for a cycle, an
    unknown dependency, a number or a gate name that stands twice.
    """
    by_number: dict[int, Phase] = {}
    owner: dict[str, Phase] = {}
    for phase in phases:
        if by_number.setdefault(phase.number, phase) is not phase:
            raise ConfigError(f"two phases are numbered {phase.number}")
        for gate in phase.gates:
            if gate.name in owner:
                raise ConfigError(
                    f"two gates are called {gate.name}: "
                    f"in {owner[gate.name].package} and in {phase.package}"
                )
            owner[gate.name] = phase
    for phase in by_number.values():
        for other in phase.depends_on:
            if other not in by_number:
                raise ConfigError(
                    f"phase {phase.number} depends on phase {other}, which does not exist"
                )
    sorter = graphlib.TopologicalSorter({n: p.depends_on for n, p in by_number.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise ConfigError(f"phases depend on each other in a circle: {error.args[1]}") from error
    order: list[Phase] = []
    ready: list[int] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        number = ready.pop(0)
        sorter.done(number)
        order.append(by_number[number])
    return order


def find_phase(phases: Sequence[Phase], wanted: str) -> Phase:
    """The phase with the number, name or package `wanted`; else UnknownName."""
    for phase in phases:
        if wanted in (str(phase.number), phase.name, phase.package, f"p{phase.number}"):
            return phase
    raise UnknownName("phase", wanted, [phase.package for phase in phases])


def find_gate(phases: Sequence[Phase], wanted: str) -> tuple[Phase, Gate]:
    """The gate called `wanted` among `phases`, with its phase; else UnknownName."""
    for phase in phases:
        for gate in phase.gates:
            if gate.name == wanted:
                return phase, gate
    raise UnknownName("gate", wanted, [gate.name for phase in phases for gate in phase.gates])
