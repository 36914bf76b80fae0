"""The plots of a load test, as text."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from phases.load_client import MEASURED, RAMP, Tick
from phases.load_plot import LineScreen, LiveScreen, braille, curve, panel, screen_for
from phases.load_point import Point


def a_tick(tokens: int, *, stage: str = MEASURED, seconds: float = 0.5) -> Tick:
    found = Tick(3.0, stage, seconds, tokens=tokens, chunks=1, in_flight=4)
    if tokens:
        found.inter_token.add(0.01, tokens)
        found.chunk_gap.add(0.01 * tokens)
    return found


def a_point(concurrency: int, tokens: int, *, server: str = "live") -> Point:
    point = Point(server, 64, concurrency, 0.0, 32)
    point.add(a_tick(tokens))
    return point


def test_a_cell_has_two_columns_of_four_dots() -> None:
    assert braille([1, 2, 3, 4], width=2, height=1, top=4) == ["⣠⣾"]
    assert braille([4, 0], width=5, height=1, top=4) == ["⡇"]
    assert braille([8, 4, 1], width=5, height=2, top=8) == ["⡇⠀", "⣿⡀"]


def test_nothing_and_next_to_nothing_look_different() -> None:
    assert braille([0, 0.001, None, 100], width=2, height=1, top=100) == ["⢀⢸"]
    assert braille([0, 0], width=1, height=1, top=0) == ["⠀"]
    assert braille([], width=4, height=2, top=1) == ["", ""]


def test_the_last_values_are_shown() -> None:
    assert braille([4] * 50 + [0, 0], width=2, height=1, top=4) == ["⣿⠀"]


def test_the_curve_is_in_proportion() -> None:
    one, four = a_point(1, 10), a_point(4, 40)
    four.errors["closed"] = 2
    four.why = "interrupted"
    lines = curve([one, four], width=90)
    assert [line.count("█") for line in lines] == [7, 28]
    assert lines[0].endswith("20.0 tok/s, gap p99 100 ms")
    assert lines[1].endswith("80.0 tok/s, gap p99 400 ms, 2 errors, ended early: interrupted")


def test_a_panel_shows_rates_gaps_and_the_sweep_and_fits() -> None:
    point = a_point(4, 40)
    ticks = [a_tick(one) for one in (10, 20, 0, 40)]
    lines = panel(
        "live: begins", point, ticks, [a_point(1, 10), a_point(8, 9, server="x")], width=70
    )
    assert lines[0] == "live: begins"
    assert lines[1] == "measured, 3 s, 4 in flight, 0 answers, 0 errors"
    assert lines[2].startswith("tok/s 80.0 ")
    assert "highest 80.0" in lines[3]
    assert lines[4].startswith("itl p50 10 ms")
    assert lines[6].startswith("itl p99 10 ms")
    assert lines[-2] == "live, 64 tokens, by load:"
    assert lines[-1].startswith("     c=1 █")
    assert all(len(line) <= 70 for line in lines)
    assert panel("starts", None, [], [], width=70) == ["starts"]


def test_off_a_terminal_there_are_lines() -> None:
    said: list[str] = []
    seconds = iter([0.0, 0.0, 2.0, 6.0, 6.0, 7.0])
    with LineScreen(said.append, clock=lambda: next(seconds)) as screen:
        screen.note("live: starts")
        point = a_point(4, 40)
        screen.tick(point, a_tick(40))
        screen.tick(point, a_tick(20))
        screen.ended(point)
    assert said == [
        "live: starts",
        "live L=64 c=4: measured, 3 s, 40.0 tok/s, itl p50 10 ms p99 10 ms, 4 in flight, 0 answers,"
        " 0 errors",
        "live L=64 c=4: 80.0 tok/s, gap p99 400 ms",
    ]


def drawn_on(**options: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=30, **options)  # type: ignore[arg-type]
    screen = screen_for(console, print)
    assert isinstance(screen, LiveScreen)
    with screen:
        screen.note("live: starts")
        point = a_point(4, 40)
        screen.tick(point, a_tick(40, stage=RAMP))
        screen.tick(point, a_tick(40))
        screen.tick(point, a_tick(0, seconds=0.01))
        screen.ended(point)
    return file.getvalue()


def test_on_a_terminal_it_is_plotted_in_colours_unless_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = drawn_on()
    assert re.search(r"\x1b\[36m.*⣿", coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = drawn_on()
    assert "⣿" in plain
    assert "\x1b[36m" not in plain


def test_a_pipe_and_a_dumb_terminal_get_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(screen_for(Console(file=io.StringIO()), print), LineScreen)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(screen_for(dumb, print), LineScreen)
