"""The rule table `rules.toml`: from a kernel's name to a class of work, and to its lever."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kdtree_engine.errors import ConfigError

__all__ = [
    "COMMUNICATION",
    "COPIES",
    "HOST",
    "IDLE",
    "REPLAY",
    "TABLE",
    "UNKNOWN",
    "Rule",
    "Rules",
    "Stage",
    "load_rules",
]

TABLE = pathlib.Path(__file__).parent / "rules.toml"

UNKNOWN = "unknown"
"""The class of kernels that no rule fits."""
IDLE = "idle gaps"
"""No kernel runs, and the next one has been launched."""
HOST = "host scheduling"
"""No kernel runs, and the next one has not been launched yet."""
COPIES = "memory copies"
COMMUNICATION = "communication"
"""Of these two a trace tells bytes, and of the second one rank's is compared with another's."""
REPLAY = "replay"
"""The stage of kernels of a CUDA graph that was launched outside every range."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Host ranges by name. starts: `decode` or `other` where such a range starts a step."""

    name: str
    patterns: tuple[re.Pattern[str], ...]
    starts: str | None
    source: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """Kernels by name, and by the stage that launched them where `stages` is not empty."""

    kernel_class: str
    patterns: tuple[re.Pattern[str], ...]
    stages: tuple[str, ...]
    source: str

    def fits(self, kernel: str, stage: str | None) -> bool:
        if self.stages and stage not in self.stages:
            return False
        return any(pattern.search(kernel) for pattern in self.patterns)


@dataclasses.dataclass(frozen=True)
class Rules:
    """The table. levers: a sentence for each class, in the order of the file."""

    stages: tuple[Stage, ...]
    rules: tuple[Rule, ...]
    levers: Mapping[str, str]
    host_work: tuple[re.Pattern[str], ...] = ()

    def classify(self, kernel: str, stage: str | None = None) -> str:
        """The class of the first rule that fits, else `unknown`. kernel: its demangled name."""
        for rule in self.rules:
            if rule.fits(kernel, stage):
                return rule.kernel_class
        return UNKNOWN

    def stage(self, span: str) -> Stage | None:
        """What a host range with this name is; None: it tells nothing."""
        for stage in self.stages:
            if any(pattern.search(span) for pattern in stage.patterns):
                return stage
        return None

    def tells_host_work(self, span: str) -> bool:
        """Whether a host range with this name says what the host is at."""
        return any(pattern.search(span) for pattern in self.host_work)


@functools.cache
def load_rules(path: pathlib.Path = TABLE) -> Rules:
    """ConfigError, with file and entry, where the table is not as its first lines say."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    classes = _entries(path, table, "class", {"name", "lever"})
    levers = {entry["name"]: entry["lever"] for entry in classes}
    for needed in (UNKNOWN, IDLE, HOST, COPIES, COMMUNICATION):
        if needed not in levers:
            raise ConfigError(f"{path} lacks the class '{needed}'")
    stages = tuple(
        Stage(entry["name"], _patterns(path, entry), entry.get("starts"), entry["source"])
        for entry in _entries(path, table, "stage", {"name", "match", "source"}, {"starts"})
    )
    rules = tuple(
        Rule(
            entry["class"],
            _patterns(path, entry),
            tuple(entry.get("stages", ())),
            entry["source"],
        )
        for entry in _entries(path, table, "rule", {"class", "match", "source"}, {"stages"})
    )
    known = {stage.name for stage in stages} | {REPLAY}
    for number, rule in enumerate(rules, 1):
        if rule.kernel_class not in levers:
            raise ConfigError(f"{path}, rule {number}: there is no class '{rule.kernel_class}'")
        if wrong := set(rule.stages) - known:
            raise ConfigError(f"{path}, rule {number}: there is no stage {sorted(wrong)}")
    host_work = tuple(
        pattern
        for entry in _entries(path, table, "host", {"match", "source"})
        for pattern in _patterns(path, entry)
    )
    return Rules(stages, rules, levers, host_work)


def _entries(
    path: pathlib.Path,
    table: Mapping[str, Any],
    kind: str,
    needed: AbstractSet[str],
    allowed: AbstractSet[str] = frozenset(),
) -> Sequence[Mapping[str, Any]]:
    entries = table.get(kind, [])
    for number, entry in enumerate(entries, 1):
        if lacking := needed - set(entry):
            raise ConfigError(f"{path}, {kind} {number} lacks {', '.join(sorted(lacking))}")
        if extra := set(entry) - needed - allowed:
            raise ConfigError(f"{path}, {kind} {number}: unknown {', '.join(sorted(extra))}")
    return list(entries)


def _patterns(path: pathlib.Path, entry: Mapping[str, Any]) -> tuple[re.Pattern[str], ...]:
    try:
        return tuple(re.compile(pattern) for pattern in entry["match"])
    except re.error as error:
        raise ConfigError(f"{path}: {error.pattern!r} is no regular expression: {error}") from None
