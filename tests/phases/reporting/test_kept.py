"""Which of the kept results of a gate is shown, and whether it is current."""

from __future__ import annotations

import json
import pathlib

import pydantic
import pytest
from kept_evidence import CPU, H200, blocked, ended, keep, read

from kdtree_engine.build import sources_digest
from kdtree_engine.errors import ConfigError
from phases.gate import Unit
from phases.reporting.kept import documents
from phases.reporting.model import Standing


def test_a_later_run_that_was_blocked_does_not_hide_one_that_came_to_an_end(
    tmp_path: pathlib.Path,
) -> None:
    keep(tmp_path, "gpu", ended("paged-traps", machine=H200), day=2, machine=H200)
    keep(tmp_path, "laptop", blocked("paged-traps"), day=3)
    kept = read(tmp_path)
    assert kept.places() == ["CPU", "NVIDIA H200"]
    newest = kept.newest("paged-traps")
    assert newest is not None
    assert newest.file.endswith("gpu.json")
    on_cpu = kept.newest("paged-traps", "CPU")
    assert on_cpu is not None
    assert not on_cpu.ended


def test_a_source_says_file_place_day_revision_and_standing(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "a", ended("tree-properties"), dirty=True)
    keep(tmp_path, "b", ended("mask-paths", stale=True))
    kept = read(tmp_path)
    current, stale = (kept.measured(name) for name in ("tree-properties", "mask-paths"))
    assert current is not None
    assert stale is not None
    told = "a.json; CPU; 2026-11-02; revision ffffffffffff with changes; current"
    assert str(current.source).endswith(told)
    assert stale.source.standing is Standing.STALE


def test_figures_of_a_changed_environment_come_second(tmp_path: pathlib.Path) -> None:
    other = {"KDTREE_WGMMA": "0"}
    keep(tmp_path, "mma", ended("mask-paths"), day=3, machine=H200, environment=other)
    keep(tmp_path, "plain", ended("mask-paths"), day=2, machine=H200)
    kept = read(tmp_path)
    assert kept.places() == ["NVIDIA H200", "NVIDIA H200 KDTREE_WGMMA=0"]
    measured = kept.measured("mask-paths")
    assert measured is not None
    assert measured.file.endswith("plain.json")


def test_why_not_tells_the_reason_and_the_file(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "laptop", blocked("peers", "no GPU here"))
    kept = read(tmp_path)
    assert kept.why_not("peers").startswith("blocked: no GPU here (")
    assert kept.why_not("mask-paths") == "no kept record has this gate"


class Named(pydantic.BaseModel):
    name: str


def test_a_document_says_where_it_is_from_as_far_as_it_knows(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").mkdir()
    told = {"name": "n", "started": "2026-11-30T02:20:58+00:00", "machine": CPU.as_json()}
    (tmp_path / "x/full.json").write_text(json.dumps(told | {"revision": "e" * 40}))
    (tmp_path / "x/bare.json").write_text('{"name": "n"}')
    found, broken = documents(read(tmp_path), "x", Named)
    assert broken == []
    bare, full = (one.source for one in found)
    assert (full.where, full.date, full.revision) == ("CPU", "2026-11-30", "e" * 12)
    assert (bare.where, bare.date, bare.revision) == ("machine not said", "no date", "unknown")
    assert full.standing is bare.standing is Standing.UNHASHED


def test_a_file_may_hold_several_documents_and_others_may_lie_beside_it(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.json").write_text('[{"name": "n", "point": "4k"}, {"name": "m"}]')
    (tmp_path / "x/note.json").write_text('{"other": 1}')
    found, broken = documents(read(tmp_path), "x", Named, lambda raw: "name" in raw)
    assert [(one.stem, one.point, one.content.name) for one in found] == [
        *(("a", "4k", "n"), ("a", "", "m")),
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("sources", "standing"), [("0" * 64, Standing.STALE), (None, Standing.UNHASHED)]
)
def test_other_kernel_sources_make_a_document_stale_and_the_same_prove_nothing(
    tmp_path: pathlib.Path, sources: str | None, standing: Standing
) -> None:
    (tmp_path / "x").mkdir()
    library = {"sources": sources or sources_digest()}
    (tmp_path / "x/a.json").write_text(json.dumps({"name": "n", "library": library}))
    ((one,), _) = documents(read(tmp_path), "x", Named)
    assert one.source.standing is standing


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[]", "no JSON object"),
        ('[{"name": "n"}, 3]', "no JSON object"),
        ('{"name": NaN}', "NaN is no number"),
        ('{"name": 3}', "field name"),
        ('{"name": "n", "machine": 3}', "field machine"),
        ("[" * 100_000, "it cannot be read"),
        ("\xff", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said_and_the_rest_is_shown(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/good.json").write_text('{"name": "n"}')
    (tmp_path / "x/bad.json").write_bytes(text.encode("latin-1"))
    found, broken = documents(read(tmp_path), "x", Named)
    assert [one.stem for one in found] == ["good"]
    ((bad),) = broken
    assert bad.what.endswith("bad.json")
    assert complaint in bad.why


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ("1" + 400 * "0", "the number 100000000000... of 401 characters is too large"),
        ("1e400", "the number 1e400 is too large, expected less than 1e+20"),
        ("-1e308", "the number -1e308 is too large"),
    ],
)
def test_a_number_that_nothing_measured_is_said_and_not_computed_with(
    tmp_path: pathlib.Path, told: str, complaint: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.json").write_text(f'{{"name": "n", "any": [{{"deep": {told}}}]}}')
    found, (broken,) = documents(read(tmp_path), "x", Named)
    assert not found
    assert complaint in broken.why


@pytest.mark.parametrize("value", [1e20, -1e308, 1e-320])
def test_a_record_with_such_a_figure_is_named(tmp_path: pathlib.Path, value: float) -> None:
    figures = (("all cases", value, Unit.COUNT),)
    keep(tmp_path, "a", ended("tree-properties", figures))
    with pytest.raises(ConfigError, match=r"a\.json: the figure 'all cases' of tree-properties is"):
        read(tmp_path)


def test_a_probability_may_be_as_small_as_it_is(tmp_path: pathlib.Path) -> None:
    keep(tmp_path, "a", ended("tree-properties", (("p-value", 1e-200, Unit.PROBABILITY),)))
    assert read(tmp_path).records


def test_a_field_that_cannot_be_written_is_an_error_of_that_file(tmp_path: pathlib.Path) -> None:
    """A proof's phase must be the gate's: that it is not is said with the phase's name."""
    keep(tmp_path, "a", ended("paged-speed", (("4k", 1.0, Unit.MICROSECONDS),)))
    fields = json.loads((tmp_path / "a.json").read_text())
    fields["gates"][0]["proof"]["phase"] = "\ud800"
    (tmp_path / "a.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"a\.json: a name in it has a character that UTF-8"):
        read(tmp_path)
