"""Two profiles beside each other: what a change did to a step, class by class."""

from __future__ import annotations

import dataclasses

from kdtree_engine.profiling.summary import Profile

__all__ = ["ClassChange", "compare"]


@dataclasses.dataclass(frozen=True)
class ClassChange:
    """A class in us per step; 0 where one side has none of it. change_us: after less before."""

    name: str
    before_us: float
    after_us: float

    @property
    def change_us(self) -> float:
        return self.after_us - self.before_us


def compare(before: Profile, after: Profile) -> tuple[ClassChange, ...]:
    """Every class of either, the largest change first.

    The changes add up to that of the step. Steps differ in what they do where the batches, contexts
    or accepted tokens of the two traces do: that is the caller's to keep alike.
    """
    old = {one.name: one.us for one in before.classes}
    new = {one.name: one.us for one in after.classes}
    names = dict.fromkeys([*old, *new])
    changes = [ClassChange(name, old.get(name, 0.0), new.get(name, 0.0)) for name in names]
    return tuple(sorted(changes, key=lambda one: -abs(one.change_us)))
