"""The rooms of the house: which way imports go, and what may be imported where."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOMS = {
    "kdtree-engine/kdtree_engine": {"kdtree_engine"},
    "phases": {"phases", "kdtree_engine"},
    "remote": {"remote", "kdtree_engine"},
}
OURS = {"kdtree_engine", "phases", "remote", "tasks"}
TOP_LEVEL = {
    "plans",
    "phases",
    "kdtree-engine",
    "remote",
    "tests",
    "tasks.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
}


def imports(path: pathlib.Path) -> Iterator[str]:
    """The first part of every module that `path` imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_go_down_only(root: pathlib.Path, room: str) -> None:
    for path in (root / room).rglob("*.py"):
        wrong = set(imports(path)) & OURS - ROOMS[room]
        assert not wrong, f"{path.relative_to(root)} imports {wrong}"


@pytest.mark.parametrize(
    ("package", "room"),
    [
        ("fabric", "remote"),
        ("invoke", "remote"),
        ("paramiko", "remote"),
        ("sglang", "kdtree-engine/kdtree_engine/sglang_ext"),
    ],
)
def test_a_package_stays_in_its_room(root: pathlib.Path, package: str, room: str) -> None:
    for folder in (*ROOMS, "tasks.py"):
        paths = [root / folder] if folder.endswith(".py") else (root / folder).rglob("*.py")
        for path in paths:
            inside = path.is_relative_to(root / room)
            assert inside or package not in set(imports(path)), path.relative_to(root)


def test_importing_the_engine_needs_torch_alone() -> None:
    """None of what `kd` itself depends on: a GPU host has only SGLang's own environment."""
    script = (
        "import sys\n"
        "blocked = ('pydantic', 'click', 'rich', 'fabric', 'yaml', 'frontmatter', 'filelock',"
        " 'hypothesis', 'tvm_ffi', 'pynvml')\n"
        "sys.modules.update(dict.fromkeys(blocked))\n"
        "import kdtree_engine\n"
        "kdtree_engine.tree_verify_attention, kdtree_engine.reference\n"
        "import kdtree_engine.machine, kdtree_engine.timing, kdtree_engine.build\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_top_level_is_what_the_readme_says(root: pathlib.Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL
