"""A report in a terminal: tables with colours there, aligned plain lines elsewhere.

A plot is its table, and a map of values a row of shades for each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text as Styled

from phases.report import plain_table
from phases.reporting.model import (
    Bars,
    Block,
    Cell,
    Entries,
    HeatMap,
    Lines,
    Listing,
    Missing,
    Report,
    Roofline,
    Source,
    Table,
    Text,
    Tone,
    Waterfall,
)

__all__ = ["show"]

_COLOURS = {
    Tone.PLAIN: "",
    Tone.GOOD: "green",
    Tone.BAD: "red",
    Tone.WARN: "yellow",
    Tone.MUTED: "bright_black",
}
_SHADES = " ░▒▓█"


def show(report: Report, console: Console) -> None:
    """Print it. What the page folds away is left out, but for what is drawn there."""
    _say(console, f"kd report, {report.made}, judged by the code of revision {report.revision}")
    rows = [
        (one.figure, one.what, str(one.source) if one.source else "") for one in report.headlines
    ]
    _table(console, Table.of("", ("figure", "what", "from"), rows))
    for section in report.sections:
        _say(console, "")
        _say(console, section.title, "bold")
        _say(console, section.lead)
        for block in section.blocks:
            _block(console, block)


def _block(console: Console, block: Block) -> None:
    if isinstance(block, Table) and block.folded:
        return
    _say(console, "")
    if isinstance(block, Table):
        _say(console, block.caption, "bold")
        _table(console, block)
        _source(console, block.source)
    elif isinstance(block, HeatMap):
        _say(console, block.title, "bold")
        for line in _shades(block):
            _say(console, line)
        _source(console, block.source)
    elif isinstance(block, (Bars, Roofline, Lines, Waterfall)):
        _say(console, block.title, "bold")
        _table(console, block.table())
        _source(console, block.source)
    else:
        for line, style in _words(block):
            _say(console, line, style)


def _words(block: Text | Missing | Listing | Entries) -> Iterator[tuple[str, str]]:
    """Lines with their styles."""
    if isinstance(block, Text):
        yield from ((line, "") for line in block.lines)
    elif isinstance(block, Missing):
        yield f"{block.label}: {block.what}", "yellow"
        yield f"  {block.why}", ""
    elif isinstance(block, Listing):
        yield block.title, "bold"
        yield from ((f"- {item}", "") for item in block.items)
    else:
        yield block.title, "bold"
        for entry in block.entries:
            yield f"{entry.name}: {entry.standing.text}", _COLOURS[entry.standing.tone]
            yield from ((f"  {what}: {told}", "") for what, told in entry.facts)


def _shades(heat: HeatMap) -> Iterator[str]:
    """A row of shades for each row, from the lowest to the highest of the scale."""
    last = len(_SHADES) - 1
    for name, values in zip(heat.row_names, heat.values, strict=True):
        shares = ((value - heat.low) / ((heat.high - heat.low) or 1.0) for value in values)
        row = "".join(_SHADES[round(min(max(share, 0.0), 1.0) * last)] for share in shares)
        yield f"{heat.rows} {name} {row}"
    yield f"a column is a {heat.columns}; blank is {heat.low:.2f}, full {heat.high:.2f} {heat.unit}"


def _source(console: Console, source: Source | None) -> None:
    if source is not None:
        _say(console, f"({source})", _COLOURS[Tone.MUTED])


def _table(console: Console, table: Table) -> None:
    names = [column.name for column in table.columns]
    if not console.is_terminal:
        rows = [[_shown(_joined(cell)) for cell in row] for row in table.rows]
        for line in plain_table(names, rows):
            _say(console, line)
        return
    grid = Grid(header_style="bold")
    for column in table.columns:
        grid.add_column(column.name, justify="right" if column.numeric else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*(Styled(_shown(_joined(cell)), style=_COLOURS[cell.tone]) for cell in row))
    console.print(grid)


def _joined(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _say(console: Console, text: str, style: str = "") -> None:
    """One line; it is broken by a terminal's width alone."""
    console.print(Styled(_shown(text), style=style), soft_wrap=not console.is_terminal)


def _shown(text: str) -> str:
    """On one line and without control characters: text of evidence must not steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\n", " "))
