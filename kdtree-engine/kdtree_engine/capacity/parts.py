"""A component of a step: how long it takes, what bounds it, and what its number rests on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

__all__ = ["BASES", "BOUNDS", "Basis", "Bound", "Component", "by_bound", "weakest"]

Bound = Literal["bytes", "flops", "latency", "link"]
"""bytes of the GPU's memory; its products; what is fixed for each launch, message or step; bytes
between GPUs."""
BOUNDS: tuple[Bound, ...] = ("bytes", "flops", "latency", "link")

Basis = Literal["given", "calibrated", "extrapolated", "prediction"]
"""given: by the caller. calibrated: a formula fitted to measurements on that GPU, asked for what
lies among them. extrapolated: the same formula, asked for what does not. prediction: anything
else, such as a GPU on which nothing was measured."""
BASES: tuple[Basis, ...] = ("given", "calibrated", "extrapolated", "prediction")


@dataclasses.dataclass(frozen=True)
class Component:
    """parts: seconds of a step, by what bounds them; they add up, as nothing overlaps here."""

    name: str
    parts: Mapping[Bound, float]
    basis: Basis

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> Bound:
        """What bounds most of it."""
        return max(BOUNDS, key=lambda bound: self.parts.get(bound, 0.0))


def by_bound(components: Iterable[Component]) -> dict[Bound, float]:
    """Seconds of all components together, by what bounds them."""
    total: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
    for one in components:
        for bound, seconds in one.parts.items():
            total[bound] += seconds
    return total


def weakest(components: Iterable[Component]) -> Basis:
    """What the sum rests on: a sum is worth no more than its weakest part. Empty ones are none."""
    return max((one.basis for one in components if one.seconds), key=BASES.index, default="given")
