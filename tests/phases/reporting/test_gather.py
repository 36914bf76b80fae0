"""The whole report of evidence that another program wrote: every rendering can be written."""

from __future__ import annotations

import io
import json
import pathlib

import pytest
from kept_evidence import H200, ROOT, ended, imbalance, keep, read
from rich.console import Console

from phases.checkout import Checkout
from phases.gate import Unit
from phases.reporting import model, terminal
from phases.reporting.gather import gather
from phases.reporting.page import as_html

HALF = "a \ud800 half \x1b[2J"


def test_half_of_a_surrogate_pair_and_escapes_are_shown_as_a_mark(tmp_path: pathlib.Path) -> None:
    keep(
        tmp_path,
        "a",
        ended("paged-traps", (("HALF", 3, Unit.COUNT),), machine=H200, failed="HALF"),
        machine=H200,
    )
    text = (tmp_path / "a.json").read_text().replace('"HALF"', json.dumps(HALF))
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "profile").mkdir()
    classes = [{"name": HALF, "us": 5, "lever": HALF}]
    profile = {"version": 1, "step_us": 5, "classes": classes, "remarks": [HALF], "revision": HALF}
    (tmp_path / "profile/b.json").write_text(json.dumps(profile))
    report = gather(read(tmp_path), Checkout(ROOT, tmp_path / "state"), imbalance)
    terminal.show(report, Console(file=(shown := io.StringIO()), width=120))
    told = json.dumps(model.as_json(report), ensure_ascii=False)
    for text in (as_html(report), told, shown.getvalue()):
        assert text.encode("utf-8")
        assert "a ? half ?[2J" in text
        assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("plain, ü, 漢字", "plain, ü, 漢字"),
        ("two\nlines\t.", "two\nlines\t."),
        ("\udfff\x07", "??"),
    ],
)
def test_what_can_be_written_stays(told: str, expected: str) -> None:
    cell = model.Cell(told, model.Tone.GOOD)
    assert model.writable((cell,)) == (model.Cell(expected, model.Tone.GOOD),)
