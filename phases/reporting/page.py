"""A report as one HTML page: no script, nothing from a network, drawn for light and dark.

Each plot is followed by its data as a table, folded. A table or drawing that is wider than the
window scrolls in a region of its own that the keyboard reaches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

from phases.reporting.elements import Markup, el, joined
from phases.reporting.model import (
    Bars,
    Block,
    Cell,
    Column,
    Entries,
    Headline,
    HeatMap,
    Lines,
    Listing,
    Missing,
    Plot,
    Report,
    Roofline,
    Section,
    Source,
    Table,
    Text,
    Tone,
    Waterfall,
)
from phases.reporting.plot_bars import draw_bars
from phases.reporting.plot_heat import draw_heat
from phases.reporting.plot_lines import draw_lines
from phases.reporting.plot_roofline import draw_roofline
from phases.reporting.plot_waterfall import draw_waterfall
from phases.reporting.svg import NARROW, WIDTH

__all__ = ["as_html"]

_TITLE = "kd: a tree-verify kernel from oracle to live service"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing is loaded and nothing runs, whatever evidence might say."""
_STYLE = pathlib.Path(__file__).with_name("page.css")
_LONG = 40
"""Letters of a cell from which on it is text that may be broken into lines."""


def as_html(report: Report) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("title", _TITLE),
        el("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    body = el(
        "body",
        el("a", "Skip to the report", href="#report", class_="skip"),
        _header(report),
        _navigation(report),
        el("main", *map(_section, report.sections), id="report", tabindex="-1"),
        _footer(),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _header(report: Report) -> Markup:
    return el(
        "header",
        el("h1", _TITLE),
        el(
            "p",
            f"Made {report.made} from the evidence kept in plans/evidence, judged by the code of "
            "revision ",
            el("code", report.revision),
            ".",
            class_="soft",
        ),
        el("ul", *map(_headline, report.headlines), class_="headlines"),
    )


def _navigation(report: Report) -> Markup:
    links = (el("li", el("a", one.title, href=f"#{one.id}")) for one in report.sections)
    return el("nav", el("ul", *links), aria_label="Sections")


def _headline(one: Headline) -> Markup:
    source = one.source
    told = None
    if source is not None:
        parts = (source.where, source.date, source.standing, source.remark)
        told = ", ".join(filter(None, parts))
    return el(
        "li",
        el("a", el("strong", one.figure), el("span", one.what), href=f"#{one.section}"),
        el("small", told) if told else None,
    )


def _footer() -> Markup:
    return el(
        "footer",
        el(
            "p",
            "Current: the content hash of the figure's gate is that of the code as it is. Stale: "
            "it is not. Not hashed: kept outside of a gate, so no hash says which code it depends "
            "on. Predicted: by a model, with nothing measured.",
        ),
        el("p", "Made by ", el("code", "kd report --html FILE"), "."),
    )


def _section(section: Section) -> Markup:
    return el(
        "section",
        el("h2", section.title, id=f"{section.id}-title"),
        el("p", section.lead, class_="lead"),
        *(
            part
            for at, block in enumerate(section.blocks)
            for part in _block(f"{section.id}-{at}", block)
        ),
        id=section.id,
        aria_labelledby=f"{section.id}-title",
    )


def _block(name: str, block: Block) -> Iterator[Markup]:
    if isinstance(block, Table):
        yield from _table(name, block)
    elif isinstance(block, Text):
        yield from (el("p", line) for line in block.lines)
    elif isinstance(block, Missing):
        told = (el("strong", f"{block.label}: "), block.what, el("small", block.why))
        yield el("p", *told, class_="gap")
    elif isinstance(block, Entries):
        yield from _entries(block)
    elif isinstance(block, Listing):
        yield el("h3", block.title)
        yield el("ul", *(el("li", item) for item in block.items))
    else:
        yield el("figure", el("figcaption", block.title), *_drawings(name, block))
        yield _source(block.source)
        if isinstance(block, Lines) and block.data is not None:
            yield _plain_table(name, block.data)
        else:
            yield _folded(name, block.table(), "The same as a table")


def _drawings(name: str, plot: Plot) -> Iterator[Markup]:
    """A wide drawing and a narrow one, of which the style shows one."""
    if isinstance(plot, Bars):
        yield el("div", *draw_bars(name, plot), class_="panels")
        return
    for width, class_ in ((WIDTH, "wide"), (NARROW, "narrow")):
        yield el("div", _drawing(f"{name}-{class_}", plot, width), class_=class_)


def _drawing(name: str, plot: Plot, width: float) -> Markup:
    if isinstance(plot, Roofline):
        return draw_roofline(name, plot, width)
    if isinstance(plot, Lines):
        return draw_lines(name, plot, width)
    if isinstance(plot, Waterfall):
        return draw_waterfall(name, plot, width)
    assert isinstance(plot, HeatMap)
    return draw_heat(name, plot, width)


def _entries(block: Entries) -> Iterator[Markup]:
    yield el("h3", block.title)
    for one in block.entries:
        facts = (el("div", el("dt", what), el("dd", told)) for what, told in one.facts)
        standing = el("span", one.standing.text, class_=f"standing {one.standing.tone}")
        yield el(
            "div",
            el("h4", one.name, " ", standing),
            el("p", one.note, class_="soft"),
            el("dl", *facts),
            class_="entry",
        )


def _source(source: Source) -> Markup:
    return el(
        "p",
        el("code", source.file),
        f"; {source.where}; {source.date}; revision {source.revision}; ",
        el("span", source.standing, class_=f"standing {source.standing.tone}"),
        f"; {source.remark}" if source.remark else None,
        class_="source",
    )


# ---------------------------------------------------------------------------------------------
# Tables.


def _table(name: str, table: Table) -> Iterator[Markup]:
    yield _folded(name, table, table.caption) if table.folded else _plain_table(name, table)
    if table.source is not None and not table.folded:
        yield _source(table.source)


def _folded(name: str, table: Table, summary: str) -> Markup:
    source = _source(table.source) if table.source else None
    return el("details", el("summary", summary), _plain_table(name, table), source)


def _plain_table(name: str, table: Table) -> Markup:
    head = el("thead", el("tr", *(_heading(column) for column in table.columns)))
    body = el("tbody", *(_row(table.columns, row) for row in table.rows))
    return _scrolling(
        el("table", el("caption", table.caption, id=f"{name}-caption"), head, body),
        f"Table: {table.caption}",
    )


def _scrolling(wide: Markup, label: str) -> Markup:
    return el("div", wide, class_="scroll", tabindex="0", role="region", aria_label=label)


def _heading(column: Column) -> Markup:
    return el("th", column.name, scope="col", class_="n" if column.numeric else None)


def _row(columns: tuple[Column, ...], row: tuple[Cell, ...]) -> Markup:
    first, *rest = zip(columns, row, strict=True)
    return el(
        "tr",
        el("th", *_cell(first[1]), scope="row", class_=_classes(*first)),
        *(el("td", *_cell(cell), class_=_classes(column, cell)) for column, cell in rest),
    )


def _cell(cell: Cell) -> Iterator[Markup]:
    tone = None if cell.tone is Tone.PLAIN else f"standing {cell.tone}"
    yield el("span", cell.text, class_=tone) if tone else joined([cell.text])
    if cell.note:
        yield el("small", cell.note)


def _classes(column: Column, cell: Cell) -> str | None:
    if column.numeric:
        return "n"
    return "text" if len(cell.text) > _LONG else None
