"""`kd profile` of a running service: at which loads, what is kept of each, and what was profiled.

Who drives the server is handed in, as it runs on the server's machine. A point's traces and a note
of what was asked lie side by side: NAME-TP-0.trace.json.gz and so on, and NAME.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.atomic import write_atomically
from kdtree_engine.machine import Machine
from phases.evidence import new_run_id, now
from phases.service import serving
from phases.service_scale import Scale, Start, Variant, decoding, kernel, launched, plain, triton
from phases.service_speed import LAYERS

__all__ = ["VARIANTS", "Drive", "Point", "Profiled", "profile_points", "served"]

Drive = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Takes name, context, batch, steps, vocabulary, seed and new_tokens, as `remote.profiler` has
them, and returns what that returns, with the traces where this machine can read them."""

VARIANTS: Mapping[str, Callable[[int], Variant]] = {
    "kernel": kernel,
    "triton": triton,
    "plain": lambda nodes: plain(),
    "decode": lambda nodes: decoding(),
}
_VOCABULARY = 480
"""Distinct tokens of the prompts."""
_NEW_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Point:
    """A load. context: tokens of each prompt. batch: requests that decode at the same time."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"context {self.context}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What was recorded at a point. note: the file beside the traces that says what was asked."""

    point: Point
    traces: tuple[pathlib.Path, ...]
    note: pathlib.Path


def profile_points(
    drive: Drive,
    points: Sequence[Point],
    *,
    folder: pathlib.Path,
    steps: int,
    seed: int,
    machine: Machine | None,
    command: Sequence[str],
    revision: tuple[str | None, bool | None],
    what: str,
    note: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Iterator[Profiled]:
    """Profile each point in turn; a point's note is written once its traces are there.

    machine: the server's, where it is this one. what: is served, in a word; names begin with it.
    """
    for number, point in enumerate(points):
        note(number, len(points), f"{what}: {point}")
        name = f"{what}-{point.context}-{point.batch}-{new_run_id()}"
        request = {
            "name": name,
            "context": point.context,
            "batch": point.batch,
            "steps": steps,
            "vocabulary": _VOCABULARY,
            "seed": seed,
            "new_tokens": _NEW_TOKENS,
        }
        found = drive(request)
        traces = tuple(map(pathlib.Path, found["traces"]))
        about = {
            "version": 1,
            "at": now().isoformat(),
            "command": list(command),
            "revision": revision[0],
            "dirty": revision[1],
            "machine": None if machine is None else machine.as_json(),
            "asked": request,
            **{key: found.get(key) for key in ("server", "model", "beside", "ended", "step_us")},
            "traces": [path.name for path in traces],
        }
        file = folder / f"{name}.json"
        write_atomically(file, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        yield Profiled(point, traces, file)


@contextlib.contextmanager
def served(
    variant: Variant, *, scale: Scale, logs: pathlib.Path, batch: int, seed: int, graphs: bool
) -> Iterator[int]:
    """The port of a fresh server of a variant, with the model that `kd bench serve` times.

    batch: the most requests at once. logs: folder for the server's log.
    """
    start: Start = serving
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kd-profile-") as scratch:
        model = pathlib.Path(scratch) / f"model-{LAYERS}"
        scale.write_model(model, seed, scale.vocabulary, LAYERS)
        log = logs / f"{variant.name}.log"
        with launched(
            scale, variant, model=model, log=log, start=start, graphs=graphs, at_once=batch
        ) as service:
            yield service.port
