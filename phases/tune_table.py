"""What a person reads of a tuning table and of a sweep: rows. Nothing here runs or prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kdtree_engine.tuning import Entry, Measured, Table

if TYPE_CHECKING:
    from phases.tune import Trial  # torch comes with it, which `kd doctor` need not wait for

__all__ = ["ENTRY_COLUMNS", "TRIAL_COLUMNS", "entry_rows", "trial_rows"]

ENTRY_COLUMNS = (
    "tuning of",
    "body",
    "rows up to",
    "batch up to",
    "tile",
    "least stages",
    "measured",
)
TRIAL_COLUMNS = ("regime", "configuration", "status", "why")


def entry_rows(table: Table) -> list[tuple[str, ...]]:
    """A row for each entry of the body that is taken, the one of deterministic mode last."""
    body = table.bodies[table.body]
    return [
        *(
            _row(table, _limit(one.rows_up_to), _limit(one.batch_up_to), one)
            for one in body.entries
        ),
        _row(table, "deterministic", "", body.deterministic),
    ]


def trial_rows(trials: Iterable[Trial]) -> list[tuple[str, ...]]:
    """A row for each trial that was not right."""
    return [
        (str(trial.regime), str(trial.candidate), trial.status, trial.why or "")
        for trial in trials
        if trial.status != "right"
    ]


def _row(table: Table, rows: str, batch: str, entry: Entry) -> tuple[str, ...]:
    tile = f"{entry.configuration.row_tile}x{entry.configuration.block_tokens}"
    least = str(entry.configuration.min_blocks or "the library's")
    return (table.architecture, table.body, rows, batch, tile, least, _provenance(entry))


def _provenance(entry: Entry) -> str:
    one = entry.provenance
    if not isinstance(one, Measured):
        return f"no: {one.reason}"
    count = f"{len(one.times)} {'regime' if len(one.times) == 1 else 'regimes'}"
    return f"{count} on {one.gpu}, {one.date}"


def _limit(value: int | None) -> str:
    return "any" if value is None else str(value)
