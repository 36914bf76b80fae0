"""What a load test looks like while it runs: plots in the terminal, or plain lines.

The plots are text, made by functions of numbers alone. A cell of braille has two columns of four
dots; a value is drawn as a column of dots from the ground up, so that a stall is a gap.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from phases.load_client import MEASURED, Tick
from phases.load_point import Point

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LineScreen", "LiveScreen", "braille", "curve", "panel", "screen_for"]

_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Of a braille cell's left and right column, from the ground up."""
_LABEL = 26
_SHOWN = 400
_LINE_S = 5.0
_BARS = 8


def braille(values: Sequence[float | None], *, width: int, height: int, top: float) -> list[str]:
    """`height` lines of `width` cells, each two values wide; of more values the last ones.

    top: the value that fills the height. Above zero at least one dot is drawn; None and 0: none.
    """
    shown = list(values)[-2 * width :]
    dots = 4 * height
    filled = [
        0 if not value or top <= 0 else max(1, min(dots, round(dots * value / top)))
        for value in shown
    ]
    filled += [0] * (-len(filled) % 2)
    lines = []
    for line in reversed(range(height)):
        cells = []
        for left in range(0, len(filled), 2):
            code = 0x2800
            for column in (0, 1):
                here = max(0, min(4, filled[left + column] - 4 * line))
                code += sum(_DOTS[column][:here])
            cells.append(chr(code))
        lines.append("".join(cells))
    return lines


def curve(points: Sequence[Point], *, width: int) -> list[str]:
    """A bar for each point of a server and length: tok/s, and the gaps' p99, by load."""
    most = max((point.tokens_per_second for point in points), default=0.0)
    lines = []
    for point in points:
        share = point.tokens_per_second / most if most else 0.0
        bar = "█" * round(share * max(1, width - _LABEL - 36))
        lines.append(f"{point.load:>8} {bar} {_summary(point)}")
    return lines


def _summary(point: Point) -> str:
    gap = point.chunk_gap.percentile(99)
    parts = [f"{point.tokens_per_second:.1f} tok/s"]
    parts += [f"gap p99 {_ms(gap)}"] if gap is not None else []
    parts += [f"{point.failed} errors"] if point.failed else []
    parts += [f"ended early: {point.why}"] if point.why else []
    return ", ".join(parts)


def panel(
    note: str, point: Point | None, ticks: Sequence[Tick], points: Sequence[Point], *, width: int
) -> list[str]:
    """All that is shown at one moment, in lines of at most `width` characters."""
    lines = [note]
    if point is not None and ticks:
        cells = max(10, width - _LABEL)
        rates = [tick.tokens / tick.seconds if tick.seconds else 0.0 for tick in ticks]
        now = ticks[-1]
        lines.append(
            f"{now.stage}, {now.at:.0f} s, {now.in_flight} in flight, {point.answers} answers, "
            f"{point.failed} errors"
        )
        lines += _plot("tok/s", rates, cells, f"{rates[-1]:.1f}", f"{max(rates):.1f}")
        for percent in (50, 99):
            gaps = [tick.inter_token.percentile(percent) for tick in ticks]
            last = next((gap for gap in reversed(gaps) if gap is not None), None)
            most = max((gap for gap in gaps if gap is not None), default=0.0)
            lines += _plot(f"itl p{percent}", gaps, cells, _ms(last), _ms(most))
    same = [
        one
        for one in points
        if point is None or (one.server, one.length) == (point.server, point.length)
    ]
    if same:
        lines += [f"{same[-1].server}, {same[-1].length or 'file'} tokens, by load:"]
        lines += curve(same[-_BARS:], width=width)
    return [line[:width] for line in lines]


def _plot(name: str, values: Sequence[float | None], cells: int, last: str, most: str) -> list[str]:
    top = max((value for value in values if value is not None), default=0.0)
    plot = braille(values, width=cells, height=2, top=top)
    labels = (f"{name} {last}", f"  highest {most}")
    return [f"{label:<{_LABEL}}{line}" for label, line in zip(labels, plot, strict=True)]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


class LineScreen:
    """Off a terminal: a line at each step and every few seconds. say: one line."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._said = clock()

    def __enter__(self) -> LineScreen:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, text: str) -> None:
        self._say(text)
        self._said = self._clock()

    def tick(self, point: Point, tick: Tick) -> None:
        if self._clock() - self._said < _LINE_S:
            return
        self._said = self._clock()
        p50, p99 = (tick.inter_token.percentile(percent) for percent in (50, 99))
        rate = tick.tokens / tick.seconds if tick.seconds else 0.0
        self._say(
            f"{point.where}: {tick.stage}, {tick.at:.0f} s, {rate:.1f} tok/s, itl p50 {_ms(p50)} "
            f"p99 {_ms(p99)}, {tick.in_flight} in flight, {point.answers} answers, "
            f"{point.failed} errors"
        )

    def ended(self, point: Point) -> None:
        self._say(f"{point.where}: {_summary(point)}")


class LiveScreen:
    """On a terminal: plots that are drawn anew, and gone when it ends."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._note = ""
        self._point: Point | None = None
        self._ticks: collections.deque[Tick] = collections.deque(maxlen=_SHOWN)
        self._points: list[Point] = []

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._note = text
        self._draw()

    def tick(self, point: Point, tick: Tick) -> None:
        if point is not self._point:
            self._point = point
            self._ticks.clear()
        # What is not measured is drawn too, but a tick that a change of stage cut short is not.
        if tick.seconds > 0.1:
            self._ticks.append(tick)
        self._draw()

    def ended(self, point: Point) -> None:
        self._points.append(point)
        self._draw()

    def _draw(self) -> None:
        from rich.text import Text

        lines = panel(
            self._note, self._point, list(self._ticks), self._points, width=self._console.width
        )
        text = Text(overflow="crop", no_wrap=True)
        for number, line in enumerate(lines):
            text.append(("\n" if number else "") + line, style=_style(line, self._ticks))
        self._live.update(text, refresh=True)


def _style(line: str, ticks: Sequence[Any]) -> str:
    if " errors" in line and " 0 errors" not in line:
        return "red"
    measured = bool(ticks) and ticks[-1].stage == MEASURED
    return "cyan" if measured and any(0x2800 <= ord(one) < 0x2900 for one in line) else ""


def screen_for(console: Console, say: Callable[[str], None]) -> LineScreen | LiveScreen:
    """Plots on a terminal, lines elsewhere. say: one plain line, to stderr."""
    plots = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console) if plots else LineScreen(say)
