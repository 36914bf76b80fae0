"""Bars from a line at 1: to the right where a value is larger, to the left where it is not."""

from __future__ import annotations

from phases.reporting.elements import Markup, el
from phases.reporting.model import BarPanel, Bars, number
from phases.reporting.scales import Scale, log_ticks
from phases.reporting.svg import drawing, text, tick, width_of

__all__ = ["draw_bars"]

_WIDTH = 284.0
_ROW, _BAR = 19.0, 11.0
_TOP, _BOTTOM = 26.0, 24.0


def draw_bars(name: str, bars: Bars) -> list[Markup]:
    """A drawing for each panel, all on the same axis and with the same rows."""
    labels = list(dict.fromkeys(label for panel in bars.panels for label, _ in panel.bars))
    values = [value for panel in bars.panels for _, value in panel.bars if value > 0]
    left = max((width_of(label, 11) for label in labels), default=0.0) + 8
    low = min([bars.origin / 1.25, *values])
    high = max([bars.origin * 1.25, *values])
    axis = Scale(low, high, left, _WIDTH - 42, log=True)
    return [
        _panel(f"{name}-{at}", bars, panel, labels, axis) for at, panel in enumerate(bars.panels)
    ]


def _panel(name: str, bars: Bars, panel: BarPanel, labels: list[str], axis: Scale) -> Markup:
    values = dict(panel.bars)
    bottom = _TOP + _ROW * len(labels)
    parts = [
        el("text", el("tspan", panel.name, class_="strong"), f"  {panel.note}", x=0, y=13),
        *(
            el("line", x1=axis(at), x2=axis(at), y1=_TOP, y2=bottom, class_="grid")
            for at in log_ticks(axis.low, axis.high, most=5)
        ),
        *(
            text(axis(at), bottom + 15, f"{tick(at)}x", anchor="middle", class_="tick")
            for at in log_ticks(axis.low, axis.high, most=5)
        ),
    ]
    for row, label in enumerate(labels):
        middle = _TOP + _ROW * (row + 0.5)
        parts.append(text(axis.start - 8, middle + 4, label, anchor="end", class_="small"))
        parts += _bar(axis, bars.origin, values.get(label), middle)
    zero = axis(bars.origin)
    parts.append(el("line", x1=zero, x2=zero, y1=_TOP - 4, y2=bottom, class_="rule"))
    told = ", ".join(f"{label}: {number(value)}" for label, value in panel.bars)
    title = f"{bars.title}: {panel.name}"
    return drawing(name, _WIDTH, bottom + _BOTTOM, title, f"{bars.unit}; {told}", *parts)


def _bar(axis: Scale, origin: float, value: float | None, middle: float) -> list[Markup]:
    zero = axis(origin)
    if value is None:
        return [text(zero + 6, middle + 4, "no figure", class_="small none")]
    end = axis(max(value, axis.low))
    bar = el(
        "rect",
        x=min(zero, end),
        y=middle - _BAR / 2,
        width=max(abs(end - zero), 1.0),
        height=_BAR,
        class_="bar more" if value >= origin else "bar less",
    )
    return [bar, text(max(zero, end) + 5, middle + 4, f"{number(value)}x", class_="small value")]
