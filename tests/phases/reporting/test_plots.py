"""Drawings are whole XML, name what they show, and keep within their size."""

from __future__ import annotations

import re
import xml.etree.ElementTree as Xml

import pytest

from phases.reporting.elements import Markup
from phases.reporting.model import (
    BarPanel,
    Bars,
    HeatMap,
    Line,
    Lines,
    Roofline,
    RooflinePoint,
    Source,
    Standing,
    Waterfall,
)
from phases.reporting.plot_bars import draw_bars
from phases.reporting.plot_heat import draw_heat
from phases.reporting.plot_lines import draw_lines
from phases.reporting.plot_roofline import draw_roofline
from phases.reporting.plot_waterfall import draw_waterfall
from phases.reporting.svg import NARROW, WIDTH, tick

SOURCE = Source("a.json", Standing.CURRENT)
HOSTILE = '<script>alert("x")</script>'
SVG = "{http://www.w3.org/2000/svg}"

BARS = Bars(
    "Times as fast",
    "times as fast",
    "regime",
    (
        BarPanel("triton", (("L=4k", 45.0), ("T=65", 467.0))),
        BarPanel(HOSTILE, (("L=4k", 0.8),), "does a chain"),
    ),
    SOURCE,
)
ROOF = Roofline(
    "Roof",
    4.0,
    800.0,
    (
        RooflinePoint("prefix", "L=4k", "B=1 H=8 T=9 L=4k", 136.0, 38.0, 17.0),
        RooflinePoint("prefix", "L=200k", "B=1 H=8 T=9 L=200k", 136.0, 400.0, 81.0),
        RooflinePoint("batch", "B=16", "B=16 H=8 T=9 L=16k", 136.0, 390.0, 109.0),
    ),
    SOURCE,
)
LINES = Lines(
    "Speed",
    "prompt tokens",
    "tokens a second",
    (
        Line("kernel", ((1024, 3783.0), (65536, 3573.0))),
        Line("Triton", ((1024, 1100.0), (65536, 160.0))),
    ),
    SOURCE,
)
FALL = Waterfall(
    "Step", 200.0, (("communication", -10.0), ("GEMM", 0.1), ("idle", 30.0)), 220.1, SOURCE
)
HEAT = HeatMap(
    "Batch 1", "rank", "layer", "of the mean", ("0", "1"), ("1", "2"),
    ((0.8, 1.0), (1.2, 1.0)), 0.8, 1.0, 1.2, SOURCE,
)  # fmt: skip


def parsed(drawn: Markup) -> Xml.Element:
    return Xml.fromstring(drawn)


def words(drawn: Markup) -> list[str]:
    return ["".join(one.itertext()) for one in parsed(drawn).iter(f"{SVG}text")]


@pytest.mark.parametrize("width", [WIDTH, NARROW])
@pytest.mark.parametrize(
    ("draw", "plot"),
    [
        (draw_roofline, ROOF),
        (draw_lines, LINES),
        (draw_waterfall, FALL),
        (draw_heat, HEAT),
    ],
)
def test_a_drawing_has_a_title_a_description_and_its_size(draw, plot, width: float) -> None:  # type: ignore[no-untyped-def]
    svg = parsed(draw("name", plot, width))
    assert svg.get("role") == "img"
    title, told = svg.find(f"{SVG}title"), svg.find(f"{SVG}desc")
    assert title is not None
    assert told is not None
    assert plot.title in (title.text or "")
    assert svg.get("aria-labelledby") == title.get("id") == "name-title"
    assert svg.get("aria-describedby") == told.get("id")
    assert re.search(r"\d", told.text or "")
    assert svg.get("width") == f"{width:g}"
    for mark in svg.iter(f"{SVG}rect"):
        assert float(mark.get("x", "0")) >= 0
        assert float(mark.get("x", "0")) + float(mark.get("width", "0")) <= width
        assert 0 <= float(mark.get("y", "0")) <= float(svg.get("height", "0"))


def test_bars_go_right_from_1_where_faster_and_left_where_slower() -> None:
    triton, other = map(parsed, draw_bars("bars", BARS))
    fast = list(triton.iter(f"{SVG}rect"))
    (slow,) = other.iter(f"{SVG}rect")
    assert {one.get("class") for one in fast} == {"bar more"}
    assert slow.get("class") == "bar less"
    assert float(slow.get("x", "0")) < float(fast[0].get("x", "0"))
    assert float(fast[1].get("width", "0")) > float(fast[0].get("width", "0"))


def test_text_of_evidence_is_escaped_and_a_bar_that_lacks_says_so() -> None:
    drawn = draw_bars("bars", BARS)[1]
    assert "<script" not in drawn
    assert HOSTILE + "  does a chain" in words(drawn)
    assert "no figure" in words(drawn)


def test_labels_of_a_column_do_not_lie_on_each_other() -> None:
    places = {
        "".join(one.itertext()): float(one.get("y", "0"))
        for one in parsed(draw_roofline("roof", ROOF)).iter(f"{SVG}text")
    }
    assert abs(places["L=200k"] - places["B=16"]) >= 12


def test_a_waterfall_ends_where_the_step_after_does_and_gathers_what_is_small() -> None:
    svg = parsed(draw_waterfall("fall", FALL))
    bars = list(svg.iter(f"{SVG}rect"))
    ends = [float(one.get("x", "0")) + float(one.get("width", "0")) for one in bars]
    assert ends[-1] == pytest.approx(max(ends), abs=1.0)  # a bar has a pixel at least
    assert [one.get("class") for one in bars] == [
        *("bar whole", "bar more", "bar less", "bar less", "bar whole"),
    ]
    assert "1 other" in words(draw_waterfall("fall", FALL))


def test_a_map_marks_the_largest_of_each_column_with_a_dot() -> None:
    svg = parsed(draw_heat("heat", HEAT))
    cells = list(svg.iter(f"{SVG}rect"))[:4]
    assert [one.get("class") for one in cells] == [
        *("heat low", "heat high", "heat high", "heat high"),
    ]
    assert [one.get("fill-opacity") for one in cells] == ["1", "0", "1", "0"]
    assert len(list(svg.iter(f"{SVG}circle"))) == 1 + 2 + 1  # equal ones both, and the legend


def test_one_single_point_can_be_drawn() -> None:
    lonely = Lines("Speed", "tokens", "tok/s", (Line("kernel", ((1024, 5.0),)),), SOURCE)
    assert "kernel" in words(draw_lines("one", lonely))


@pytest.mark.parametrize(
    ("value", "told"), [(0.5, "0.5"), (200.0, "200"), (65536, "64k"), (1500, "1,500")]
)
def test_ticks_are_short(value: float, told: str) -> None:
    assert tick(value) == told
