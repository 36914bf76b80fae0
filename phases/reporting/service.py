"""Decode speed of a service by context: on the kernel, on Triton's trees, without speculation."""

from __future__ import annotations

import dataclasses
import re

import pydantic

from phases.gate import GateKind, Unit
from phases.reporting.kept import Kept, KeptGate, documents
from phases.reporting.load import KIND as LOAD
from phases.reporting.load import load_blocks
from phases.reporting.model import (
    Block,
    Headline,
    Line,
    Lines,
    Missing,
    Section,
    Source,
    Table,
    number,
)
from phases.requirement import Requirement

__all__ = ["Server", "Speed", "SpeedRun", "service_headline", "service_section", "speed_runs"]

FOLDER = "serve"
_KERNEL, _TRITON, _PLAIN = "kdtree_mla-", "triton-", "triton-plain"


class Speed(pydantic.BaseModel):
    """At a prompt of `length` tokens. accept_length and step_us are 0 without speculation."""

    length: int = pydantic.Field(gt=0)
    tokens_per_second: float = pydantic.Field(gt=0, allow_inf_nan=False)
    accept_length: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    step_us: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)


class Server(pydantic.BaseModel):
    name: str
    speeds: tuple[Speed, ...] = ()

    def at(self, length: int) -> Speed | None:
        return next((one for one in self.speeds if one.length == length), None)


class _Bench(pydantic.BaseModel):
    """What is read of a document of `kd bench serve`."""

    graphs: bool
    layers: int
    nodes: int
    right: bool
    servers: tuple[Server, ...] = pydantic.Field(min_length=1)


class _Other(pydantic.BaseModel):
    """A benchmark of another kind, which nothing here knows."""


@dataclasses.dataclass(frozen=True)
class SpeedRun:
    """Servers that were timed one after the other in one run. right: all gave the right tokens."""

    name: str
    servers: tuple[Server, ...]
    source: Source
    right: bool = True

    def server(self, prefix: str) -> Server | None:
        """The first whose name begins so; `triton-` is the one with trees."""
        return next(
            (
                one
                for one in self.servers
                if one.name.startswith(prefix) and (one.name == _PLAIN) == (prefix == _PLAIN)
            ),
            None,
        )

    def times(self, prefix: str, length: int) -> float | None:
        """How many times as many tokens a second the kernel's server gives; None: not measured."""
        ours, theirs = self.server(_KERNEL), self.server(prefix)
        mine, other = (one.at(length) if one else None for one in (ours, theirs))
        return mine.tokens_per_second / other.tokens_per_second if mine and other else None

    def lengths(self) -> list[int]:
        return sorted({one.length for server in self.servers for one in server.speeds})


def service_section(kept: Kept) -> Section:
    runs, broken = speed_runs(kept)
    blocks: list[Block] = [_plot(run) for run in runs]
    for phase in kept.phases:
        blocks += [
            Missing(f"{gate.name}: {gate.title}", kept.why_not(gate.name))
            for gate in phase.gates
            if gate.kind is GateKind.SPEED
            and Requirement.SERVICE in gate.requires
            and kept.measured(gate.name) is None
        ]
    blocks += load_blocks(kept, FOLDER)
    if not runs:
        blocks.insert(0, Missing("speed of a service", "no run of kd bench serve is kept"))
    return Section(
        "service",
        "Service speed by context",
        "Decode tokens a second of a real SGLang server with one request: on this kernel with "
        "trees, on SGLang's own Triton backend with the same trees, and without speculation. One "
        "run is one machine and one model, a small one of random weights that the project makes; "
        "speeds are compared within a run alone. Tables under load are of many requests at once: "
        "the time to an answer's first token, between tokens, and between the pieces that arrive.",
        (*blocks, *broken),
    )


def service_headline(kept: Kept) -> Headline | None:
    """Against Triton's trees at the longest context of the newest run; none of wrong tokens."""
    runs, _ = speed_runs(kept)
    for run in (one for one in runs if one.right):
        for length in reversed(run.lengths()):
            if times := run.times(_TRITON, length):
                told = f"Triton's trees in the service, at {length:,} tokens"
                return Headline(f"{number(times)}x", told, "service", run.source)
    return None


