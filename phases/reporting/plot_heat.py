"""A map of values around a middle: the further off, the stronger the colour.

What is above and below has a colour each, and the largest of each column a dot, so that the map can
be read without telling the colours apart.
"""

from __future__ import annotations

from phases.reporting.elements import Markup, el
from phases.reporting.model import HeatMap
from phases.reporting.svg import WIDTH, drawing, text

__all__ = ["draw_heat"]

_ROW = 18.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 8.0, 6.0, 100.0
_STEPS = 11
_EVERY = 10


def draw_heat(name: str, heat: HeatMap, width: float = WIDTH) -> Markup:
    cell = (width - _LEFT - _RIGHT) / len(heat.column_names)
    bottom = _TOP + _ROW * len(heat.row_names)
    largest = [max(column) for column in zip(*heat.values, strict=True)]
    parts: list[Markup] = []
    for row, (label, values) in enumerate(zip(heat.row_names, heat.values, strict=True)):
        y = _TOP + _ROW * row
        told = f"{heat.rows} {label}"
        parts.append(text(_LEFT - 8, y + _ROW / 2 + 4, told, anchor="end", class_="small"))
        for column, value in enumerate(values):
            x = _LEFT + cell * column
            parts.append(_cell(heat, x, y, cell, value))
            if value == largest[column]:
                parts.append(_dot(x + cell / 2, y + _ROW / 2, cell))
    for column, label in enumerate(heat.column_names):
        if (column + 1) % _EVERY == 0 or column == 0:
            x = _LEFT + cell * (column + 0.5)
            parts.append(text(x, bottom + 16, label, anchor="middle", class_="tick"))
    parts.append(text(_LEFT - 8, bottom + 16, heat.columns, anchor="end", class_="axis"))
    parts += _scale(heat, bottom + 34)
    every = [value for row in heat.values for value in row]
    told = f"from {min(every):.2f} to {max(every):.2f}, {heat.unit}; dots: {_DOTS.format(heat)}"
    return drawing(name, width, bottom + _BOTTOM, heat.title, told, *parts)


_DOTS = "the largest of each {0.columns}"


def _dot(x: float, y: float, width: float) -> Markup:
    return el("circle", cx=x, cy=y, r=min(2.0, width / 3), class_="dot")


def _cell(heat: HeatMap, x: float, y: float, width: float, value: float) -> Markup:
    end = heat.high if value >= heat.middle else heat.low
    span = abs(end - heat.middle)
    strength = min(abs(value - heat.middle) / span, 1.0) if span else 0.0
    return el(
        "rect",
        x=x,
        y=y,
        width=width * 0.9,
        height=_ROW - 1,
        fill_opacity=strength,
        class_="heat high" if value >= heat.middle else "heat low",
    )


def _scale(heat: HeatMap, y: float) -> list[Markup]:
    """The colours from low to high, their ends and middle in figures, and what the dot means."""
    width = 20.0
    values = [heat.low + (heat.high - heat.low) * at / (_STEPS - 1) for at in range(_STEPS)]
    parts = [_cell(heat, _LEFT + width * at, y, width, value) for at, value in enumerate(values)]
    for at in (0, _STEPS // 2, _STEPS - 1):
        x = _LEFT + width * (at + 0.5)
        parts.append(text(x, y + _ROW + 13, f"{values[at]:.2f}", anchor="middle", class_="tick"))
    below = y + _ROW + 30
    parts.append(_dot(_LEFT + 4, below, width))
    parts.append(text(_LEFT + 14, below + 4, _DOTS.format(heat), class_="small"))
    return parts
