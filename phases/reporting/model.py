"""What a report is made of. A section is rendered to HTML, to a terminal and to JSON alike.

Every plot can give its data as a table: the page puts it under the drawing, and the terminal shows
nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import unicodedata
from collections.abc import Sequence
from typing import Any, TypeVar, cast

__all__ = [
    "BarPanel",
    "Bars",
    "Block",
    "Cell",
    "Column",
    "Entries",
    "Entry",
    "Headline",
    "HeatMap",
    "Line",
    "Lines",
    "Listing",
    "Missing",
    "Plot",
    "Report",
    "Roofline",
    "RooflinePoint",
    "Section",
    "Source",
    "Standing",
    "Table",
    "Text",
    "Tone",
    "Waterfall",
    "as_json",
    "number",
    "writable",
]


class Tone(enum.StrEnum):
    """What a cell says, beside its words: never by colour alone."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WARN = "warn"
    MUTED = "muted"


class Standing(enum.StrEnum):
    """Whether a figure is of the code as it is."""

    CURRENT = "current"
    """By the gate's content hash."""
    STALE = "stale"
    """The code that the figure depends on has changed since."""
    UNHASHED = "not hashed"
    """Kept outside of a gate: nothing says which code it depends on."""
    PREDICTED = "predicted"
    """By a model. Nothing was measured."""

    @property
    def tone(self) -> Tone:
        return {
            Standing.CURRENT: Tone.GOOD,
            Standing.STALE: Tone.WARN,
            Standing.PREDICTED: Tone.WARN,
        }.get(self, Tone.MUTED)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where figures come from. file: below the repository's root. remark: what limits them."""

    file: str
    standing: Standing
    where: str = "machine not said"
    date: str = "no date"
    revision: str = "no revision"
    remark: str = ""

    def __str__(self) -> str:
        parts = [self.file, self.where, self.date, f"revision {self.revision}", self.standing]
        return "; ".join([*map(str, parts), *([self.remark] if self.remark else [])])


@dataclasses.dataclass(frozen=True)
class Cell:
    """note: a second line, smaller."""

    text: str
    tone: Tone = Tone.PLAIN
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    numeric: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """The first cell of a row names it. folded: shown on demand. source: of all its figures."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    source: Source | None = None
    folded: bool = False

    @classmethod
    def of(
        cls,
        caption: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell | str]],
        *,
        source: Source | None = None,
        folded: bool = False,
    ) -> Table:
        """A column whose name begins with `#` is of numbers."""
        return cls(
            caption,
            tuple(Column(name.lstrip("#"), name.startswith("#")) for name in columns),
            tuple(
                tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
                for row in rows
            ),
            source,
            folded,
        )


@dataclasses.dataclass(frozen=True)
class Text:
    """Sentences, one a paragraph."""

    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing in words. facts: (what, text)."""

    name: str
    standing: Cell
    note: str
    facts: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Entries:
    """Things that take sentences, for which cells of a table are too narrow."""

    title: str
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Listing:
    title: str
    items: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Missing:
    """Something that was not measured, and why; or is kept and cannot be shown."""

    what: str
    why: str
    label: str = "Not measured"


