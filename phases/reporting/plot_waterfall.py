"""From one step to another, a class at a time: each bar begins where the one above it ended."""

from __future__ import annotations

from phases.reporting.elements import Markup, el
from phases.reporting.model import Waterfall, number
from phases.reporting.scales import Scale, linear_ticks
from phases.reporting.svg import WIDTH, drawing, text, width_of, x_axis

__all__ = ["draw_waterfall"]

_ROW, _BAR = 24.0, 14.0
_TOP, _BOTTOM = 8.0, 46.0
_LEAST = 0.004
"""Of a step: a bar of two pixels."""


def draw_waterfall(name: str, fall: Waterfall, width: float = WIDTH) -> Markup:
    rows = _rows(fall)
    left = max(width_of(label) for label, *_ in rows) + 10
    most = max(max(begin, end) for _, begin, end, _ in rows)
    least = min(0.0, *(min(begin, end) for _, begin, end, _ in rows))
    across = Scale(least, most, left, width - 64)
    bottom = _TOP + _ROW * len(rows)
    ticks = linear_ticks(least, most, 8 if width == WIDTH else 4)
    parts = x_axis(across, ticks, _TOP, bottom, "us a step")
    for at, (label, begin, end, kind) in enumerate(rows):
        middle = _TOP + _ROW * (at + 0.5)
        parts += _row(across, label, begin, end, kind, middle)
        if at + 1 < len(rows):  # a thread to the next bar
            x, y = across(end), middle + _BAR / 2
            parts.append(el("line", x1=x, x2=x, y1=y, y2=y + _ROW - _BAR, class_="leader"))
    told = "; ".join(f"{label}: {_value(begin, end, kind)}" for label, begin, end, kind in rows)
    return drawing(name, width, bottom + _BOTTOM, fall.title, told, *parts)


def _rows(fall: Waterfall) -> list[tuple[str, float, float, str]]:
    """(label, begin, end, kind) of each bar. kind: whole, part, less or more."""
    rows: list[tuple[str, float, float, str]] = []
    at = 0.0
    if fall.before is not None:
        at = fall.before
        rows.append(("step before", 0.0, at, "whole"))
    for label, change in _merged(fall):
        kind = "part" if fall.before is None else "less" if change < 0 else "more"
        rows.append((label, at, at + change, kind))
        at += change
    rows.append(("step" if fall.before is None else "step after", 0.0, fall.after, "whole"))
    return rows


def _merged(fall: Waterfall) -> list[tuple[str, float]]:
    """The changes, those too small to be seen as one, without what has not changed."""
    least = _LEAST * max(fall.after, fall.before or 0.0)
    small = [change for _, change in fall.changes if least / 1e6 < abs(change) < least]
    shown = [(label, change) for label, change in fall.changes if abs(change) >= least]
    name = "1 other" if len(small) == 1 else f"{len(small)} others"
    return [*shown, (name, sum(small))] if small else shown


def _row(
    across: Scale, label: str, begin: float, end: float, kind: str, middle: float
) -> list[Markup]:
    low, high = sorted((across(begin), across(end)))
    # A class that grew is worse, so it has the colour of what is slower.
    class_ = {"less": "bar more", "more": "bar less", "whole": "bar whole"}.get(kind, "bar more")
    return [
        text(across.start - 8, middle + 4, label, anchor="end"),
        el(
            "rect",
            x=low,
            y=middle - _BAR / 2,
            width=max(high - low, 1.0),
            height=_BAR,
            class_=class_,
        ),
        text(high + 6, middle + 4, _value(begin, end, kind), class_="small value halo"),
    ]


def _value(begin: float, end: float, kind: str) -> str:
    if kind in ("whole", "part"):
        return number(end - begin)
    return f"{end - begin:+,.1f}"
