"""A service under load, from what `kd bench serve` wrote with --concurrency, --rate or --soak."""

from __future__ import annotations

import pydantic

from phases.reporting.kept import Document, Kept, documents
from phases.reporting.model import Block, Cell, Missing, Table, Tone, number

__all__ = ["KIND", "load_blocks"]

KIND = "load"
"""What such a document calls itself; it lies beside those of one request, in `serve`."""

_Positive = pydantic.Field(default=None, ge=0, allow_inf_nan=False)


class _Times(pydantic.BaseModel):
    """Seconds; None where there was no time."""

    p50: float | None = _Positive
    p99: float | None = _Positive


class _Difference(pydantic.BaseModel):
    near_tie: bool


class _Point(pydantic.BaseModel):
    server: str
    length: int = pydantic.Field(ge=0)
    concurrency: int | None = None
    rate: float | None = None
    right: bool
    ended_early: str | None = None
    answers: int = pydantic.Field(ge=0)
    answers_judged: int = pydantic.Field(default=0, ge=0)
    answers_not_judged: dict[str, int] = {}
    differences: tuple[_Difference, ...] = ()
    errors: dict[str, int] = {}
    tokens_per_second: float = pydantic.Field(ge=0, allow_inf_nan=False)
    first_token_seconds: _Times = _Times()
    inter_token_seconds: _Times = _Times()
    chunk_gap_seconds: _Times = _Times()

    @property
    def load(self) -> str:
        return (
            f"{self.concurrency} in flight" if self.concurrency else f"{self.rate or 0:g} a second"
        )


class _Load(pydantic.BaseModel):
    right: bool
    interrupted: bool = False
    points: tuple[_Point, ...] = ()
    failed: dict[str, str] = {}


def load_blocks(kept: Kept, folder: str) -> list[Block]:
    """A table for each kept document, then what cannot be shown."""
    found, broken = documents(kept, folder, _Load, lambda raw: raw.get("kind") == KIND)
    blocks: list[Block] = []
    for one in found:
        if one.content.points:
            blocks.append(_table(one))
        blocks += [
            Missing(f"{one.stem}, {server}", f"it could not be measured: {_last(said)}")
            for server, said in one.content.failed.items()
        ]
        if not one.content.points and not one.content.failed:
            blocks.append(Missing(one.source.file, "no load was measured in it", "Not shown"))
    return [*blocks, *broken]


def _table(one: Document[_Load]) -> Table:
    short = "" if one.content.right else "; the run was not right"
    return Table.of(
        f"Under load, {one.stem}{', interrupted' if one.content.interrupted else ''}{short}",
        (
            *("server", "load", "#prompt tokens", "#tok/s", "#first token p50 / p99 ms"),
            *("#inter-token p50 / p99 ms", "#chunk gap p50 / p99 ms", "#answers", "judged"),
        ),
        [
            (
                point.server,
                point.load,
                f"{point.length:,}" if point.length else "a file's",
                number(point.tokens_per_second),
                _ms(point.first_token_seconds),
                _ms(point.inter_token_seconds),
                _ms(point.chunk_gap_seconds),
                f"{point.answers:,}",
                _verdict(point),
            )
            for point in one.content.points
        ],
        source=one.source,
    )


def _ms(times: _Times) -> str:
    told = [None if one is None else number(1e3 * one) for one in (times.p50, times.p99)]
    return " / ".join(one for one in told if one is not None)


def _verdict(point: _Point) -> Cell:
    """What its answers are worth."""
    others = sum(point.answers_not_judged.values())
    note = f"{others:,} not judged" if others else ""
    if point.ended_early:
        return Cell(f"ended early: {point.ended_early}", Tone.BAD, note)
    if point.errors:
        told = ", ".join(f"{count} {kind}" for kind, count in point.errors.items())
        return Cell(f"failed: {told}", Tone.BAD, note)
    if not point.right:
        return Cell("not right", Tone.BAD, note)
    if not point.answers_judged:
        return Cell("not compared", Tone.WARN, note)
    wrong = sum(not one.near_tie for one in point.differences)
    if wrong:
        return Cell(
            f"{wrong:,} of {point.answers_judged:,} different answers wrong", Tone.BAD, note
        )
    if point.differences:
        told = f"{len(point.differences):,} near-ties of {point.answers_judged:,}"
        return Cell(told, Tone.PLAIN, note)
    return Cell(f"{point.answers_judged:,} equal", Tone.GOOD, note)


def _last(said: str) -> str:
    return (said.strip() or "no message").splitlines()[-1]
