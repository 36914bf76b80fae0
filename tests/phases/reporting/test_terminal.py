"""The report in a terminal and piped."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from phases.reporting.model import (
    Cell,
    Entries,
    Entry,
    Headline,
    HeatMap,
    Missing,
    Report,
    Section,
    Source,
    Standing,
    Table,
    Text,
    Tone,
)
from phases.reporting.terminal import show

SOURCE = Source("a.json", Standing.STALE, "NVIDIA H200", "2026-11-29", "c2c21ba6503f")
HEAT = HeatMap(
    "Batch 1", "rank", "layer", "of the mean", ("0", "1"), ("1", "2", "3"),
    ((0.8, 1.0, 1.2), (1.2, 1.0, 0.8)), 0.8, 1.0, 1.2, SOURCE,
)  # fmt: skip
REPORT = Report(
    "2026-11-30 12:00 UTC",
    "f" * 12,
    (Headline("22.4x", "Triton", "service", SOURCE),),
    (
        Section(
            "gates",
            "Phases and gates",
            "What stands where.",
            (
                Table.of("Gates", ("gate", "#us"), [("a", Cell("20.0", Tone.BAD))], source=SOURCE),
                Table.of("Folded", ("gate",), [("hidden",)], folded=True),
                Missing("the price", "no GPU \x1b[2J here"),
                Text(("[bold]not markup[/bold]",)),
                Entries("Decided", (Entry("0017", Cell("deferred"), "n", (("why", "b\nc"),)),)),
                HEAT,
            ),
        ),
    ),
)


def shown(**options: object) -> str:
    out = io.StringIO()
    show(REPORT, Console(file=out, width=60, **options))  # type: ignore[arg-type]
    return out.getvalue()


def test_piped_it_is_plain_aligned_lines_that_are_never_broken() -> None:
    text = shown(force_terminal=False)
    assert "\x1b" not in text
    assert "gate  us\na     20.0\n" in text
    assert "(a.json; NVIDIA H200; 2026-11-29; revision c2c21ba6503f; stale)\n" in text
    assert "Not measured: the price\n  no GPU ?[2J here\n" in text
    assert "[bold]not markup[/bold]" in text
    assert "0017: deferred\n  why: b c\n" in text
    assert "hidden" not in text


def test_a_map_is_shades_with_its_scale() -> None:
    text = shown(force_terminal=False)
    assert "rank 0  ▒█\nrank 1 █▒ \n" in text
    assert "blank is 0.80, full 1.20 of the mean" in text


def test_in_a_terminal_there_are_colours_and_control_characters_are_still_not_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(force_terminal=True, color_system="standard")
    assert "\x1b[31m" in text
    assert "\x1b[2J" not in text


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in shown(force_terminal=True, color_system="standard")
