"""The tuning table: which tile a launch takes, by what is known when it is launched.

One file for each architecture, `tables/sm_90.json`. A launch may be captured in a CUDA graph and
replayed with other lengths, so the key is what a graph freezes: the architecture, the packed rows
(max_nodes times heads) and the batch. Deterministic mode has one configuration for each
architecture, whatever the rows and the batch: tiles differ in the order of their sums, and a
request must have the same bits in any batch. A GPU without a file gets the library's own choice.

    {"version": 1, "architecture": "sm_90", "body": "wgmma",
     "bodies": {"mma": {"deterministic": CONFIGURATION, "entries": [ENTRY, ...]}, "wgmma": ...}}

body: the set of kernels that is taken unless KDTREE_WGMMA says otherwise. Entries are sorted by
rows_up_to, then by batch_up_to (null: no limit), and the first that covers a launch is taken. `kd
tune` writes the files, and each entry says whether it was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from kdtree_engine.errors import ConfigError

__all__ = [
    "BODIES",
    "BUILT_IN",
    "TABLES",
    "Body",
    "Configuration",
    "Entry",
    "Measured",
    "Table",
    "TimedRegime",
    "Unmeasured",
    "architecture_of",
    "choice",
    "load_table",
    "parse_table",
    "table_of",
    "table_path",
    "table_text",
]

VERSION = 1
_LARGEST = 2**31 - 1
BODIES = ("mma", "wgmma")
"""The sets of kernels: on mma.sync, and on warpgroup products (sm_90 alone has them)."""
TABLES = pathlib.Path(__file__).parent / "tables"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a launch is told; 0 is the library's own choice.

    row_tile: packed rows of a tile. block_tokens: tokens of a stage. min_blocks: least stages of a
        split.
    """

    row_tile: int
    block_tokens: int
    min_blocks: int

    def __str__(self) -> str:
        return f"{self.row_tile}x{self.block_tokens}/{self.min_blocks}"


BUILT_IN = Configuration(0, 0, 0)
"""The library chooses."""


@dataclasses.dataclass(frozen=True)
class TimedRegime:
    """One regime that a configuration was timed in: its shape, and microseconds of a call."""

    batch: int
    heads: int
    nodes: int
    prefix: int
    us: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """Where a configuration was measured. record: a file of the repository that has the times."""

    gpu: str
    date: str
    record: str
    times: tuple[TimedRegime, ...]


@dataclasses.dataclass(frozen=True)
class Unmeasured:
    """That a configuration was never measured as it stands, and why it was taken all the same."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A configuration for launches of up to so many packed rows and requests; None: any number."""

    rows_up_to: int | None
    batch_up_to: int | None
    configuration: Configuration
    provenance: Measured | Unmeasured

    @property
    def measured(self) -> bool:
        return isinstance(self.provenance, Measured)

    def covers(self, rows: int, batch: int) -> bool:
        return _within(rows, self.rows_up_to) and _within(batch, self.batch_up_to)


@dataclasses.dataclass(frozen=True)
class Body:
    """The entries of one set of kernels. `deterministic` has no limits, as it may not have any."""

    deterministic: Entry
    entries: tuple[Entry, ...]

    def entry(self, rows: int, batch: int, *, deterministic: bool) -> Entry:
        """The one that a launch goes by. There always is one: the last has no limits."""
        if deterministic:
            return self.deterministic
        return next(entry for entry in self.entries if entry.covers(rows, batch))


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of one architecture. body: which of `bodies` is taken unless another is asked."""

    architecture: str
    body: str
    bodies: Mapping[str, Body]

    def chosen(self, body: str | None = None) -> Body | None:
        """The body that is asked for, None for the table's own; None where it has no such body."""
        return self.bodies.get(body or self.body)

    def everything(self) -> Iterator[tuple[str, Entry]]:
        """Every entry with the name of its body, the one of deterministic mode last in each."""
        for name, body in self.bodies.items():
            for entry in (*body.entries, body.deterministic):
                yield name, entry


