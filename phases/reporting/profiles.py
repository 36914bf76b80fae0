"""The bottleneck: where a decode step's time goes, before and after, from kept profiles.

A profile is what `kd profile --json` writes, kept under plans/evidence/profile/: one, or a list
with one for each point of a service. A pair is one with a part `before` (`kd profile --before`), or
the same point in two files called NAME-before and NAME-after. The note that `kd profile` writes
beside a service's traces may be kept there too: it says when and where they were recorded.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import pydantic

from phases.reporting.kept import Document, Kept, documents
from phases.reporting.model import (
    Block,
    Cell,
    Missing,
    Section,
    Source,
    Table,
    Text,
    Waterfall,
    number,
)

__all__ = ["FOLDER", "profiles_section"]

FOLDER = "profile"
_BEFORE, _AFTER = "-before", "-after"


class _Class(pydantic.BaseModel):
    name: str
    us: float = pydantic.Field(ge=0, allow_inf_nan=False)
    lever: str = ""


class _Part(pydantic.BaseModel):
    """What is read of one profile."""

    step_us: float = pydantic.Field(gt=0, allow_inf_nan=False)
    classes: tuple[_Class, ...]


class _Profile(_Part):
    version: Literal[1]
    files: tuple[str, ...] = ()
    before: _Part | None = None
    remarks: tuple[str, ...] = ()


class _Note(pydantic.BaseModel):
    """What is read of a note: the names of the traces that it is of."""

    traces: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A profile, and what it is compared with."""

    name: str
    before: _Part | None
    after: _Part
    source: Source
    remarks: tuple[str, ...]


def profiles_section(kept: Kept) -> Section:
    found, broken = documents(kept, FOLDER, _Profile, lambda raw: "asked" not in raw)
    notes, odd = documents(kept, FOLDER, _Note, lambda raw: "asked" in raw)
    blocks: list[Block] = []
    for one in _shown([_placed(profile, notes) for profile in found]):
        blocks += [_waterfall(one), _levers(one)]
        if one.remarks:
            blocks.append(Text(tuple(f"{one.name}: {line}" for line in one.remarks)))
    if not blocks:
        why = "no output of kd profile --json is kept in plans/evidence/profile"
        blocks.append(Missing("the time of a decode step by class", why))
    return Section(
        "bottleneck",
        "Bottleneck, before and after",
        "Where the GPU's time in one decode step goes, by class of work, in microseconds from a "
        "torch-profiler trace. Each instant is shared out among the kernels that run, or is idle, "
        "so the classes add up to the step. SGLang's profiler slows the host, so idle time and the "
        "step are longer here than in service; what kernels take is not.",
        (*blocks, *broken, *odd),
    )


def _placed(one: Document[_Profile], notes: list[Document[_Note]]) -> Document[_Profile]:
    """With the origin of the note that is of its traces, where there is one."""
    for note in notes:
        if set(one.content.files) & set(note.content.traces):
            remark = f"recorded as {note.source.file} says"
            origin = dataclasses.replace(note.source, file=one.source.file, remark=remark)
            return dataclasses.replace(one, source=origin)
    return one


def _shown(found: list[Document[_Profile]]) -> list[_Shown]:
    """Pairs of files as one, in the order of their names."""
    by_name = {(one.stem, one.point): one for one in found}
    shown = []
    for one in found:
        content, partner, name = one.content, None, one.stem
        if name.endswith(_BEFORE) and (name.removesuffix(_BEFORE) + _AFTER, one.point) in by_name:
            continue  # shown with the file that it is the before of
        if name.endswith(_AFTER):
            name = name.removesuffix(_AFTER)
            partner = by_name.get((name + _BEFORE, one.point))
        before = partner.content if partner else content.before
        source = one.source
        if partner:
            told = f"before: {partner.source.file}, revision {partner.source.revision}"
            remark = "; ".join(filter(None, (source.remark, told)))
            source = dataclasses.replace(source, remark=remark)
        told_as = ", ".join(filter(None, (name, one.point)))
        shown.append(_Shown(told_as, before, content, source, content.remarks))
    return shown


def _waterfall(one: _Shown) -> Waterfall:
    after = {part.name: part.us for part in one.after.classes}
    if one.before is None:
        ordered = sorted(after.items(), key=lambda item: -item[1])
        return Waterfall(
            f"A decode step by class, {one.name}",
            None,
            tuple(ordered),
            one.after.step_us,
            one.source,
        )
    before = {part.name: part.us for part in one.before.classes}
    names = dict.fromkeys([*before, *after])
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in names]
    changes.sort(key=lambda item: item[1])
    return Waterfall(
        f"A decode step before and after, {one.name}",
        one.before.step_us,
        tuple(changes),
        one.after.step_us,
        one.source,
    )


def _levers(one: _Shown) -> Table:
    """Each class with its time on both sides, and what would make it smaller."""
    before = {part.name: part.us for part in one.before.classes} if one.before else {}
    after = {part.name: part for part in one.after.classes}
    names = sorted(
        dict.fromkeys([*after, *before]), key=lambda name: -(after[name].us if name in after else 0)
    )
    rows = [
        (
            name,
            *((number(before.get(name, 0.0)),) if one.before else ()),
            number(after[name].us) if name in after else "0",
            f"{after[name].us / one.after.step_us:.1%}" if name in after else "",
            Cell(after[name].lever if name in after else ""),
        )
        for name in names
    ]
    sides = ("#before us", "#after us") if one.before else ("#us",)
    return Table.of(
        f"Classes and their levers, {one.name}",
        ("class", *sides, "#of the step", "lever"),
        rows,
        source=one.source,
        folded=True,
    )
