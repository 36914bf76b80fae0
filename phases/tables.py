"""Tables of figures in README and plans, written from kept evidence so that they cannot drift.

A document marks the place:

    <!-- figures: NAME GATE -->
    ...generated...
    <!-- /figures -->

NAME is a record under plans/evidence/ and GATE a gate in it: a row for each of its figures.
Without GATE, the table has a row for each gate of the record. With `output` in place of
`figures`, it is what `kd` printed at the end of that run.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from kdtree_engine.errors import ConfigError, UnknownName
from phases.evidence import GateRecord, Record
from phases.report import ending, gate_rows

__all__ = ["documents", "filled", "source"]

_BLOCK = re.compile(
    r"(?P<head><!-- (?P<kind>figures|output): (?P<name>[\w.-]+)(?: (?P<gate>[\w-]+))? -->\n)"
    r".*?(?P<tail><!-- /(?P=kind) -->)",
    re.DOTALL,
)
# Anything that looks like a mark, so that a mistyped one is found and not left alone.
_MARK = re.compile(r"<!--\s*/?\s*(figures|output)\b", re.IGNORECASE)


def documents(root: pathlib.Path) -> list[pathlib.Path]:
    """The documents that may hold tables."""
    return [root / "README.md", *sorted((root / "plans").glob("*.md"))]


def filled(path: pathlib.Path, kept: Mapping[str, Record]) -> str:
    """The text of `path` with every table as the kept records say. Raises ConfigError."""
    text = path.read_text(encoding="utf-8")
    if len(_MARK.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise ConfigError(f"{path}: a mark of a table, or its end, is broken")

    def block(match: re.Match[str]) -> str:
        name, gate = match["name"], match["gate"]
        if name not in kept:
            raise UnknownName(f"kept record in {path.name}", name, kept)
        if match["kind"] == "output":
            if gate:
                raise ConfigError(f"{path}: 'output: {name} {gate}': an output is of a whole run")
            table = "\n".join(["```", *ending(kept[name]), "```", ""])
        else:
            table = _table(kept[name], gate, path)
        return f"{match['head']}{table}{match['tail']}"

    return _BLOCK.sub(block, text)


def _table(record: Record, gate: str | None, path: pathlib.Path) -> str:
    entries = {entry.gate: entry for entry in record.gates}
    if gate is not None and gate not in entries:
        raise UnknownName(f"gate of {record.run} in {path.name}", gate, entries)
    lines = _figures(entries[gate]) if gate else _gates(record)
    return "\n".join([*lines, "", source(record), ""])


def _gates(record: Record) -> list[str]:
    rows = [f"| {' | '.join(row)} |" for row in gate_rows(record.gates)]
    return ["| phase | gate | status | figure | seconds |", "|---|---|---|---|---|", *rows]


def _figures(entry: GateRecord) -> list[str]:
    rows = [f"| {figure.name} | {figure.value:.4g} | {figure.unit} |" for figure in entry.figures]
    return ["| figure | value | unit |", "|---|---|---|", *rows]


def source(record: Record) -> str:
    """Machine, versions, revision, day and seed of a run, in a line."""
    machine = record.machine
    where = machine.gpus[0].name if machine.gpus else f"{machine.system}, no GPU"
    revision = (record.revision or "unknown")[:12] + (" with changes" if record.dirty else "")
    versions = ", ".join(
        f"{name} {value}"
        for name, value in (
            ("driver", machine.driver),
            ("CUDA", machine.cuda),
            ("torch", machine.torch),
        )
        if value
    )
    return (
        f"{where}; {versions}; revision {revision}; {record.started:%Y-%m-%d}; seed {record.seed}."
    )
