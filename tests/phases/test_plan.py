"""Plans: their schema, and that they and the phases name the same gates."""

from __future__ import annotations

import pathlib

import pytest
import sample_gates

from kdtree_engine.errors import ConfigError, UnknownName
from phases.gate import Gate
from phases.plan import PlanStatus, disagreements, find_plan, load_plans
from phases.registry import load_phases

GOOD = """---
id: 10
title: The oracle
phase: 0
status: active
depends_on: []
date: 2026-01-02
decision: null
reopen_when: null
---
# The oracle

## Gates
- `right`: it is right, as `left` is not
  - `nested` is no gate
- `exact` - to the token

## Ledger
- `not-a-gate`
"""


def write(folder: pathlib.Path, text: str = GOOD, name: str = "0010-oracle.md") -> pathlib.Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_plan_has_its_front_matter_and_the_gates_of_its_section(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    (plan,) = load_plans(tmp_path)
    assert (plan.id, plan.phase, plan.status) == (10, 0, PlanStatus.ACTIVE)
    assert plan.gates == ("right", "exact")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("status: active", "status: started", "field status: Input should be 'draft', 'active'"),
        ("title: The oracle\n", "", "field title: is required"),
        ("phase: 0", "phase: 0\nowner: me", "field owner: is not a known field"),
        ("date: 2026-01-02", "date: soon", "field date: "),
        ("id: 10", "id: 11", "field id: 11 is not the number in the file's name"),
        ("depends_on: []", "depends_on: [99]", "field depends_on: there is no other plan 99"),
        ("depends_on: []", "depends_on: [10]", "field depends_on: there is no other plan 10"),
        ("status: active", "status: done", "'decision' is required where status is done"),
        ("status: active", "status: [", "front matter is not YAML"),
        ("phase: 0", "phase: 0\nphase: 1", "the field 'phase' stands there twice"),
        ("phase: 0", "phase: true", "field phase: Input should be a valid integer"),
        ("date: 2026-01-02", "date: 2026-13-45", "front matter is not YAML: month must be in"),
        ("---\nid: 10", "id: 10", "has no front matter"),
    ],
)
def test_a_broken_plan_is_one_line_with_file_and_field(
    tmp_path: pathlib.Path, old: str, new: str, complaint: str
) -> None:
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_plans(tmp_path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deferred_plan_says_when_to_reopen_it(tmp_path: pathlib.Path) -> None:
    deferred = GOOD.replace("active", "deferred").replace("decision: null", "decision: not now")
    write(tmp_path, deferred)
    with pytest.raises(ConfigError, match="'reopen_when' is required where status is deferred"):
        load_plans(tmp_path)


def test_a_plan_in_another_encoding_or_with_another_name_is_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path, name="oracle.md")
    with pytest.raises(ConfigError, match=r"a plan's file is called NNNN-slug\.md"):
        load_plans(tmp_path)
    (tmp_path / "oracle.md").unlink()
    write(tmp_path).write_bytes(GOOD.encode() + b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_plans(tmp_path)


@pytest.mark.parametrize("name", ["10", "0010", "oracle", "0010-oracle", "0010-oracle.md"])
def test_a_plan_is_found_by_number_file_or_slug(tmp_path: pathlib.Path, name: str) -> None:
    write(tmp_path)
    assert find_plan(load_plans(tmp_path), name).id == 10


def test_an_unknown_plan_comes_with_the_nearest_ones(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    with pytest.raises(UnknownName, match=r"unknown plan 'orakle' \(did you mean 0010-oracle"):
        find_plan(load_plans(tmp_path), "orakle")


def test_gates_that_only_one_side_names_are_disagreements(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    write(tmp_path, GOOD.replace("id: 10", "id: 20"), "0020-stray.md")
    phase = sample_gates.phase(0, Gate("right", ""), Gate("fast", ""), depends_on=())
    assert disagreements(load_plans(tmp_path), [phase]) == [
        "0010-oracle.md does not name the gate fast that phase 0 declares",
        "0010-oracle.md names the gate exact, which phase 0 does not declare",
        "0020-stray.md names gates or a phase, but no phase follows it",
    ]


def test_dependencies_that_differ_are_a_disagreement(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    phase = sample_gates.phase(0, Gate("right", ""), Gate("exact", ""), depends_on=(3,))
    assert disagreements(load_plans(tmp_path), [phase]) == [
        "0010-oracle.md depends on phases [], phase 0 on [3]"
    ]


def test_the_plans_of_this_repository_and_its_phases_agree(root: pathlib.Path) -> None:
    assert disagreements(load_plans(root / "plans"), load_phases()) == []
