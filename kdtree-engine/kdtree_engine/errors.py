"""The one exception tree of the project.

    KdError                 anything that a person can act on; `kd` prints it as one line
    +-- ConfigError         a file, argument or environment variable that is wrong (exit 2)
    |   +-- UnknownName     a phase, gate, host, plan or record that does not exist (exit 2)
    +-- MissingError        something this machine lacks: a library, a compiler, a GPU

It lives at the bottom of the house because every room above raises these; it imports the
standard library alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["ConfigError", "KdError", "MissingError", "UnknownName"]


class _Validation(Protocol):
    """What is needed of a pydantic ValidationError, so that the engine need not import pydantic."""

    def errors(self) -> list[Any]: ...


class KdError(Exception):
    """One clear line: what is wrong, where, and (in `remedy`) what to do about it."""

    def __init__(self, problem: str, *, remedy: str | None = None) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem} ({remedy})" if remedy else problem)


class ConfigError(KdError):
    """A file, argument or environment variable that is wrong."""

    @classmethod
    def from_validation(cls, place: object, error: _Validation) -> ConfigError:
        """Every fault that a schema found in `place` (a path, usually), each with its field."""
        faults = [(".".join(map(str, fault["loc"])), _plain(fault)) for fault in error.errors()]
        told = "; ".join(f"field {field or '(top level)'}: {plain}" for field, plain in faults)
        return cls(f"{place}: {told}")


class UnknownName(ConfigError):
    """A name that does not exist, with the nearest that do."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        known_names = f"known: {', '.join(names) or 'none'}"
        hint = f"did you mean {', '.join(near)}?" if near else known_names
        self.kind, self.name, self.near = kind, name, near
        super().__init__(f"unknown {kind} '{name}'", remedy=hint)


class MissingError(KdError):
    """Something that this machine lacks."""


def _plain(fault: dict[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "missing":
        return "is required"
    if fault["type"] == "extra_forbidden":
        return "is not a known field"
    given = repr(fault.get("input"))
    if len(given) > 60 or fault["type"] == "value_error":
        return message
    return f"{message}, got {given}"
