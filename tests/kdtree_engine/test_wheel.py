"""The wheel carries the kernel library where there is one, and is pure where there is none."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools 70.1 or newer")
LIBRARY = "kdtree_engine/lib/libkdtree_engine.so"


@pytest.mark.slow
@pytest.mark.parametrize("with_library", [False, True])
def test_wheel(root: pathlib.Path, tmp_path: pathlib.Path, with_library: bool) -> None:
    source = tmp_path / "kdtree-engine"
    shutil.copytree(
        root / "kdtree-engine",
        source,
        ignore=shutil.ignore_patterns("build", "lib", "*.egg-info", "__pycache__", ".*"),
    )
    if with_library:
        (source / LIBRARY).parent.mkdir()
        (source / LIBRARY).write_bytes(b"a library")
    answer = subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('..')"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert ("-py3-none-any.whl" in wheel.name) is not with_library
    if with_library:
        assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert (LIBRARY in archive.namelist()) is with_library
        assert "kdtree_engine/py.typed" in archive.namelist()
        assert "kdtree_engine/tables/sm_90.json" in archive.namelist()
        assert "kdtree_engine/profiling/rules.toml" in archive.namelist()
        assert "kdtree_engine/sglang_ext/backend.py" in archive.namelist()
        assert not any("kd_sglang_cpu" in name for name in archive.namelist())  # for tests alone
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert archive.read(points).decode().split("\n")[:2] == [
            "[sglang.srt.plugins]",
            "kdtree_mla = kdtree_engine.sglang_ext.plugin:register",
        ]
