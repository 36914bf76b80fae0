"""How the figures of `run-length-price` are named, and what they say once they are kept.

A time is named by what was timed, over how many tokens, and how their slots lay:

    verify of 9 nodes, 65536 tokens, contiguous
    verify of 9 nodes, 65536 tokens, runs of 8 within 4000000 slots

A name that goes on behind that, as `...: price`, is of a figure that follows from the times.
`price_series` reads the times back, from a gate's figures or from kept evidence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Protocol

from phases.gate import Unit

__all__ = ["PriceSeries", "Slots", "name", "price_series", "price_series_json", "verify"]


class Named(Protocol):
    """A `Figure`, or the `FigureRecord` that is kept of one."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def unit(self) -> Unit: ...


@dataclasses.dataclass(frozen=True)
class Slots:
    """How the slots of a request lay: in runs of `run_length`, scattered within `within` slots."""

    run_length: int
    within: int

    def __str__(self) -> str:
        return f"runs of {self.run_length} within {self.within} slots"


_NAME = re.compile(
    r"(?P<operation>[^:]+), (?P<tokens>\d+) tokens, "
    r"(?:contiguous|runs of (?P<run_length>\d+) within (?P<within>\d+) slots)"
)


def verify(nodes: int) -> str:
    """What the verify pass of a tree of `nodes` nodes is called; its times are of one layer."""
    return f"verify of {nodes} nodes"


def name(operation: str, tokens: int, slots: Slots | None) -> str:
    """Of a time. slots: None where they are contiguous."""
    return f"{operation}, {tokens} tokens, {slots or 'contiguous'}"


@dataclasses.dataclass(frozen=True)
class PriceSeries:
    """The times of one operation over `tokens` tokens, all in one run on one card.

    within: how many slots the runs were scattered over: the whole pool, or windows of it.
    contiguous_us: microseconds of a call where all tokens lie in one run.
    us: microseconds by run length in slots, rising.
    """

    operation: str
    tokens: int
    within: int
    contiguous_us: float
    us: dict[int, float]

    @property
    def price_us(self) -> dict[int, float]:
        """What a run length costs over contiguous slots, in microseconds; below 0 by noise."""
        return {length: us - self.contiguous_us for length, us in self.us.items()}

    @property
    def price_percent(self) -> dict[int, float]:
        """The same in percent of the contiguous time."""
        return {length: 100 * price / self.contiguous_us for length, price in self.price_us.items()}


def price_series(figures: Iterable[Named]) -> list[PriceSeries]:
    """The series that the figures hold, in their order. What else is among them is passed over.

    Raises ValueError for a time that stands there twice, and for runs without the contiguous time
    that they are held against.
    """
    contiguous: dict[tuple[str, int], float] = {}
    runs: dict[tuple[str, int, int], dict[int, float]] = {}
    for figure in figures:
        found = _NAME.fullmatch(figure.name)
        if found is None or figure.unit is not Unit.MICROSECONDS:
            continue
        operation, tokens = found["operation"], int(found["tokens"])
        if found["run_length"] is None:
            place: dict[Any, float] = contiguous
            key: Any = (operation, tokens)
        else:
            place = runs.setdefault((operation, tokens, int(found["within"])), {})
            key = int(found["run_length"])
        if key in place:
            raise ValueError(f"the time of '{figure.name}' stands there twice")
        place[key] = figure.value
    for operation, tokens, _ in runs:
        if (operation, tokens) not in contiguous:
            raise ValueError(f"there is no time of '{name(operation, tokens, None)}'")
    return [
        PriceSeries(
            operation, tokens, within, contiguous[operation, tokens], dict(sorted(us.items()))
        )
        for (operation, tokens, within), us in runs.items()
    ]


def price_series_json(series: Iterable[PriceSeries]) -> list[dict[str, Any]]:
    """The same as plain JSON, prices beside the times; run lengths are keys, and so strings."""
    return [
        {
            "operation": one.operation,
            "tokens": one.tokens,
            "within_slots": one.within,
            "contiguous_us": one.contiguous_us,
            **{
                field: {str(length): value for length, value in values.items()}
                for field, values in (
                    ("us", one.us),
                    ("price_us", one.price_us),
                    ("price_percent", one.price_percent),
                )
            },
        }
        for one in series
    ]
