"""From figures to places on a drawing, and where an axis has its ticks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = ["Scale", "linear_ticks", "log_ticks", "spaced"]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps low..high to start..end; `log` by their logarithms. Values outside are held at the ends.

    low < high, and with `log` both above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            # No quotient of values: one of the smallest numbers below it has none.
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(value) - low) / (high - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """1, 2, 5 times powers of ten within low..high; powers alone where those are too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        found = [
            step * 10.0**power
            for power in range(first, last + 1)
            for step in steps
            if low <= step * 10.0**power <= high
        ]
        if len(found) <= most:
            break
    return found


def linear_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most` of them."""
    span = high - low
    for power in range(math.floor(math.log10(span)) - 1, math.ceil(math.log10(span)) + 1):
        for step in (1, 2, 5):
            width = step * 10.0**power
            if span / width <= most - 1:
                first = math.ceil(low / width - 1e-9)
                last = math.floor(high / width + 1e-9)
                return [at * width for at in range(first, last + 1)]
    return [low, high]


def spaced(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """`places` moved as little as it takes to lie `least` apart within low..high, in their order.

    [10, 12, 50] at least 10 apart: [6, 16, 50].
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    groups: list[tuple[float, int]] = []  # mean place, members
    for at in order:
        mean, count = places[at], 1
        while groups and groups[-1][0] + (groups[-1][1] + count) * least / 2 > mean:
            other, members = groups.pop()
            mean = (mean * count + other * members) / (count + members)
            count += members
        groups.append((mean, count))
    moved = [
        mean + (place - (count - 1) / 2) * least for mean, count in groups for place in range(count)
    ]
    if moved:
        shift = max(0.0, low - moved[0]) - max(0.0, moved[-1] - high)
        moved = [place + shift for place in moved]
    found = [0.0] * len(places)
    for at, place in zip(order, moved, strict=True):
        found[at] = place
    return found
