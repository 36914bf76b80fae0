"""Decisions with what they rest on, in the plans' words."""

from __future__ import annotations

import pathlib

from kept_evidence import blocked, keep, read

from phases.reporting.decisions import decisions_section, paragraphs, plain
from phases.reporting.model import Entries

PLAN = """\
# A title

## Context

A *fixed* count costs [24%](x) at `S * B * R` bytes.

No figure here.

| a | table |

## Next
"""


def test_deferrals_come_first_and_say_what_reopens_them(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "cpu", blocked("deferral-figures"))
    kept = read(tmp_path)
    (entries,) = decisions_section(kept).blocks
    assert isinstance(entries, Entries)
    first, facts = entries.entries[0], dict(entries.entries[0].facts)
    plan = next(plan for plan in kept.plans if plan.id == 17)
    assert (first.name[:4], first.standing.text) == ("0017", "deferred")
    assert facts["reopened by"] == plan.reopen_when
    assert facts["its gates"].startswith("blocked: deferral-figures")
    assert "%" in facts["rests on"]


def test_every_plan_with_a_decision_is_there(tmp_path: pathlib.Path) -> None:
    kept = read(tmp_path)
    (entries,) = decisions_section(kept).blocks
    assert isinstance(entries, Entries)
    assert {one.name[:4] for one in entries.entries} == {
        f"{plan.id:04d}" for plan in kept.plans if plan.decision
    }
    assert all(told for one in entries.entries for _, told in one.facts)


def test_markdown_is_told_without_its_marks() -> None:
    assert paragraphs(PLAN, "Context") == [
        "A fixed count costs 24% at S * B * R bytes.",
        "No figure here.",
    ]
    assert paragraphs(PLAN, "Absent") == []
    assert plain("**bold** and *soft* 2 * 3 * 4") == "bold and soft 2 * 3 * 4"
