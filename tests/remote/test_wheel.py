"""The wheel that goes to a host: what git knows, and the kernel library that it ignores."""

from __future__ import annotations

import pathlib
import subprocess
import zipfile

import pytest

from kdtree_engine.build import CompileError
from remote.sync import tracked_files
from remote.wheel import make_wheel

pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools 70.1 or newer")


@pytest.mark.slow
@pytest.mark.parametrize("with_library", [False, True])
def test_the_engines_wheel(root: pathlib.Path, tmp_path: pathlib.Path, with_library: bool) -> None:
    """A copy of the engine as a checkout of its own, so that the real one is not written to."""
    if not (root / ".git").exists():
        pytest.skip("a copy without git")
    engine, folder = tmp_path / "engine", tmp_path / "wheels"
    names = tracked_files(root / "kdtree-engine")
    for name in names:
        (engine / name).parent.mkdir(parents=True, exist_ok=True)
        (engine / name).write_bytes((root / "kdtree-engine" / name).read_bytes())
    (engine / "kdtree_engine/untracked.py").write_text("")
    library = engine / "kdtree_engine/lib/libkdtree_engine.so"
    if with_library:
        library.parent.mkdir()
        library.write_bytes(b"a library")
    folder.mkdir()
    wheel = make_wheel(engine, names, folder)
    assert ("-py3-none-any.whl" in wheel.name) is not with_library
    with zipfile.ZipFile(wheel) as packed:
        files = packed.namelist()
    assert ("kdtree_engine/lib/libkdtree_engine.so" in files) is with_library
    assert "kdtree_engine/sglang_ext/plugin.py" in files
    assert "kdtree_engine/untracked.py" not in files
    assert not (engine / "build").exists(), "the sources are left as they are"


def test_a_wheel_that_cannot_be_built_is_one_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 1\n")
    (tmp_path / "wheels").mkdir()
    with pytest.raises(CompileError, match="the wheel could not be built: ") as caught:
        make_wheel(tmp_path, ["pyproject.toml"], tmp_path / "wheels")
    assert "\n" not in str(caught.value)


def test_files_of_a_part_of_the_checkout(tmp_path: pathlib.Path) -> None:
    """`tracked_files` of a folder below the top gives paths from that folder."""
    (tmp_path / "part").mkdir()
    (tmp_path / "part/a.py").write_text("")
    (tmp_path / "b.py").write_text("")
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=tmp_path, check=True)
    assert tracked_files(tmp_path / "part") == ["a.py"]
