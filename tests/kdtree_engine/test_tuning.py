"""The tuning table: what a launch is told, what a broken table is refused for, and who it binds."""

from __future__ import annotations

import copy
import json
import pathlib
import types
from typing import Any

import pytest
import torch

from kdtree_engine import attention, library, tuning
from kdtree_engine.build import ARCHITECTURES
from kdtree_engine.errors import ConfigError
from kdtree_engine.tuning import (
    BUILT_IN,
    Configuration,
    Measured,
    choice,
    load_table,
    parse_table,
    table_of,
    table_path,
    table_text,
)

UNMEASURED = {"row_tile": 24, "block_tokens": 16, "min_blocks": 0, "unmeasured": "predicted"}
TIME = {"batch": 1, "heads": 8, "nodes": 9, "prefix": 4096, "us": 20.5}
MEASURED = {
    "row_tile": 32,
    "block_tokens": 16,
    "min_blocks": 2,
    "measured": {"gpu": "a GPU", "date": "2026-11-29", "record": "a.json", "times": [TIME]},
}
TABLE: dict[str, Any] = {
    "version": 1,
    "architecture": "sm_120",
    "body": "mma",
    "bodies": {
        "mma": {
            "deterministic": UNMEASURED,
            "entries": [
                {"rows_up_to": 72, "batch_up_to": 4, **MEASURED},
                {"rows_up_to": 72, "batch_up_to": None, **UNMEASURED},
                {"rows_up_to": None, "batch_up_to": None, **UNMEASURED, "row_tile": 16},
            ],
        }
    },
}


@pytest.mark.parametrize(
    ("rows", "batch", "row_tile"),
    [(1, 1, 32), (72, 4, 32), (72, 5, 24), (73, 1, 16), (9000, 64, 16)],
)
def test_the_first_entry_that_covers_a_launch_is_taken(
    rows: int, batch: int, row_tile: int
) -> None:
    body = parse_table(TABLE, "here").chosen()
    assert body is not None
    assert body.entry(rows, batch, deterministic=False).configuration.row_tile == row_tile


