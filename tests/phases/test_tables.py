"""Tables of figures in documents are what the kept records say."""

from __future__ import annotations

import pathlib

import pytest
from sample_gates import MACHINE

from kdtree_engine.errors import ConfigError
from phases.checkout import find_checkout
from phases.evidence import FigureRecord, GateRecord, Record, Store, new_run_id, now
from phases.gate import GateKind, Status, Unit
from phases.tables import documents, filled

RECORD = Record(
    run=new_run_id(),
    command=("kd",),
    host="local",
    machine=MACHINE,
    revision="f" * 40,
    dirty=False,
    seed=1,
    started=now(),
    finished=now(),
    gates=(
        GateRecord(
            phase="p0_sample",
            gate="right",
            kind=GateKind.CORRECTNESS,
            status=Status.PASSED,
            figures=(FigureRecord(name="prompts", value=200, unit=Unit.COUNT),),
            content="a" * 64,
            seconds=1.25,
        ),
    ),
)


def document(folder: pathlib.Path, head: str) -> pathlib.Path:
    path = folder / "README.md"
    path.write_text(f"before\n<!-- {head} -->\nold figures\n<!-- /figures -->\nafter\n")
    return path


def test_a_table_of_a_record_has_a_row_for_each_gate(tmp_path: pathlib.Path) -> None:
    text = filled(document(tmp_path, "figures: first"), {"first": RECORD})
    assert "old figures" not in text
    assert "| p0_sample | right | passed | 200 prompts | 1.2 |" in text
    assert "revision ffffffffffff;" in text
    assert text.startswith("before\n<!-- figures: first -->\n| phase |")
    assert text.endswith("<!-- /figures -->\nafter\n")


def test_a_table_of_a_gate_has_a_row_for_each_figure(tmp_path: pathlib.Path) -> None:
    text = filled(document(tmp_path, "figures: first right"), {"first": RECORD})
    assert "| prompts | 200 | count |" in text


def test_the_output_of_a_run_is_what_kd_printed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- output: first -->\nold\n<!-- /output -->\n")
    assert filled(path, {"first": RECORD}) == (
        "<!-- output: first -->\n```\n"
        "phase      gate   status  figure       seconds\n"
        "p0_sample  right  passed  200 prompts  1.2\n"
        f"1 gate: 1 passed; evidence {RECORD.run}\n"
        "```\n<!-- /output -->\n"
    )


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        ("figures: firts", "unknown kept record in README.md 'firts' (did you mean first?)"),
        ("figures: first wrong", "unknown gate of"),
        ("figures first", "is broken"),
        ("Figures: first", "is broken"),
    ],
)
def test_a_mark_that_points_nowhere_is_one_line(
    tmp_path: pathlib.Path, head: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        filled(document(tmp_path, head), {"first": RECORD})
    assert complaint in str(caught.value)


def test_the_tables_in_this_repository_are_what_its_kept_evidence_says(root: pathlib.Path) -> None:
    checkout = find_checkout()
    kept = Store(checkout.evidence, checkout.kept_evidence, checkout.root).kept_records()
    for path in documents(root):
        assert filled(path, kept) == path.read_text(), f"run: kd evidence tables ({path.name})"
