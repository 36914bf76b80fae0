"""Series over one axis, named at their right ends; the value's axis is logarithmic."""

from __future__ import annotations

from phases.reporting.elements import Markup, el
from phases.reporting.model import Lines, number
from phases.reporting.scales import Scale, linear_ticks, log_ticks, spaced
from phases.reporting.svg import (
    LEGEND_ROW,
    WIDTH,
    drawing,
    legend,
    mark,
    text,
    width_of,
    x_axis,
    y_axis,
)

__all__ = ["draw_lines"]

_HEIGHT = 310.0
_LEFT, _TOP, _BOTTOM = 52.0, 30.0, 46.0
_LINE = 16.0


def draw_lines(name: str, lines: Lines, width: float = WIDTH) -> Markup:
    """A narrow one has its names below, as there is no room beside it."""
    names = [line.name for line in lines.lines]
    beside = width == WIDTH
    right = width - (max(map(width_of, names), default=0.0) + 22 if beside else 10)
    across, up = _scales(lines, right)
    places = sorted({x for line in lines.lines for x, _ in line.points})
    ticks = places if lines.log_x else linear_ticks(across.low, across.high, 8 if beside else 5)
    parts = [
        *x_axis(across, ticks, _TOP, _HEIGHT - _BOTTOM, lines.x),
        *y_axis(up, log_ticks(up.low, up.high), _LEFT, right),
        text(0, 14, lines.y, class_="axis"),
    ]
    for at, line in enumerate(lines.lines):
        points = [(across(x), up(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(el("polyline", points=path, class_=f"line m{at % 5 + 1}"))
        parts += [mark(x, y, at) for x, y in points]
    height = _HEIGHT
    if beside:
        parts += _names(lines, across, up, right)
    else:
        parts += legend(names, _LEFT + 4, _HEIGHT + 6)
        height += LEGEND_ROW * len(names)
    told = "; ".join(
        f"{line.name}: {number(line.points[0][1])} at first, {number(line.points[-1][1])} at last"
        for line in lines.lines
    )
    return drawing(name, width, height, f"{lines.title}, {lines.y}", told, *parts)


def _names(lines: Lines, across: Scale, up: Scale, right: float) -> list[Markup]:
    """Each at the end of its line, moved apart where lines end near each other."""
    ends = [up(line.points[-1][1]) for line in lines.lines]
    labels = spaced(ends, _LINE, _TOP, _HEIGHT - _BOTTOM)
    parts = []
    for line, end, label in zip(lines.lines, ends, labels, strict=True):
        x = across(line.points[-1][0]) + 5
        parts.append(el("line", x1=x, y1=end, x2=right + 10, y2=label, class_="leader"))
        parts.append(text(right + 14, label + 4, line.name))
    return parts


def _scales(lines: Lines, right: float) -> tuple[Scale, Scale]:
    places = [x for line in lines.lines for x, _ in line.points]
    values = [y for line in lines.lines for _, y in line.points]
    low, high = min(places), max(places)
    if low == high:  # one place: an axis needs some width
        low, high = low / 2, high * 2
    if not lines.log_x:
        low = 0.0
    margin = 14.0 if lines.log_x else 0.0
    return (
        Scale(low, high, _LEFT + margin, right - margin, log=lines.log_x),
        Scale(min(values) / 1.5, max(values) * 1.5, _HEIGHT - _BOTTOM, _TOP, log=True),
    )
