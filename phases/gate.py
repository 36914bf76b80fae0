"""What a gate is, what it may answer, and what it may use while it runs.

A gate is a function that takes a `Context` and returns figures. It fails by raising
`GateFailure` with a kind; any other exception is an `error` of the gate itself. It never prints,
writes nothing outside `Context.scratch` but caches that a build keeps, and never decides its own
status.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections.abc import Callable, Sequence

from phases.requirement import Requirement

__all__ = [
    "Check",
    "Context",
    "FailureKind",
    "Figure",
    "Gate",
    "GateFailure",
    "GateKind",
    "Status",
    "Unit",
]


class Status(enum.StrEnum):
    """How a gate ended. Only PASSED counts as passed."""

    PASSED = "passed"
    FAILED = "failed"
    """The thing under test is wrong; `FailureKind` says how."""
    ERROR = "error"
    """The gate itself broke: nothing is known about the thing under test."""
    BLOCKED = "blocked"
    """This machine lacks something, or a phase that this one builds on failed."""
    UNWRITTEN = "unwritten"
    """The gate is declared in its plan and has no body yet."""
    INTERRUPTED = "interrupted"
    """The run died or was stopped before the gate ended."""


class FailureKind(enum.StrEnum):
    """In what way the thing under test failed."""

    COMPILE = "compile"
    LAUNCH = "launch"
    SHAPE = "shape"
    DTYPE = "dtype"
    NUMERICAL = "numerical"
    TOKEN_MISMATCH = "token_mismatch"
    TIMEOUT = "timeout"
    TOO_SLOW = "too_slow"


class GateKind(enum.StrEnum):
    """Correctness gates say whether it is right. Speed gates say how fast, and only then."""

    CORRECTNESS = "correctness"
    SPEED = "speed"


class Unit(enum.StrEnum):
    """Units of figures. Whether a figure is about speed follows from its unit, not from a flag."""

    COUNT = "count"
    RATIO = "ratio"
    PROBABILITY = "probability"
    RELATIVE_ERROR = "relative error"
    BYTES = "bytes"
    TOKENS = "tokens"
    MICROSECONDS = "us"
    PREDICTED_MICROSECONDS = "us predicted"
    """By a model: nothing was timed, so it is no figure of speed."""
    SECONDS = "s"
    TOKENS_PER_SECOND = "tok/s"
    TERABYTES_PER_SECOND = "TB/s"
    TERAFLOPS = "TFLOP/s"
    SPEEDUP = "x faster"
    CEILING_FRACTION = "of ceiling"

    @property
    def is_speed(self) -> bool:
        return self in _SPEED_UNITS


_SPEED_UNITS = frozenset(
    {
        Unit.MICROSECONDS,
        Unit.SECONDS,
        Unit.TOKENS_PER_SECOND,
        Unit.TERABYTES_PER_SECOND,
        Unit.TERAFLOPS,
        Unit.SPEEDUP,
        Unit.CEILING_FRACTION,
    }
)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number that a gate measured: `Figure("prompts", 200, Unit.COUNT)`.

    The first figure that a gate returns is its headline: the one that tables show.
    """

    name: str
    value: float
    unit: Unit


class GateFailure(Exception):
    """The thing under test is wrong. `figures` may carry what was measured up to then."""

    def __init__(self, kind: FailureKind, message: str, figures: Sequence[Figure] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.figures = tuple(figures)


def _silent(done: int, total: int, note: str) -> None:
    """Progress for a gate that nobody watches."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a gate may use.

    seed: seed of every random draw that the gate makes.
    scratch: an empty folder that is removed after the gate.
    progress: `progress(done, total, note)`, to be called often on long work.
    """

    seed: int
    scratch: pathlib.Path
    progress: Callable[[int, int, str], None] = _silent


Check = Callable[[Context], Sequence[Figure]]


@dataclasses.dataclass(frozen=True)
class Gate:
    """One acceptance gate of one phase.

    name: kebab-case, unique over all phases: what plans, `--only` and evidence call it.
    title: one line for a person.
    check: the gate's body, or None while it is unwritten.
    requires: what the machine must have; where it is absent, the gate is `blocked`.
    time_limit_s: seconds after which the gate's process is ended and it fails with `timeout`.
    data: globs, from the repository root, of files that the gate depends on beside the Python
        modules it imports (those are found by themselves): CUDA sources, tables, kept evidence.
    token_exact: whether it says that the live service gives the right tokens; nobody can force a
        promotion past such a gate.
    """

    name: str
    title: str
    check: Check | None = None
    kind: GateKind = GateKind.CORRECTNESS
    requires: tuple[Requirement, ...] = ()
    time_limit_s: float = 600.0
    data: tuple[str, ...] = ()
    token_exact: bool = False

    def __post_init__(self) -> None:
        # The words of `--require` do as well as the members; anything else is refused here.
        object.__setattr__(self, "requires", tuple(map(Requirement, self.requires)))
