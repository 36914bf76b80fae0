"""The host's share of a step, from measured steps, and how far the model is off the others.

One number is fitted for each way to serve. All steps that are kept are of one service of four
layers: what a layer costs beyond its kernels, and what more ranks cost the host, they do not tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kdtree_engine.errors import ConfigError

__all__ = ["Checked", "MeasuredStep", "checked", "fit_host"]


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """One step of a service.

    served: in words, which way to serve. fitted: whether the host's share is taken from it; else
    it is held out.
    """

    served: str
    source: str
    context: int
    nodes: int
    seconds: float
    fitted: bool


@dataclasses.dataclass(frozen=True)
class Checked:
    """A measured step beside what the model says of it."""

    step: MeasuredStep
    model_seconds: float

    @property
    def error(self) -> float:
        """Relative: 0.1 where the model says a tenth more than was measured."""
        return self.model_seconds / self.step.seconds - 1


def fit_host(steps: Sequence[MeasuredStep], without_host: Sequence[float]) -> float:
    """Seconds: the mean of what the fitted steps took beyond the model's other components.

    without_host: seconds of those, step by step. Never below 0.
    """
    left = [
        step.seconds - rest for step, rest in zip(steps, without_host, strict=True) if step.fitted
    ]
    if not left:
        raise ConfigError("no measured step to take the host's share from")
    return max(0.0, sum(left) / len(left))


def checked(
    steps: Sequence[MeasuredStep], without_host: Sequence[float], host: float
) -> list[Checked]:
    """Every step, fitted and held out, with the model's time."""
    pairs = zip(steps, without_host, strict=True)
    return [Checked(step, rest + host) for step, rest in pairs]
