"""README is true: its example works as printed, and it names every command and option it must."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import click
import pytest

import tasks

EXAMPLE = re.compile(r"<!-- example: (?P<file>\S+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)


@pytest.fixture(scope="module")
def readme(root: pathlib.Path) -> str:
    return (root / "README.md").read_text()


def test_the_worked_example_of_a_phase_runs_as_printed(
    root: pathlib.Path, tmp_path: pathlib.Path, readme: str
) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("phases", "plans", "remote", "kdtree-engine"):
        shutil.copytree(root / name, tmp_path / name, ignore=ignore)
    shutil.copy(root / "tasks.py", tmp_path)
    files = [match["file"] for match in EXAMPLE.finditer(readme)]
    assert files == ["phases/p9_greeting/__init__.py", "plans/0018-greeting.md"]
    for match in EXAMPLE.finditer(readme):
        path = tmp_path / match["file"]
        path.parent.mkdir(exist_ok=True)
        path.write_text(match["text"])

    def kd(*arguments: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(tmp_path), str(tmp_path / "kdtree-engine")])
        return subprocess.run(
            [sys.executable, str(tmp_path / "tasks.py"), *arguments],
            env=os.environ | {"PYTHONPATH": paths, "KD_STATE": str(tmp_path / "state")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    run = kd("phase", "run", "9", "--json")
    assert run.returncode == 0, run.stderr
    (gate,) = json.loads(run.stdout)["gates"]
    assert (gate["gate"], gate["status"]) == ("greeting-words", "passed")
    assert gate["figures"] == [{"name": "words", "value": 2.0, "unit": "count"}]
    plans = json.loads(kd("plan", "list", "--json").stdout)
    assert [plan["gates"] for plan in plans if plan["id"] == 18] == [["greeting-words"]]


def test_the_example_of_the_operation_runs_as_printed(readme: str) -> None:
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", readme, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert tuple(getattr(names["out"], "shape", ())) == (3, 8, 512)


def commands(group: click.Group, *above: str) -> list[str]:
    found: list[str] = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, *above, name)
        else:
            found.append(" ".join(("kd", *above, name)))
    return found


@pytest.mark.parametrize("command", commands(tasks.cli))
def test_every_command_is_in_readme(readme: str, command: str) -> None:
    group, _, last = command.rpartition(" ")
    named = command in readme or re.search(rf"`{re.escape(group)} \w+`(, `\w+`)*, `{last}`", readme)
    assert named, f"README does not name `{command}`"


def test_every_exit_code_is_in_readme_and_in_the_help(readme: str) -> None:
    for code in ("0", "1", "2", "3", "130"):
        assert re.search(rf"\b{code} \w+", readme)
        assert re.search(rf"^  {code} +\w+", tasks.EPILOG, re.MULTILINE)


def test_readme_says_how_to_run_the_tests_and_ci_does_the_same(
    root: pathlib.Path, readme: str
) -> None:
    tests = "pytest -n 3 --dist loadgroup"
    assert f"pip install -e '.[dev]' -e ./kdtree-engine && {tests}" in readme
    ci = (root / ".ci/run").read_text()
    assert "-e '.[dev]' -e ./kdtree-engine" in ci
    assert f"\n{tests}\n" in ci