@dataclasses.dataclass(frozen=True)
class BarPanel:
    """Bars of one thing. note: what limits all of them, in a few words."""

    name: str
    bars: tuple[tuple[str, float], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Bars:
    """Panels beside each other on one logarithmic axis; bars begin at `origin`. rows: of a bar."""

    title: str
    unit: str
    rows: str
    panels: tuple[BarPanel, ...]
    source: Source
    origin: float = 1.0

    def table(self) -> Table:
        labels = list(dict.fromkeys(label for panel in self.panels for label, _ in panel.bars))
        values = [dict(panel.bars) for panel in self.panels]
        heads = [
            f"{panel.name}, {panel.note}" if panel.note else panel.name for panel in self.panels
        ]
        return Table.of(
            f"{self.title}, {self.unit}",
            [self.rows, *(f"#{head}" for head in heads)],
            [
                [label, *(number(one[label]) if label in one else "" for one in values)]
                for label in labels
            ],
        )


@dataclasses.dataclass(frozen=True)
class RooflinePoint:
    """series: what is varied. short: how it differs from the others. label: the whole regime.

    intensity: flop a byte. achieved: TFLOP/s. us: of a call.
    """

    series: str
    short: str
    label: str
    intensity: float
    achieved: float
    us: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """bandwidth: TB/s. peak: TFLOP/s. Both measured in the run of the points."""

    title: str
    bandwidth: float
    peak: float
    points: tuple[RooflinePoint, ...]
    source: Source

    def ceiling(self, intensity: float) -> float:
        """TFLOP/s that the two allow at so many flop a byte."""
        return min(self.peak, self.bandwidth * intensity)

    def table(self) -> Table:
        return Table.of(
            f"{self.title}: copy {number(self.bandwidth)} TB/s, "
            f"matrix product {number(self.peak)} TFLOP/s",
            ("regime", "swept", "#us", "#flop a byte", "#TFLOP/s", "#of the roof"),
            [
                (
                    one.label,
                    one.series,
                    number(one.us),
                    number(one.intensity),
                    number(one.achieved),
                    f"{one.achieved / self.ceiling(one.intensity):.0%}",
                )
                for one in self.points
            ],
        )


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Series over one axis; y, and x with `log_x`, are logarithmic.

    data: a table that says more than the points alone, shown in place of theirs.
    """

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    source: Source
    log_x: bool = True
    data: Table | None = None

    def table(self) -> Table:
        if self.data is not None:
            return self.data
        places = sorted({x for line in self.lines for x, _ in line.points})
        values = [dict(line.points) for line in self.lines]
        return Table.of(
            f"{self.title}, {self.y}",
            [f"#{self.x}", *(f"#{line.name}" for line in self.lines)],
            [
                [f"{x:,.0f}", *(number(one[x]) if x in one else "" for one in values)]
                for x in places
            ],
        )


@dataclasses.dataclass(frozen=True)
class Waterfall:
    """From a step before to a step after, in us; the changes add up to the difference.

    Without `before` it goes from nothing to the step, a class at a time.
    """

    title: str
    before: float | None
    changes: tuple[tuple[str, float], ...]
    after: float
    source: Source

    def table(self) -> Table:
        whole = self.after if self.before is None else self.before
        rows = [
            (name, number(value) if self.before is None else f"{value:+,.1f}", _share(value, whole))
            for name, value in self.changes
        ]
        if self.before is not None:
            rows.insert(0, ("step before", number(self.before), _share(self.before, whole)))
        name = "step" if self.before is None else "step after"
        rows.append((name, number(self.after), _share(self.after, whole)))
        of = "step" if self.before is None else "step before"
        return Table.of(self.title, ("class", "#us", f"#of the {of}"), rows)


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """values[row][column], around `middle`; `low` and `high` are the ends of the colour scale.

    Several maps of a section share a scale, so that they can be compared.
    """

    title: str
    rows: str
    columns: str
    unit: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    low: float
    middle: float
    high: float
    source: Source

    def table(self) -> Table:
        """Columns become rows: there are more of them, and a page is taller than wide."""
        return Table.of(
            f"{self.title}, {self.unit}",
            [self.columns, *(f"#{self.rows} {name}" for name in self.row_names)],
            [
                [name, *(f"{row[at]:.2f}" for row in self.values)]
                for at, name in enumerate(self.column_names)
            ],
        )


Plot = Bars | Roofline | Lines | Waterfall | HeatMap
Block = Table | Text | Entries | Listing | Missing | Plot


@dataclasses.dataclass(frozen=True)
class Section:
    """id: of the anchor. lead: what the section shows, in a sentence or two."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Headline:
    """One figure that stands for a section. source: None where it was not measured."""

    figure: str
    what: str
    section: str
    source: Source | None


@dataclasses.dataclass(frozen=True)
class Report:
    """made: when the page was made, in UTC. revision: of the code that evidence is judged by."""

    made: str
    revision: str
    headlines: tuple[Headline, ...]
    sections: tuple[Section, ...]


def as_json(report: Report) -> dict[str, Any]:
    """Plain values; `kind` says which class of this module a block is."""
    document = dataclasses.asdict(report)
    for section, plain in zip(report.sections, document["sections"], strict=True):
        plain["blocks"] = [
            {"kind": type(block).__name__, **fields}
            for block, fields in zip(section.blocks, plain["blocks"], strict=True)
        ]
    return {"version": 1, **document}


_Value = TypeVar("_Value")


def writable(value: _Value) -> _Value:
    """The same with a `?` in its texts for each character that not every rendering can write.

    Those are what moves a terminal's cursor, and what UTF-8 has no bytes for: half of a surrogate
    pair, which JSON may escape by itself. value: a report, or any part of one.
    """
    found: Any = value
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        found = "".join("?" if _moves(char) else char for char in value)
    elif isinstance(value, tuple):
        found = tuple(map(writable, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: writable(getattr(value, one.name)) for one in dataclasses.fields(value)}
        found = dataclasses.replace(value, **parts)
    return cast(_Value, found)


def _moves(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs")


def number(value: float) -> str:
    """Three digits that count: `0.0667`, `1.55`, `22.4`, `330`, `3,783`."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""
