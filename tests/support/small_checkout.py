"""A checkout that `kd deploy` takes, as small as one can be, whose gates need what is asked for."""

from __future__ import annotations

import json
import pathlib
import subprocess


def small_checkout(folder: pathlib.Path, *needs: str) -> pathlib.Path:
    """Its engine has nothing in it. needs: what its pyproject.toml depends on, beside torch."""
    engine = folder / "kdtree-engine/kdtree_engine"
    (engine / "sglang_ext").mkdir(parents=True)
    for name in ("__init__.py", "attention.py", "sglang_ext/__init__.py"):
        (engine / name).write_text("")
    (engine / "sglang_ext/plugin.py").write_text("def register(): pass\n")
    (engine.parent / "pyproject.toml").write_text(
        '[project]\nname = "kdtree-engine"\nversion = "1"\n'
        '[project.entry-points."sglang.srt.plugins"]\n'
        'kdtree_mla = "kdtree_engine.sglang_ext.plugin:register"\n'
        '[tool.setuptools]\npackages = ["kdtree_engine", "kdtree_engine.sglang_ext"]\n'
    )
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "kd"\nversion = "1"\ndependencies = {json.dumps([*needs, "torch"])}\n'
    )
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    return folder