@functools.lru_cache(maxsize=4096)
def choice(
    architecture: str, rows: int, batch: int, *, deterministic: bool, body: str | None
) -> Configuration:
    """What a launch is told. Cached, as it is asked at every call.

    rows: max_nodes times heads. body: of BODIES, None for the table's own.
    BUILT_IN where the architecture has no table, or its table nothing of that body.
    Raises ConfigError for a table that is broken.
    """
    table = table_of(architecture)
    asked = table.chosen(body) if table else None
    if asked is None:
        return BUILT_IN
    return asked.entry(rows, batch, deterministic=deterministic).configuration


def architecture_of(capability: tuple[int, int]) -> str:
    """`sm_90` of (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


def table_path(architecture: str) -> pathlib.Path:
    """Where an architecture's table lies in the package, or would."""
    return TABLES / f"{architecture}.json"


@functools.cache
def table_of(architecture: str) -> Table | None:
    """The table that the package has for an architecture. Raises ConfigError where it is broken."""
    path = table_path(architecture)
    return load_table(path) if path.is_file() else None


def load_table(path: pathlib.Path) -> Table:
    """The table in a file that is named after its architecture. ConfigError names the field."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    table = parse_table(fields, str(path))
    if table.architecture != path.stem:
        raise ConfigError(
            f"{path}: field architecture: {table.architecture} is not the file's name"
        )
    return table


def parse_table(fields: object, place: str) -> Table:
    """The table in parsed JSON. ConfigError names `place`, the field and what is wrong with it."""
    top = _Fields(fields, place, "")
    version = top.take("version", int)
    if version != VERSION:
        raise top.fault("version", f"is {version}, this program reads {VERSION}")
    architecture = top.take("architecture", str)
    body = top.take("body", str)
    named = top.take("bodies", dict)
    bodies = {name: _body(value, place, f"bodies.{name}") for name, value in named.items()}
    top.end()
    for name in bodies:
        if name not in BODIES:
            raise top.fault(f"bodies.{name}", f"is none of {', '.join(BODIES)}")
    if body not in bodies:
        raise top.fault("body", f"{body!r} is none of those in 'bodies'")
    return Table(architecture, body, bodies)


def table_text(table: Table) -> str:
    """The JSON of a table, a line for each thing that a person looks for. `load_table` reads it."""
    bodies = ",\n".join(
        f'  "{name}": {{\n   "deterministic": {_entry_text(body.deterministic, limits=False)},\n'
        '   "entries": [\n    '
        + ",\n    ".join(_entry_text(entry, limits=True) for entry in body.entries)
        + "\n   ]\n  }"
        for name, body in table.bodies.items()
    )
    return (
        f'{{\n "version": {VERSION},\n "architecture": {json.dumps(table.architecture)},\n'
        f' "body": {json.dumps(table.body)},\n "bodies": {{\n{bodies}\n }}\n}}\n'
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no name is there twice; json alone would keep the last."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is there twice in one object")
    return dict(pairs)


def _within(value: int, limit: int | None) -> bool:
    return limit is None or value <= limit


def _entry_text(entry: Entry, *, limits: bool) -> str:
    key = {"rows_up_to": entry.rows_up_to, "batch_up_to": entry.batch_up_to} if limits else {}
    head = json.dumps(key | dataclasses.asdict(entry.configuration))[:-1]
    provenance = entry.provenance
    if isinstance(provenance, Unmeasured):
        return f"{head},\n     {_after(unmeasured=provenance.reason)}}}"
    times = ",\n      ".join(json.dumps(dataclasses.asdict(time)) for time in provenance.times)
    where = json.dumps(
        {"gpu": provenance.gpu, "date": provenance.date, "record": provenance.record},
        ensure_ascii=False,
    )[:-1]
    return f'{head},\n     "measured": {where}, "times": [\n      {times}]}}}}'


def _after(**fields: str) -> str:
    return json.dumps(fields, ensure_ascii=False)[1:-1]


def _body(fields: object, place: str, within: str) -> Body:
    read = _Fields(fields, place, within)
    deterministic = _entry(
        read.take("deterministic", dict), place, f"{within}.deterministic", False
    )
    entries = tuple(
        _entry(one, place, f"{within}.entries[{number}]", True)
        for number, one in enumerate(read.take("entries", list))
    )
    read.end()
    if not entries or (entries[-1].rows_up_to, entries[-1].batch_up_to) != (None, None):
        raise read.fault("entries", "the last has no limits: rows_up_to and batch_up_to are null")
    keys = [(_rank(entry.rows_up_to), _rank(entry.batch_up_to)) for entry in entries]
    if any(second <= first for first, second in itertools.pairwise(keys)):
        raise read.fault(
            "entries", "are sorted by rows_up_to, then batch_up_to, and none is there twice"
        )
    for rows in {key[0] for key in keys}:
        if (rows, _rank(None)) not in keys:
            raise read.fault("entries", f"rows_up_to {rows:g} has no entry without batch_up_to")
    return Body(deterministic, entries)


def _rank(limit: int | None) -> float:
    return float("inf") if limit is None else limit


def _entry(fields: object, place: str, within: str, limits: bool) -> Entry:
    read = _Fields(fields, place, within)
    rows = read.limit("rows_up_to") if limits else None
    batch = read.limit("batch_up_to") if limits else None
    configuration = Configuration(
        read.number("row_tile", 1), read.number("block_tokens", 1), read.number("min_blocks", 0)
    )
    if read.has("unmeasured") == read.has("measured"):
        raise read.fault("measured", "is there where 'unmeasured' is not, and the other way round")
    provenance: Measured | Unmeasured
    if read.has("unmeasured"):
        provenance = Unmeasured(read.take("unmeasured", str))
    else:
        provenance = _measured(read.take("measured", dict), place, f"{within}.measured")
    read.end()
    return Entry(rows, batch, configuration, provenance)


def _measured(fields: object, place: str, within: str) -> Measured:
    read = _Fields(fields, place, within)
    gpu, date, record = (read.take(name, str) for name in ("gpu", "date", "record"))
    times = []
    for number, one in enumerate(read.take("times", list)):
        row = _Fields(one, place, f"{within}.times[{number}]")
        batch, heads, nodes = (row.number(name, 1) for name in ("batch", "heads", "nodes"))
        prefix, us = row.number("prefix", 0), row.positive("us")
        times.append(TimedRegime(batch, heads, nodes, prefix, us))
        row.end()
    read.end()
    if not times:
        raise read.fault("times", "has no time: what was measured says what came out")
    return Measured(gpu, date, record, tuple(times))


class _Fields:
    """A JSON object whose fields are taken one after another, and all of them must be."""

    def __init__(self, fields: object, place: str, within: str) -> None:
        self._place, self._within = place, within
        if not isinstance(fields, dict):
            raise ConfigError(f"{place}: field {within or 'the whole'}: is not an object")
        self._left: dict[str, Any] = dict(fields)

    def fault(self, name: str, problem: str) -> ConfigError:
        field = f"{self._within}.{name}" if self._within else name
        return ConfigError(f"{self._place}: field {field}: {problem}")

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, kind: type) -> Any:
        if name not in self._left:
            raise self.fault(name, "is required")
        value = self._left.pop(name)
        # A bool is an int to Python.
        if not isinstance(value, kind) or isinstance(value, bool) or value == "":
            raise self.fault(name, f"expected {_KINDS[kind]}, got {json.dumps(value)[:60]}")
        return value

    def number(self, name: str, least: int) -> int:
        value = self.take(name, int)
        if not least <= value <= _LARGEST:
            told = str(value)[:20]
            raise self.fault(name, f"expected {least}..{_LARGEST}, got {told}")
        return int(value)

    def positive(self, name: str) -> float:
        value = self._left.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            self._left[name] = float(value) if abs(value) <= _LARGEST else float("inf")
        value = self.take(name, float)
        if not 0 < value < float("inf"):
            raise self.fault(name, f"expected a positive number, got {value}")
        return float(value)

    def limit(self, name: str) -> int | None:
        if self.has(name) and self._left[name] is None:
            del self._left[name]
            return None
        return self.number(name, 1)

    def end(self) -> None:
        if self._left:
            raise self.fault(next(iter(self._left)), "is not a known field")


_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "an object",
    list: "a list",
}
