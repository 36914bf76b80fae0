"""The roofline: achieved flops by arithmetic intensity, both logarithmic, under the ceilings."""

from __future__ import annotations

import math

from phases.reporting.elements import Markup, el
from phases.reporting.model import Roofline, RooflinePoint, number
from phases.reporting.scales import Scale, log_ticks, spaced
from phases.reporting.svg import LEGEND_ROW, WIDTH, drawing, legend, mark, text, x_axis, y_axis

__all__ = ["draw_roofline"]

_HEIGHT = 430.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 30.0, 46.0
_LINE = 14.0
_COLUMN = 40.0
"""Marks that are nearer to each other than this have their labels in one column."""


def draw_roofline(name: str, roof: Roofline, width: float = WIDTH) -> Markup:
    """A narrow one names the points of the first series alone."""
    across, up = _scales(roof, width)
    series = list(dict.fromkeys(point.series for point in roof.points))
    parts = [
        *x_axis(
            across,
            log_ticks(across.low, across.high, most=8 if width == WIDTH else 5),
            _TOP,
            _HEIGHT - _BOTTOM,
            "arithmetic intensity, flop a byte",
        ),
        *y_axis(up, log_ticks(up.low, up.high), _LEFT, width - _RIGHT),
        text(0, 14, "TFLOP/s", class_="axis"),
        *_roof(roof, across, up),
        *_points(roof, series, across, up, width == WIDTH),
    ]
    height = _HEIGHT
    if width == WIDTH:  # there is room under the roof
        x, y = width - _RIGHT - 110, _HEIGHT - _BOTTOM - LEGEND_ROW * len(series)
        parts.append(text(x - 6, y - 14, "varied in the sweep", class_="small"))
        parts += legend(series, x, y)
    else:
        parts += legend([f"{one} varied" for one in series], _LEFT + 4, _HEIGHT + 6)
        height += LEGEND_ROW * len(series)
    told = (
        f"{len(roof.points)} regimes under a roof of {number(roof.bandwidth)} TB/s and "
        f"{number(roof.peak)} TFLOP/s; the nearest to it reaches {_best(roof):.0%}"
    )
    return drawing(name, width, height, roof.title, told, *parts)


def _best(roof: Roofline) -> float:
    return max(point.achieved / roof.ceiling(point.intensity) for point in roof.points)


def _scales(roof: Roofline, width: float) -> tuple[Scale, Scale]:
    ridge = roof.peak / roof.bandwidth
    intensities = [*(point.intensity for point in roof.points), ridge]
    achieved = [*(point.achieved for point in roof.points), roof.peak]
    return (
        Scale(min(intensities) / 1.6, max(intensities) * 1.9, _LEFT, width - _RIGHT, log=True),
        Scale(min(achieved) / 1.6, max(achieved) * 1.6, _HEIGHT - _BOTTOM, _TOP, log=True),
    )


def _roof(roof: Roofline, across: Scale, up: Scale) -> list[Markup]:
    """The slope of the bandwidth up to the ridge, then the flat of the product."""
    ridge = roof.peak / roof.bandwidth
    first = max(across.low, up.low / roof.bandwidth)
    corners = [(first, roof.bandwidth * first), (ridge, roof.peak), (across.high, roof.peak)]
    places = [(across(x), up(y)) for x, y in corners]
    path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in places)
    (x1, y1), (x2, y2), _ = places
    turn = math.degrees(math.atan2(y2 - y1, x2 - x1))
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return [
        el("path", d=path, class_="roof"),
        el(
            "text",
            f"copy {number(roof.bandwidth)} TB/s",
            x=x,
            y=y - 8,
            text_anchor="middle",
            transform=f"rotate({turn:.1f} {x:.1f} {y:.1f})",
            class_="axis",
        ),
        text(
            across.end,
            places[2][1] - 8,
            f"matrix product {number(roof.peak)} TFLOP/s",
            anchor="end",
            class_="axis",
        ),
    ]


def _points(
    roof: Roofline, series: list[str], across: Scale, up: Scale, all_named: bool
) -> list[Markup]:
    """Marks, with their labels at the right: those of one column are moved apart."""
    named = [one for one in roof.points if all_named or one.series == series[0]]
    columns: list[list[RooflinePoint]] = []
    for one in sorted(named, key=lambda point: point.intensity):
        if columns and across(one.intensity) - across(columns[-1][0].intensity) < _COLUMN:
            columns[-1].append(one)
        else:
            columns.append([one])
    return [
        *(part for column in columns for part in _labels(column, across, up)),
        *(
            mark(across(one.intensity), up(one.achieved), series.index(one.series))
            for one in roof.points
        ),
    ]


def _labels(column: list[RooflinePoint], across: Scale, up: Scale) -> list[Markup]:
    places = spaced([up(one.achieved) for one in column], _LINE, up.end, up.start)
    edge = max(across(one.intensity) for one in column) + 14
    parts = []
    for one, place in zip(column, places, strict=True):
        x, y = across(one.intensity), up(one.achieved)
        parts.append(el("line", x1=x, y1=y, x2=edge, y2=place, class_="leader"))
        parts.append(text(edge + 3, place + 4, one.short, class_="small halo"))
    return parts
