"""The bottleneck, from what `kd profile --json` writes of the traces of the profiler's tests."""

from __future__ import annotations

import json
import pathlib

import pytest
from kept_evidence import H200, read
from traces import two_rounds

from kdtree_engine.profiling.summary import Profile, profile
from phases.profile_table import as_json
from phases.reporting.model import Missing, Table, Waterfall
from phases.reporting.profiles import profiles_section


@pytest.fixture
def before(tmp_path: pathlib.Path) -> Profile:
    return profile([two_rounds(reduce_us=40).write(tmp_path / "before.json")])


@pytest.fixture
def after(tmp_path: pathlib.Path) -> Profile:
    return profile([two_rounds().write(tmp_path / "after.json")])


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "kept/profile").mkdir(parents=True)
    return tmp_path / "kept"


def write(folder: pathlib.Path, name: str, found: Profile, before: Profile | None = None) -> None:
    text = json.dumps(as_json(found, before))
    (folder / f"profile/{name}.json").write_text(text)


def test_one_profile_falls_from_nothing_to_the_step(folder: pathlib.Path, after: Profile) -> None:
    write(folder, "h200", after)
    fall, levers = profiles_section(read(folder)).blocks
    assert isinstance(fall, Waterfall)
    assert fall.before is None
    assert fall.changes[0] == ("verify attention", pytest.approx(90.0))
    assert sum(us for _, us in fall.changes) == pytest.approx(fall.after) == pytest.approx(200.0)
    assert isinstance(levers, Table)
    assert levers.rows[0][-1].text


def test_a_part_before_makes_a_waterfall(
    folder: pathlib.Path, before: Profile, after: Profile
) -> None:
    write(folder, "h200", after, before)
    fall = profiles_section(read(folder)).blocks[0]
    assert isinstance(fall, Waterfall)
    assert fall.before is not None
    assert fall.changes[0] == ("communication", pytest.approx(-10.0))
    assert fall.before + sum(us for _, us in fall.changes) == pytest.approx(fall.after)


def test_two_files_called_before_and_after_are_one_waterfall(
    folder: pathlib.Path, before: Profile, after: Profile
) -> None:
    write(folder, "eager-before", before)
    write(folder, "eager-after", after)
    falls = [one for one in profiles_section(read(folder)).blocks if isinstance(one, Waterfall)]
    assert [one.title for one in falls] == ["A decode step before and after, eager"]
    assert "eager-before.json" in falls[0].source.remark


def test_points_of_a_service_are_paired_one_by_one(
    folder: pathlib.Path, before: Profile, after: Profile
) -> None:
    for name, found in (("host-before", before), ("host-after", after)):
        points = [{"point": point, **as_json(found)} for point in ("4k x 1", "64k x 1")]
        (folder / f"profile/{name}.json").write_text(json.dumps(points))
    falls = [one for one in profiles_section(read(folder)).blocks if isinstance(one, Waterfall)]
    assert [one.title.rpartition("after, ")[2] for one in falls] == [
        "host, 4k x 1",
        "host, 64k x 1",
    ]
    assert all(one.before is not None for one in falls)


def test_the_note_of_its_traces_says_where_a_profile_is_from(
    folder: pathlib.Path, after: Profile
) -> None:
    write(folder, "h200", after)
    note = {"version": 1, "at": "2026-11-30T10:00:00", "asked": {}, "machine": H200.as_json()}
    for name, traces in (("note", after.files), ("other", ("else.json",))):
        text = json.dumps(note | {"traces": traces})
        (folder / f"profile/{name}.json").write_text(text)
    falls = [one for one in profiles_section(read(folder)).blocks if isinstance(one, Waterfall)]
    (source,) = (one.source for one in falls)
    assert (source.where, source.date) == ("NVIDIA H200", "2026-11-30")
    assert source.file.endswith("h200.json")
    assert "note.json" in source.remark


def test_a_before_without_its_after_stands_alone(folder: pathlib.Path, before: Profile) -> None:
    write(folder, "eager-before", before)
    fall = profiles_section(read(folder)).blocks[0]
    assert isinstance(fall, Waterfall)
    assert fall.before is None


def test_nothing_kept_is_said(folder: pathlib.Path) -> None:
    (gap,) = profiles_section(read(folder)).blocks
    assert isinstance(gap, Missing)
    assert "plans/evidence/profile" in gap.why


@pytest.mark.parametrize("text", ['{"version": 9}', '{"version": 1, "step_us": 0, "classes": []}'])
def test_another_format_is_refused_by_name(folder: pathlib.Path, text: str) -> None:
    (folder / "profile/odd.json").write_text(text)
    gaps = [one for one in profiles_section(read(folder)).blocks if isinstance(one, Missing)]
    assert any("cannot be read" in one.why for one in gaps)
