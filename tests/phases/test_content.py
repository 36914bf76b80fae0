"""A gate's content hash follows what the gate imports, and nothing else."""

from __future__ import annotations

import functools
import pathlib
import re
import sys

import pytest
import sample_gates

from phases.content import gate_content, imported_files
from phases.gate import Gate
from phases.registry import load_phases

FILES = {
    "phases/__init__.py": "",
    "phases/p0_x/__init__.py": "from phases.gate import Gate\nfrom phases.p0_x.gates import f\n",
    "phases/p0_x/gates.py": "from phases import shared\nimport kdtree_engine.reference.tree\n",
    "phases/shared.py": "def f():\n    from kdtree_engine.timing import clock\n",
    "phases/gate.py": "import phases.runner\n",
    "phases/runner.py": "",
    "kdtree-engine/kdtree_engine/__init__.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kdtree_engine.attention\n"
    ),
    "kdtree-engine/kdtree_engine/attention.py": "",
    "kdtree-engine/kdtree_engine/timing.py": "from . import clocks\n",
    "kdtree-engine/kdtree_engine/clocks.py": "",
    "kdtree-engine/kdtree_engine/reference/__init__.py": "from .masks import mask\n",
    "kdtree-engine/kdtree_engine/reference/masks.py": "import torch\n",
    "kdtree-engine/kdtree_engine/reference/tree.py": "",
    "kdtree-engine/csrc/kernel.cu": "1",
}


@pytest.fixture
def house(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_imports_are_followed_through_functions_packages_and_relative_names(
    house: pathlib.Path,
) -> None:
    found = [p.relative_to(house).as_posix() for p in imported_files(house, "phases.p0_x.gates")]
    assert found == [
        "kdtree-engine/kdtree_engine/__init__.py",
        "kdtree-engine/kdtree_engine/clocks.py",
        "kdtree-engine/kdtree_engine/reference/__init__.py",
        "kdtree-engine/kdtree_engine/reference/masks.py",
        "kdtree-engine/kdtree_engine/reference/tree.py",
        "kdtree-engine/kdtree_engine/timing.py",
        "phases/__init__.py",
        "phases/p0_x/gates.py",
        "phases/shared.py",
    ]


def test_a_gate_beside_it_does_not_age_a_gate_but_what_it_is_given_does(
    house: pathlib.Path,
) -> None:
    module = type(sys)("phases.p0_x.gates")
    exec("def check(context, limit=1): return []", module.__dict__)
    gate = Gate("x", "x", module.check)
    first = gate_content(house, gate)
    (house / "phases/p0_x/__init__.py").write_text("from phases.p0_x import another\n")
    (house / "phases/p0_x/another.py").write_text("")
    assert gate_content(house, gate) == first
    (house / "phases/p0_x/gates.py").write_text("from phases.p0_x import LIMIT\n")
    second = gate_content(house, gate)
    (house / "phases/p0_x/__init__.py").write_text("LIMIT = 2\n")
    assert gate_content(house, gate) not in (first, second)
    given = [Gate("x", "x", functools.partial(module.check, limit=n)) for n in (1, 2)]
    assert len({first, *(gate_content(house, one) for one in given)}) == 3


def test_an_attribute_of_the_lazy_package_stands_for_all_of_it(house: pathlib.Path) -> None:
    gates = house / "phases/p0_x/gates.py"
    gates.write_text("from kdtree_engine import tree_verify_attention\n")
    found = {path.name for path in imported_files(house, "phases.p0_x.gates")}
    assert {"attention.py", "tree.py", "timing.py"} <= found


def test_the_hash_changes_with_a_module_behind_an_import_or_with_a_data_file(
    house: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(sys)("phases.p0_x.gates")
    exec("def check(context): return []", module.__dict__)
    check = functools.partial(module.check)
    gate = Gate("x", "x", check, data=("kdtree-engine/csrc/**/*",))

    first = gate_content(house, gate)
    (house / "phases/runner.py").write_text("unrelated = 1\n")
    assert gate_content(house, gate) == first
    (house / "kdtree-engine/kdtree_engine/reference/masks.py").write_text("import torch  # new\n")
    second = gate_content(house, gate)
    assert second != first
    (house / "kdtree-engine/csrc/kernel.cu").write_text("2")
    assert gate_content(house, gate) not in (first, second)


def test_only_the_body_of_if_type_checking_is_left_out(house: pathlib.Path) -> None:
    gates = house / "phases/p0_x/gates.py"
    gates.write_text(
        "import typing\n"
        "if typing.TYPE_CHECKING:\n    import kdtree_engine.attention\n"
        "else:\n    import kdtree_engine.timing\n"
        "if not typing.TYPE_CHECKING:\n    import kdtree_engine.reference.tree\n"
    )
    found = {path.name for path in imported_files(house, "phases.p0_x.gates")}
    assert {"timing.py", "tree.py"} <= found
    assert "attention.py" not in found


def test_importing_the_whole_package_stands_for_all_of_it(house: pathlib.Path) -> None:
    (house / "phases/p0_x/gates.py").write_text("import kdtree_engine\n")
    assert "attention.py" in {p.name for p in imported_files(house, "phases.p0_x.gates")}


OTHER_PROJECTS = re.compile(r'import_module\("(?!phases|kdtree_engine|remote|tasks)[\w.]+"\)')
"""A name that stands there, of a package that is no file of this repository: nothing to hash."""


def test_nothing_behind_a_gate_is_imported_by_a_name_made_up_at_run_time(
    root: pathlib.Path,
) -> None:
    lazy = root / "kdtree-engine/kdtree_engine/__init__.py"  # what it loads is followed by itself
    for phase in load_phases():
        for gate in phase.gates:
            if gate.check is None:
                continue
            for path in imported_files(root, gate.check.__module__):
                text = OTHER_PROJECTS.sub("", path.read_text())
                assert path == lazy or not re.search(r"import_module\(|__import__\(", text), path


def test_an_unwritten_gate_has_no_content(root: pathlib.Path) -> None:
    assert gate_content(root, Gate("x", "x")) is None
    assert gate_content(root, Gate("x", "x", sample_gates.passes)) is not None
