"""The order of phases, and what a phase declares."""

from __future__ import annotations

import pathlib

import pytest
import sample_gates

import phases
from kdtree_engine.errors import ConfigError, UnknownName
from phases.gate import Gate
from phases.registry import find_gate, find_phase, in_order, load_phases
from phases.requirement import Requirement


def test_the_eight_phases_come_in_dependency_order() -> None:
    numbers = [phase.number for phase in load_phases()]
    assert numbers[:8] == list(range(8))


def test_a_package_that_cannot_be_imported_is_one_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p9_broken").mkdir()
    (tmp_path / "p9_broken" / "__init__.py").write_text("def broken(:\n")
    monkeypatch.setattr("phases.__path__", [*phases.__path__, str(tmp_path)])
    with pytest.raises(ConfigError, match=r"phases/p9_broken: cannot be imported: SyntaxError"):
        load_phases()


def test_a_package_that_is_not_named_as_a_phase_is_none() -> None:
    assert "reporting" not in [phase.package for phase in load_phases()]


def test_a_gate_names_its_requirements_as_the_command_line_does() -> None:
    assert Gate("x", "x", requires=("gpu",)).requires == (Requirement.GPU,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'luck' is not a valid Requirement"):
        Gate("x", "x", requires=("luck",))  # type: ignore[arg-type]


def test_a_phase_comes_after_all_that_it_builds_on() -> None:
    shuffled = [
        sample_gates.phase(0, depends_on=(3,)),
        sample_gates.phase(1, depends_on=(0,)),
        sample_gates.phase(2),
        sample_gates.phase(3, depends_on=(2,)),
    ]
    assert [phase.number for phase in in_order(shuffled)] == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ([sample_gates.phase(0), sample_gates.phase(0)], "two phases are numbered 0"),
        ([sample_gates.phase(1, depends_on=(9,))], "depends on phase 9, which does not exist"),
        (
            [sample_gates.phase(0, depends_on=(1,)), sample_gates.phase(1, depends_on=(0,))],
            "in a circle",
        ),
        (
            [sample_gates.phase(0, Gate("same", "")), sample_gates.phase(1, Gate("same", ""))],
            "two gates are called same: in p0_sample and in p1_sample",
        ),
    ],
)
def test_phases_that_contradict_each_other_are_refused(
    declared: list[sample_gates.Phase], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        in_order(declared)


@pytest.mark.parametrize("name", ["2", "p2", "paged_bf16", "p2_paged_bf16"])
def test_a_phase_is_found_by_number_or_name(name: str) -> None:
    assert find_phase(load_phases(), name).number == 2


def test_unknown_names_come_with_the_nearest_ones() -> None:
    known = load_phases()
    with pytest.raises(UnknownName, match=r"unknown phase 'oracel' \(did you mean .*p0_oracle"):
        find_phase(known, "oracel")
    with pytest.raises(UnknownName, match=r"unknown gate 'mask-path' \(did you mean mask-paths"):
        find_gate(known, "mask-path")
