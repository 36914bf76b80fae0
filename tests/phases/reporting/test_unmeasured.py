"""What was not measured, and why."""

from __future__ import annotations

import pathlib

from kept_evidence import H200, blocked, ended, keep, phases, read

from phases.reporting.model import Entries, Table
from phases.reporting.unmeasured import bullets, not_shown, unmeasured_section

README = """\
| part | shown by running it | not shown |
|---|---|---|
| oracle (phase 0) | every gate | |
| kernel | every gate on one H200 | other GPUs: `compiled`, never run |

| command | what it does | why |
|---|---|---|
| `kd` | all | none |
"""


def test_each_gate_that_is_not_proven_says_why(tmp_path: pathlib.Path) -> None:
    keep(
        tmp_path,
        "h200",
        ended("op-check"),
        ended("mask-paths", stale=True),
        ended("mask-layouts", failed="row 3 differs"),
        blocked("peers", "no GPU here"),
        machine=H200,
    )
    entries = unmeasured_section(read(tmp_path)).blocks[0]
    assert isinstance(entries, Entries)
    why = {one.name: dict(one.facts)["why"] for one in entries.entries}
    assert "op-check" not in why
    assert why["mask-paths"].startswith("passed, and the code that it depends on has changed since")
    assert why["mask-layouts"].startswith("failed: row 3 differs")
    assert why["peers"].startswith("blocked: no GPU here")
    assert why["tree-properties"] == "no kept record has this gate"
    assert len(why) == sum(len(phase.gates) for phase in phases()) - 1


def test_readmes_last_column_counts_where_it_says_something(tmp_path: pathlib.Path) -> None:
    assert not_shown(README) == [("kernel", "other GPUs: compiled, never run")]
    assert not_shown("# no table") == []
    tables = [one for one in unmeasured_section(read(tmp_path)).blocks if isinstance(one, Table)]
    assert len(tables[0].rows) > 3  # of the real README


def test_items_of_a_list_are_lines() -> None:
    text = "## Not done\n\n- One\n  thing.\n- `Two`.\n\n## After\n\n- no\n"
    assert bullets(text, "Not done") == ["One thing.", "Two."]
    assert bullets(text, "Absent") == []
