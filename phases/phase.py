"""What a phase declares: its number, plan, dependencies, gates and service profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from phases.gate import Gate, GateKind

__all__ = ["Phase", "ServiceProfile"]


@dataclasses.dataclass(frozen=True)
class ServiceProfile:
    """All that a service promoted to a phase is started with, beside its host's own arguments.

    arguments: arguments of `sglang.launch_server`, such as ("--attention-backend", "kdtree_mla").
    environment: variables such as {"KDTREE_DEFRAG": "tier0"}. Never secrets.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase. `depends_on` are phase numbers; `plan` is the number of its plan."""

    number: int
    name: str
    title: str
    plan: int
    depends_on: tuple[int, ...]
    gates: tuple[Gate, ...]
    profile: ServiceProfile = ServiceProfile()

    @property
    def package(self) -> str:
        """The phase's package name, such as `p0_oracle`; evidence calls the phase so."""
        return f"p{self.number}_{self.name}"

    @property
    def correctness_gates(self) -> tuple[Gate, ...]:
        return tuple(gate for gate in self.gates if gate.kind is GateKind.CORRECTNESS)
