"""Kernels compiled on a host: by the real nvcc and build, of sources as small as can be."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from kdtree_engine.build import CompileError, sources_digest
from kdtree_engine.errors import MissingError
from remote import host_build
from remote.deploy import Deployment, releases_of
from remote.inventory import LocalHost
from remote.local import LocalTransport

pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools 70.1 or newer")
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not on PATH")

BINDING = """\
#include <tvm/ffi/function.h>
__global__ void store(int* to) { *to = 42; }
static int64_t answer() { return 42; }
#pragma GCC diagnostic ignored "-Wunused-parameter"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
"""


@pytest.fixture
def checkout(root: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The real engine, with one small source."""
    folder = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("csrc", "build", "lib", "*.egg-info", "__pycache__")
    shutil.copytree(root / "kdtree-engine", folder / "kdtree-engine", ignore=ignored)
    (folder / "kdtree-engine/csrc").mkdir()
    (folder / "kdtree-engine/csrc/binding.cu").write_text(BINDING)
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    return folder


@pytest.fixture
def host(tmp_path: pathlib.Path) -> LocalHost:
    root = str(tmp_path / "a root")
    return LocalHost(name="here", kind="local", root=root, python=sys.executable, cuda_arch="sm_90")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_a_release_has_the_kernels_that_its_host_compiled(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    deployment = Deployment(checkout, (None, None))
    notes: list[str] = []
    about = deployment.run(LocalTransport(), host, build_there=True, note=notes.append)
    assert about["kernels"] is True
    assert "[1/1] binding.cu" in notes
    site = tmp_path / "a root/releases" / about["release"] / "site"
    library = site / "kdtree_engine/lib/libkdtree_engine.so"
    origin = json.loads(library.with_suffix(".json").read_text())
    assert origin["sources"] == sources_digest(checkout / "kdtree-engine/csrc")
    current = (
        "from kdtree_engine.build import require_current\n"
        "from kdtree_engine.library import library_path, load\n"
        "require_current(library_path())\n"
        "print(load(library_path()).answer())\n"
    )
    for path in (site, site.parent / "source/kdtree-engine"):
        said = subprocess.run(
            [sys.executable, "-c", current],
            env=os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout == "42\n", "the library is that of the release's own sources"
    assert not (checkout / "kdtree-engine/kdtree_engine/lib").exists()

    notes.clear()
    deployment.run(LocalTransport(), host, build_there=True, note=notes.append)
    assert any(text.startswith("0 sources compiled, 1 reused") for text in notes)

    (checkout / "kdtree-engine/csrc/binding.cu").write_text("no CUDA at all\n")
    with pytest.raises(
        CompileError, match=r"host local: the kernels were not built: binding.cu does"
    ):
        deployment.run(LocalTransport(), host, build_there=True)
    releases = releases_of(LocalTransport(), host)
    assert len(releases.known()["releases"]) == 2
    assert releases.lock_holder() is None
    assert origin == json.loads(library.with_suffix(".json").read_text())


def test_a_host_without_nvcc_says_so_before_anything_is_sent(
    checkout: pathlib.Path,
    host: LocalHost,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(host_build, "CUDA", str(tmp_path / "cuda"))
    if shutil.which("nvcc"):
        pytest.skip("nvcc is in /usr/bin")
    with pytest.raises(MissingError, match="host local: nvcc is not on PATH, nor in ") as why:
        Deployment(checkout, (None, None)).run(LocalTransport(), host, build_there=True)
    assert "kd build" in str(why.value)
    assert not (tmp_path / "a root").exists()
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "cuda/nvcc").chmod(0o755)
    host_build.require_nvcc(LocalTransport())
