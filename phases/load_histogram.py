"""Times under load: kept as counts by size, merged, and asked for their percentiles.

A soak of an hour gives tens of millions of gaps between tokens. So none is kept by itself: times
are counted in steps of one percent, which takes a few hundred counters however many there are, and
those of several moments add up to those of all of them.
"""

from __future__ import annotations

import dataclasses
import math

__all__ = ["PERCENTILES", "Histogram"]

PERCENTILES = (50, 90, 99)

_STEP = math.log(1.01)
_LEAST = 1e-7
"""Shorter times count as so many seconds: two chunks of one read have no time between them."""


@dataclasses.dataclass
class Histogram:
    """Times in seconds, each with a weight.

    counts: by size, the number of 1% steps from one second. count, total, least, largest: exact.
    """

    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    largest: float = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        """One time, as often as `weight` says."""
        step = math.floor(math.log(max(seconds, _LEAST)) / _STEP)
        self.counts[step] = self.counts.get(step, 0) + weight
        self.count += weight
        self.total += seconds * weight
        self.least = min(self.least, seconds)
        self.largest = max(self.largest, seconds)

    def merge(self, other: Histogram) -> None:
        """Add all times of another one."""
        for step, weight in other.counts.items():
            self.counts[step] = self.counts.get(step, 0) + weight
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float | None:
        """Exact; None without any time."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """The nearest rank: the shortest time that at least `percent` of all do not exceed.

        It is a time that occurred, to within 0.5%, and not a mean of two neighbours as numpy's
        default gives. None without any time.
        """
        if not self.count:
            return None
        rank = max(1, math.ceil(self.count * percent / 100))
        if rank >= self.count:
            return self.largest
        passed = 0
        for step in sorted(self.counts):
            passed += self.counts[step]
            if passed >= rank:
                break
        middle = math.exp((step + 0.5) * _STEP)
        return min(max(middle, self.least), self.largest)

    def as_json(self) -> dict[str, float | int | None]:
        """Count, mean, percentiles and the largest, in seconds; None where there is no time."""
        return {
            "count": self.count,
            "mean": self.mean,
            **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES},
            "max": self.largest if self.count else None,
        }