def changed(path: str, value: object) -> dict[str, Any]:
    """TABLE with the value at a path, such as `bodies.mma.body`, replaced or (by ...) removed."""
    table = copy.deepcopy(TABLE)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = table
    for part in way:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return table


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 2, "version: is 2, this program reads 1"),
        ("body", "wgmma", "body: 'wgmma' is none of those in 'bodies'"),
        ("colour", "red", "colour: is not a known field"),
        ("bodies.mma.deterministic", ..., "bodies.mma.deterministic: is required"),
        ("bodies.mma.deterministic.rows_up_to", 8, "rows_up_to: is not a known field"),
        ("bodies.mma.entries", [], "entries: the last has no limits"),
        ("bodies.mma.entries.2.batch_up_to", 8, "entries: the last has no limits"),
        ("bodies.mma.entries.1", ..., "entries: rows_up_to 72 has no entry without batch_up_to"),
        ("bodies.mma.entries.0.rows_up_to", 80, "entries: are sorted by rows_up_to"),
        ("bodies.mma.entries.0.row_tile", "32", r"entries\[0\].row_tile: expected a whole number"),
        ("bodies.mma.entries.0.row_tile", True, r"entries\[0\].row_tile: expected a whole number"),
        ("bodies.mma.entries.0.min_blocks", -1, "min_blocks: expected 0..2147483647, got -1"),
        ("bodies.mma.entries.0.rows_up_to", 10**400, r"rows_up_to: expected 1\.\.2147483647"),
        ("bodies.mma.entries.0.measured.times.0.us", 10**400, "us: expected a positive number"),
        ("bodies.mma.entries.0.unmeasured", "both", "is there where 'unmeasured' is not"),
        ("bodies.mma.entries.1.unmeasured", ..., "is there where 'unmeasured' is not"),
        ("bodies.mma.entries.1.unmeasured", "", "unmeasured: expected a text"),
        ("bodies.mma.entries.0.measured.times", [], "times: has no time"),
        ("bodies.mma.entries.0.measured.gpu", ..., "measured.gpu: is required"),
        ("bodies.mma.entries.0.measured.times.0.us", 0, "us: expected a positive number"),
        ("bodies.other", {"deterministic": UNMEASURED, "entries": []}, "entries: the last has"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line_that_names_the_field(
    path: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^here: field .*{said}"):
        parse_table(changed(path, value), "here")


def test_a_body_that_no_kernel_has_is_refused() -> None:
    fields = changed("bodies.tcgen05", TABLE["bodies"]["mma"])
    with pytest.raises(ConfigError, match=r"bodies\.tcgen05: is none of mma, wgmma"):
        parse_table(fields, "here")


def test_a_file_is_named_after_its_architecture(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sm_90.json"
    with pytest.raises(ConfigError, match=r"sm_90\.json: cannot be read"):
        load_table(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"sm_90\.json: is not JSON"):
        load_table(path)
    path.write_text('{"version": 1, "version": 1}')
    with pytest.raises(ConfigError, match="the name 'version' is there twice"):
        load_table(path)
    path.write_text(json.dumps(TABLE))
    with pytest.raises(ConfigError, match="architecture: sm_120 is not the file's name"):
        load_table(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tables_of_the_package_are_written_as_they_are_read(architecture: str) -> None:
    path = table_path(architecture)
    assert table_text(load_table(path)) == path.read_text(encoding="utf-8")
    assert parse_table(json.loads(table_text(parse_table(TABLE, "here"))), "here") == parse_table(
        TABLE, "here"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("body", [None, "mma", "wgmma"])
def test_deterministic_mode_has_one_configuration_for_an_architecture(
    architecture: str, body: str | None
) -> None:
    """Tiles differ in the order of their sums, and a request's bits may not follow its batch."""
    seen = {
        choice(architecture, rows, batch, deterministic=True, body=body)
        for rows in (1, 8, 24, 72, 136, 16_384)
        for batch in (1, 2, 4, 16, 64)
    }
    assert len(seen) == 1


def test_the_default_mode_does_follow_the_rows() -> None:
    tiles = [
        choice("sm_90", rows, 1, deterministic=False, body=None).row_tile
        for rows in (8, 24, 40, 72, 136)
    ]
    assert tiles == [16, 24, 40, 72, 72]


@pytest.mark.parametrize(("body", "tokens"), [("mma", 32), ("wgmma", 64)])
def test_the_body_of_sm_90_is_switched_by_one_word(body: str, tokens: int) -> None:
    text = table_path("sm_90").read_text()
    now = load_table(table_path("sm_90")).body
    assert text.count(f'"body": "{now}"') == 1
    switched = parse_table(
        json.loads(text.replace(f'"body": "{now}"', f'"body": "{body}"')), "here"
    )
    taken = switched.chosen()
    assert taken is not None
    assert taken.entry(72, 1, deterministic=False).configuration.block_tokens == tokens
    # Asked for by name, each is had whatever the table says.
    for name in ("mma", "wgmma"):
        assert switched.chosen(name) is switched.bodies[name]


def test_a_gpu_without_a_table_or_a_body_gets_the_librarys_own_choice() -> None:
    assert choice("sm_86", 72, 1, deterministic=False, body=None) == BUILT_IN
    assert choice("sm_120", 72, 1, deterministic=False, body="wgmma") == BUILT_IN


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_120"])
def test_what_was_never_measured_is_plan_15s_prediction(architecture: str) -> None:
    """The fewest tiles, as each reads the KV rows from L2 again; then the least padding."""
    for rows in range(1, 1100):
        fewest = -(-rows // 32)
        tile = next(tile for tile in (16, 24, 32) if -(-rows // tile) == fewest)
        found = choice(architecture, rows, 1, deterministic=False, body=None)
        assert found == Configuration(tile, 16, 0), rows
    table = table_of(architecture)
    assert table is not None
    assert not any(isinstance(entry.provenance, Measured) for _, entry in table.everything())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("asked", "body"), [("", None), ("1", "wgmma"), ("0", "mma")])
def test_a_launch_brings_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    deterministic: bool,
    asked: str,
    body: str | None,
) -> None:
    """Dry: a library that notes its arguments, with what a GPU would say of itself."""
    told: list[Any] = []

    def launch(*arguments: Any) -> None:
        told.extend(arguments[-3:])

    fake = types.SimpleNamespace(
        tree_verify_attention=launch,
        workspace_bytes=lambda *_: 16,
        set_tuning=lambda *_: None,
    )
    monkeypatch.setenv("KDTREE_WGMMA", asked)
    monkeypatch.delenv("KDTREE_CHECK", raising=False)
    monkeypatch.setattr(library, "load", lambda path: fake)
    monkeypatch.setattr(attention, "_processors", lambda index: 132)
    monkeypatch.setattr(attention, "_architecture", lambda index: "sm_90")
    (tmp_path / "any.so").touch()
    q, pool = torch.zeros(10, 8, 576), torch.zeros(64, 576)
    steps = torch.tensor([0, 5, 10])
    with library.using(tmp_path / "any.so"):
        attention._cuda(
            q, pool, steps, steps, None, torch.arange(10), None, None, 1.0, 5, deterministic,
            torch.zeros(10, 8, 512), None,
        )  # fmt: skip
    written = json.loads(table_path("sm_90").read_text())
    said = written["bodies"][body or written["body"]]
    (of_40_rows,) = [one for one in said["entries"] if one["rows_up_to"] == 40]
    wanted = said["deterministic"] if deterministic else of_40_rows
    assert told == [wanted[name] for name in ("row_tile", "block_tokens", "min_blocks")]


def test_a_broken_table_of_this_gpu_is_refused_and_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "sm_99.json").write_text("{}")
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    with pytest.raises(ConfigError, match=r"sm_99\.json: field version: is required"):
        choice("sm_99", 72, 1, deterministic=False, body=None)
