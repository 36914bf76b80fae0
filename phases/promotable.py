"""Whether a release may be promoted to a phase: what the states of its gates say.

The states are those that `kd verify --dry-run --json` prints, as they come from another machine:
each has `phase`, `gate`, `token_exact`, `state` and `why`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import ConfigError
from phases.exit_code import ExitCode
from phases.phase import Phase, ServiceProfile
from phases.states import State

__all__ = [
    "completed",
    "default_phase",
    "exit_code_of",
    "lacking",
    "refused_even_if_forced",
    "up_to",
]

States = Iterable[Mapping[str, Any]]


def completed(states: States, phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Those states, with what a release must have said of these phases and has not, as missing.

    A release says itself which gates it has, and what it leaves out nobody has proven: that is a
    phase of which it names no gate, and a gate here of token-exactness. One that is token-exact
    here is so whatever the release says.
    """
    found = [dict(one) for one in states]
    for phase in phases:
        named = {one["gate"]: one for one in found if one["phase"] == phase.package}
        exact = {gate.name for gate in phase.gates if gate.token_exact}
        for name in exact & set(named):
            named[name]["token_exact"] = True
        lacks = sorted(exact - set(named))
        if not named and not lacks and phase.gates:
            lacks = [phase.gates[0].name]
        found += [
            {
                "phase": phase.package,
                "gate": name,
                "token_exact": True,
                "state": State.MISSING,
                "why": "the release knows no such gate",
            }
            for name in lacks
        ]
    return found


def lacking(states: States) -> list[str]:
    """One line for each gate that is not proven, speed gates too; none: it may be promoted."""
    return [_line(one) for one in states if one["state"] != State.PROVEN]


def refused_even_if_forced(states: States) -> list[str]:
    """Those of them that say whether the service gives the right tokens."""
    return lacking(one for one in states if one["token_exact"])


def exit_code_of(states: States) -> ExitCode:
    """FAILED where a gate failed, PASSED where all are proven, else BLOCKED."""
    found = {one["state"] for one in states}
    if State.FAILED in found:
        return ExitCode.FAILED
    return ExitCode.BLOCKED if found - {State.PROVEN} else ExitCode.PASSED


def up_to(phases: Iterable[Phase], last: Phase) -> list[Phase]:
    """The phases 0..N, whose gates must be proven before a service runs at phase N."""
    return [phase for phase in phases if phase.number <= last.number]


def default_phase(phases: Sequence[Phase]) -> Phase:
    """The highest phase that is written and has a service profile."""
    written = [
        phase
        for phase in phases
        if phase.profile != ServiceProfile() and all(gate.check for gate in phase.gates)
    ]
    if not written:
        raise ConfigError("no phase with a service profile is written", remedy="name one: --phase")
    return max(written, key=lambda phase: phase.number)


def _line(one: Mapping[str, Any]) -> str:
    why = f": {one['why']}" if one["why"] else ""
    return f"{one['phase']} {one['gate']} is {one['state']}{why}"
