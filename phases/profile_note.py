"""The note that `kd profile` writes beside a trace: load, server, model and GPU."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from kdtree_engine.profiling.summary import Profile

__all__ = ["Note", "note_remarks", "read_note"]

_SLOWED = 1.25
"""From how many times the step's own time on the profiler is remarked on."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What `kd profile` wrote of a trace: requests, context, server, model, and the GPU's name."""

    context: int
    batch: int
    server: Mapping[str, Any]
    model: Mapping[str, Any]
    gpu: str | None
    step_us: float | None
    beside: int
    ended: bool


def read_note(trace: pathlib.Path) -> Note | None:
    """The note beside a trace; None where there is none, or another file is called so."""
    name, marked, _ = trace.name.rpartition("-TP-")
    path = trace.parent / f"{name}.json"
    if not marked or not path.is_file():
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        gpus = (said.get("machine") or {}).get("gpus") or ()
        step_us = said.get("step_us")
        return Note(
            context=int(said["asked"]["context"]),
            batch=int(said["asked"]["batch"]),
            server=dict(said["server"]),
            model=dict(said["model"]),
            gpu=next((str(one["name"]) for one in gpus if one.get("usable", True)), None),
            step_us=None if step_us is None else float(step_us),
            beside=int(said.get("beside") or 0),
            ended=bool(said.get("ended")),
        )
    except (AttributeError, LookupError, OSError, OverflowError, RecursionError):
        return None
    except (TypeError, ValueError):
        return None


def note_remarks(profile: Profile, note: Note | None) -> list[str]:
    """What else the figures have in them, each a line."""
    if note is None:
        return []
    found = []
    where = f"context {note.context}, batch {note.batch}"
    if note.beside:
        found.append(f"{where}: {note.beside} requests of others ran too, and count")
    if note.ended:
        found.append(f"{where}: a request ended before all steps were recorded")
    if note.step_us is None:
        found.append(
            f"{where}: recorded under SGLang's profiler, which slows the host by an amount that "
            "was not measured here: the step and what the host does are overstated, what the GPU "
            "does is not"
        )
    elif profile.step_us > _SLOWED * note.step_us:
        found.append(
            f"{where}: a step took {note.step_us:,.0f} us before the profiler ran and "
            f"{profile.step_us:,.0f} under it: what the host does is overstated by that, what "
            "the GPU does is not"
        )
    return found
