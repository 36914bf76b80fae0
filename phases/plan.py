"""The design documents under plans/: read, checked against their schema, held against the phases.

A plan is `plans/NNNN-slug.md`: YAML front matter, then Markdown. Its section `## Gates` is a list
whose items each begin with a gate's name in backticks; those names and the gates that the phase
declares must be the same.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import frontmatter
import pydantic
import yaml
from frontmatter.default_handlers import YAMLHandler

from kdtree_engine.errors import ConfigError, UnknownName
from phases.phase import Phase

__all__ = ["Plan", "PlanStatus", "disagreements", "find_plan", "load_plans"]

_FILE_NAME = re.compile(r"(\d{4})-[a-z0-9]+(-[a-z0-9]+)*\.md")
_GATES_SECTION = re.compile(r"^## Gates[ \t]*\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_GATE_ITEM = re.compile(r"^[-*] `([^`]+)`", re.MULTILINE)


class PlanStatus(enum.StrEnum):
    """Where a plan stands."""

    DRAFT = "draft"
    ACTIVE = "active"
    DONE = "done"
    DEFERRED = "deferred"


class _FrontMatter(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    # Strict numbers: `phase: true` is a mistake and not phase 1.
    id: pydantic.StrictInt = pydantic.Field(ge=0, le=9999)
    title: str = pydantic.Field(min_length=1)
    phase: pydantic.StrictInt | None
    status: PlanStatus
    depends_on: tuple[pydantic.StrictInt, ...]
    date: datetime.date
    decision: str | None
    reopen_when: str | None

    @pydantic.model_validator(mode="after")
    def _ended_plans_say_what_was_decided(self) -> _FrontMatter:
        if self.status in (PlanStatus.DONE, PlanStatus.DEFERRED) and not self.decision:
            raise ValueError(f"'decision' is required where status is {self.status}")
        if self.status is PlanStatus.DEFERRED and not self.reopen_when:
            raise ValueError("'reopen_when' is required where status is deferred")
        return self


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that stands twice is a fault: plain YAML keeps the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the field '{key}' stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _FrontMatterHandler(YAMLHandler):
    def load(self, fm: str, **kwargs: object) -> Any:
        return yaml.load(fm, Loader=_UniqueKeys)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One design document. `gates` are the names in its section `## Gates`, in its order."""

    path: pathlib.Path
    id: int
    title: str
    phase: int | None
    status: PlanStatus
    depends_on: tuple[int, ...]
    date: datetime.date
    decision: str | None
    reopen_when: str | None
    text: str
    gates: tuple[str, ...]


def load_plans(folder: pathlib.Path) -> list[Plan]:
    """Every plan in `folder`, by number. Raises ConfigError naming the file and the field."""
    plans = [_load(path) for path in sorted(folder.glob("*.md"))]
    known = {plan.id: plan for plan in plans}
    if len(known) < len(plans):
        twice = next(plan for plan in plans if known[plan.id] is not plan)
        raise ConfigError(f"{known[twice.id].path}: field id: {twice.id} is also {twice.path.name}")
    for plan in plans:
        for other in plan.depends_on:
            if other not in known or other == plan.id:
                raise ConfigError(f"{plan.path}: field depends_on: there is no other plan {other}")
    return plans


def find_plan(plans: Iterable[Plan], wanted: str) -> Plan:
    """The plan with the number, the file name or the slug `wanted`; else UnknownName."""
    listed = list(plans)
    for plan in listed:
        number = f"{plan.id:04d}"
        if wanted in (str(plan.id), number, plan.path.name, plan.path.stem, plan.path.stem[5:]):
            return plan
    raise UnknownName("plan", wanted, [plan.path.stem for plan in listed])


def disagreements(plans: Sequence[Plan], phases: Sequence[Phase]) -> list[str]:
    """What plans and phases say differently, one line each; empty when they agree."""
    found: list[str] = []
    by_id = {plan.id: plan for plan in plans}
    for phase in phases:
        plan = by_id.get(phase.plan)
        if plan is None or plan.phase != phase.number:
            found.append(
                f"phase {phase.number} follows plan {phase.plan:04d}, which is not its plan"
            )
            continue
        declared = [gate.name for gate in phase.gates]
        found += [
            f"{plan.path.name} does not name the gate {name} that phase {phase.number} declares"
            for name in declared
            if name not in plan.gates
        ]
        found += [
            f"{plan.path.name} names the gate {name}, which phase {phase.number} does not declare"
            for name in plan.gates
            if name not in declared
        ]
        plans_below = (by_id[other].phase for other in plan.depends_on)
        wanted = {number for number in plans_below if number is not None}
        if wanted != set(phase.depends_on):
            found.append(
                f"{plan.path.name} depends on phases {sorted(wanted)}, "
                f"phase {phase.number} on {sorted(phase.depends_on)}"
            )
    follow = {phase.plan for phase in phases}
    found += [
        f"{plan.path.name} names gates or a phase, but no phase follows it"
        for plan in plans
        if (plan.gates or plan.phase is not None) and plan.id not in follow
    ]
    return found


def _load(path: pathlib.Path) -> Plan:
    name = _FILE_NAME.fullmatch(path.name)
    if name is None:
        raise ConfigError(f"{path}: a plan's file is called NNNN-slug.md", remedy="rename it")
    try:
        source = path.read_text(encoding="utf-8-sig")
        fields, text = frontmatter.parse(source, handler=_FrontMatterHandler())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: front matter is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not fields:
        raise ConfigError(
            f"{path}: has no front matter", remedy="begin it with '---', see plans/0000"
        )
    try:
        head = _FrontMatter.model_validate(fields)
    except pydantic.ValidationError as error:
        raise ConfigError.from_validation(path, error) from error
    if head.id != int(name.group(1)):
        raise ConfigError(f"{path}: field id: {head.id} is not the number in the file's name")
    section = _GATES_SECTION.search(text + "\n")
    gates = tuple(_GATE_ITEM.findall(section.group(1))) if section else ()
    return Plan(
        path=path,
        text=text,
        gates=gates,
        **{f: getattr(head, f) for f in _FrontMatter.model_fields},
    )
