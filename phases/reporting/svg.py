"""What plots share: the frame with its title for those who do not see it, axes, marks, labels.

Colours are classes of the page's style, so that a drawing follows light and dark. Sizes are in CSS
pixels; a drawing is never scaled up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from phases.reporting.elements import Markup, el
from phases.reporting.scales import Scale

__all__ = [
    "FONT",
    "LEGEND_ROW",
    "NARROW",
    "WIDTH",
    "drawing",
    "legend",
    "mark",
    "text",
    "tick",
    "width_of",
    "x_axis",
    "y_axis",
]

WIDTH, NARROW = 680.0, 328.0
"""Of a drawing on a page, and of the one that takes its place in a window of 360 pixels."""
FONT = 12.0
_LETTER = 0.66
"""Width of a letter over the font's size, of a wide system font."""
_MARK = 4.5
LEGEND_ROW = 18.0

SHAPES = ("circle", "square", "triangle", "diamond", "cross")


def drawing(
    name: str, width: float, height: float, title: str, told: str, *parts: Markup
) -> Markup:
    """One plot. name: unique on the page. told: what it shows, for a screen reader."""
    return el(
        "svg",
        el("title", title, id=f"{name}-title"),
        el("desc", told, id=f"{name}-desc"),
        *parts,
        role="img",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        xmlns="http://www.w3.org/2000/svg",
    )


def text(
    x: float, y: float, told: str, *, anchor: str | None = None, class_: str | None = None
) -> Markup:
    return el("text", told, x=x, y=y, text_anchor=anchor, class_=class_)


def width_of(told: str, size: float = FONT) -> float:
    """About how wide it is when drawn."""
    return len(told) * size * _LETTER


def tick(value: float) -> str:
    """`0.5`, `1`, `1,500`, `2k`, `64k`: decimal, but for multiples of 1,024 tokens."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    if value >= 1000 and value % 1 == 0:
        return f"{value:,.0f}"
    return f"{value:g}"


def x_axis(
    scale: Scale, ticks: Iterable[float], top: float, bottom: float, name: str
) -> list[Markup]:
    """Grid lines from top to bottom with their values below, and the axis's name."""
    parts = []
    for value in ticks:
        x = scale(value)
        parts.append(el("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        parts.append(text(x, bottom + 16, tick(value), anchor="middle", class_="tick"))
    middle = (scale.start + scale.end) / 2
    parts.append(text(middle, bottom + 34, name, anchor="middle", class_="axis"))
    return parts


def y_axis(scale: Scale, ticks: Iterable[float], left: float, right: float) -> list[Markup]:
    """Grid lines from left to right with their values at the left."""
    parts = []
    for value in ticks:
        y = scale(value)
        parts.append(el("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(text(left - 6, y + 4, tick(value), anchor="end", class_="tick"))
    return parts


def mark(x: float, y: float, series: int) -> Markup:
    """A point of a series: a shape of its own, beside the colour."""
    shape, class_ = SHAPES[series % len(SHAPES)], f"mark m{series % len(SHAPES) + 1}"
    if shape == "circle":
        return el("circle", cx=x, cy=y, r=_MARK, class_=class_)
    if shape == "square":
        side = 1.8 * _MARK
        return el("rect", x=x - side / 2, y=y - side / 2, width=side, height=side, class_=class_)
    if shape == "cross":
        arm, half = _MARK * 1.15, _MARK * 0.4
        ends = [(-half, -arm), (half, -arm), (half, -half), (arm, -half), (arm, half), (half, half)]
        ends += [(half, arm), (-half, arm), (-half, half), (-arm, half), (-arm, -half)]
        return _polygon(x, y, [*ends, (-half, -half)], class_)
    corners = 3 if shape == "triangle" else 4
    radius = _MARK * 1.25
    turns = [2 * math.pi * at / corners - math.pi / 2 for at in range(corners)]
    return _polygon(x, y, [(radius * math.cos(t), radius * math.sin(t)) for t in turns], class_)


def _polygon(x: float, y: float, corners: Sequence[tuple[float, float]], class_: str) -> Markup:
    points = " ".join(f"{x + dx:.2f},{y + dy:.2f}" for dx, dy in corners)
    return el("polygon", points=points, class_=class_)


def legend(names: Sequence[str], x: float, y: float) -> list[Markup]:
    """Names below each other with the marks of their series; (x, y) is left of the first."""
    parts = []
    for at, name in enumerate(names):
        parts.append(mark(x, y + LEGEND_ROW * at, at))
        parts.append(text(x + 12, y + LEGEND_ROW * at + 4, name, class_="small"))
    return parts
