"""What the host did while the GPU waited for it, by the ranges around its work."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from kdtree_engine.profiling.timeline import Span

__all__ = ["ELSEWHERE", "HostWork"]

ELSEWHERE = "in no range"


class HostWork:
    """The ranges of a timeline that have a label, in order of time.

    One thread is taken to have them all, as SGLang's scheduler has: of ranges of several threads
    that overlap, the one that began last is taken.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(
            (span for span in spans if span.label is not None),
            key=lambda span: (span.begin, -span.end),
        )
        self._begins = [span.begin for span in self._spans]
        self._around = _around(self._spans)

    def during(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """(label, us) of each piece of that time, by the innermost range; the pieces add up."""
        while begin < end:
            following = bisect.bisect_right(self._begins, begin)
            number = following - 1
            while number >= 0 and self._spans[number].end <= begin:
                number = self._around[number]
            until = self._begins[following] if following < len(self._begins) else end
            label = ELSEWHERE
            if number >= 0:
                label = self._spans[number].label or ELSEWHERE
                until = min(until, self._spans[number].end)
            until = min(until, end)
            yield label, until - begin
            begin = until


def _around(spans: Sequence[Span]) -> list[int]:
    """For each range the number of the last one before it that ends behind its beginning, or -1."""
    found: list[int] = []
    above: list[int] = []
    for number, span in enumerate(spans):
        while above and spans[above[-1]].end <= span.begin:
            above.pop()
        found.append(above[-1] if above else -1)
        above.append(number)
    return found
