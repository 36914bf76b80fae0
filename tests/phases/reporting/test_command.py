"""`kd report`, as a person types it."""

from __future__ import annotations

import json
import pathlib

import click.testing
import pytest
from kept_evidence import imbalance

import tasks
from kdtree_engine.errors import ConfigError
from phases.reporting import gather as gathering


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn router of the real command takes seconds."""
    whole = gathering.gather
    monkeypatch.setattr(
        gathering, "gather", lambda kept, checkout: whole(kept, checkout, imbalance)
    )


def kd(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(tasks.cli, ["report", *map(str, arguments)])


def test_in_words() -> None:
    run = kd()
    assert run.exit_code == 0, run.output
    assert "Phases and gates" in run.stdout
    assert "What was not measured, and why" in run.stdout


def test_as_a_page_and_as_json(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "new/report.html"
    file.parent.mkdir()
    run = kd("--html", file)
    assert run.exit_code == 0, run.output
    assert run.stdout == f"{file}\n"
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [one.name for one in file.parent.iterdir()] == ["report.html"]  # nothing half-written
    told = json.loads(kd("--json").stdout)
    assert told["sections"][0]["id"] == "gates"


def test_a_folder_cannot_be_written_to(tmp_path: pathlib.Path) -> None:
    run = kd("--html", tmp_path)
    assert run.exit_code == 2
    assert "is a directory" in run.output


def test_a_folder_that_is_not_there_is_no_place_for_it(tmp_path: pathlib.Path) -> None:
    run = kd("--html", tmp_path / "mistyped" / "report.html")
    assert isinstance(run.exception, ConfigError)  # exit code 2
    assert "there is no folder" in str(run.exception)
    assert not (tmp_path / "mistyped").exists()