def speed_runs(kept: Kept) -> tuple[list[SpeedRun], list[Missing]]:
    """Benchmarks first, the newest before others; then gates. And the files that are broken."""
    benches, broken = documents(kept, FOLDER, _Bench, lambda raw: "kind" not in raw)
    others, _ = documents(kept, FOLDER, _Other, lambda raw: raw.get("kind", LOAD) != LOAD)
    timed = [one for one in benches if any(server.speeds for server in one.content.servers)]
    why = "this report has no section for its kind"
    broken += [Missing(one.source.file, why, "Not shown") for one in others]
    why = "no server was timed in it"
    broken += [Missing(one.source.file, why, "Not shown") for one in benches if one not in timed]
    runs = [
        SpeedRun(
            f"{'CUDA graphs' if one.content.graphs else 'eager'}, {one.content.layers} layers, "
            f"trees of {one.content.nodes} nodes"
            + ("" if one.content.right else "; not every server gave the right tokens"),
            one.content.servers,
            one.source,
            one.content.right,
        )
        for one in sorted(timed, key=lambda one: one.source.date, reverse=True)
    ]
    gates = [gate.name for phase in kept.phases for gate in phase.gates]
    measured = [one for name in gates if (one := kept.measured(name))]
    return runs + [run for one in measured if (run := _of_gate(one))], broken


_FIGURE = re.compile(r"(?P<server>[\w-]+?)(?P<what>| accepts| step) at (?P<length>\d+)")


def _of_gate(one: KeptGate) -> SpeedRun | None:
    """A gate that timed servers; None for any other."""
    told: dict[str, dict[int, dict[str, float]]] = {}
    for figure in one.entry.figures:
        found = _FIGURE.fullmatch(figure.name)
        if found and (found["what"] or figure.unit is Unit.TOKENS_PER_SECOND):
            at = told.setdefault(found["server"], {}).setdefault(int(found["length"]), {})
            at[found["what"].strip()] = figure.value
    servers = tuple(
        Server(
            name=name,
            speeds=tuple(
                Speed(
                    length=length,
                    tokens_per_second=at[""],
                    accept_length=at.get("accepts", 0.0),
                    step_us=at.get("step", 0.0),
                )
                for length, at in sorted(lengths.items())
                if at.get("", 0.0) > 0
            ),
        )
        for name, lengths in told.items()
    )
    if not any(server.speeds for server in servers):
        return None
    return SpeedRun(f"gate {one.entry.gate}", servers, one.source)


def _plot(run: SpeedRun) -> Lines:
    return Lines(
        f"Decode speed, {run.name}",
        "prompt tokens",
        "tokens a second",
        tuple(
            Line(
                _told(server.name),
                tuple((one.length, one.tokens_per_second) for one in server.speeds),
            )
            for server in run.servers
            if server.speeds
        ),
        run.source,
        data=_table(run),
    )


def _table(run: SpeedRun) -> Table:
    rows = []
    for length in run.lengths():
        for server in run.servers:
            if speed := server.at(length):
                rows.append((f"{length:,}", _told(server.name), *_cells(run, server, speed)))
    return Table.of(
        f"Decode speed, {run.name}",
        (
            *("#prompt tokens", "server", "#tok/s"),
            *("#the kernel over it", "#by the step", "#accepted a step", "#ms a step"),
        ),
        rows,
    )


def _cells(run: SpeedRun, server: Server, speed: Speed) -> tuple[str, ...]:
    ours = run.server(_KERNEL)
    mine = ours.at(speed.length) if ours and ours is not server else None
    return (
        number(speed.tokens_per_second),
        f"{number(mine.tokens_per_second / speed.tokens_per_second)}x" if mine else "",
        f"{number(speed.step_us / mine.step_us)}x"
        if mine and mine.step_us and speed.step_us
        else "",
        number(speed.accept_length) if speed.accept_length else "",
        number(speed.step_us / 1e3) if speed.step_us else "",
    )


def _told(name: str) -> str:
    """`triton-9` is Triton with trees of nine nodes."""
    if name == _PLAIN:
        return "Triton, no speculation"
    for prefix, backend in ((_KERNEL, "kernel"), (_TRITON, "Triton")):
        nodes = name.removeprefix(prefix)
        if name.startswith(prefix) and nodes.isdecimal():
            return f"{backend}, trees of {nodes}"
    return name
