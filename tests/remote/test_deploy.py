"""A checkout that becomes a release of this machine, by way of `kd deploy`'s own parts."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from kdtree_engine.build import CompileError, sources_digest
from kdtree_engine.errors import ConfigError, KdError, MissingError
from remote.deploy import Deployment, releases_of
from remote.inventory import LocalHost
from remote.local import LocalTransport
from remote.releases import ReleaseRefused

pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools 70.1 or newer")
pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not on PATH")


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """As small as a checkout can be that has an engine."""
    folder = tmp_path / "checkout"
    engine = folder / "kdtree-engine"
    (engine / "kdtree_engine/sglang_ext").mkdir(parents=True)
    (engine / "csrc").mkdir()
    (folder / "README.md").write_text("read me\n")
    (engine / "kdtree_engine/__init__.py").write_text("value = 7\n")
    (engine / "kdtree_engine/attention.py").write_text("")
    (engine / "kdtree_engine/sglang_ext/__init__.py").write_text("")
    (engine / "kdtree_engine/sglang_ext/plugin.py").write_text("def register(): pass\n")
    (engine / "csrc/one.cu").write_text("// nothing\n")
    (engine / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "kdtree-engine"\nversion = "1"\n'
        '[project.entry-points."sglang.srt.plugins"]\n'
        'kdtree_mla = "kdtree_engine.sglang_ext.plugin:register"\n'
        '[tool.setuptools]\npackages = ["kdtree_engine", "kdtree_engine.sglang_ext"]\n'
        '[tool.setuptools.package-data]\nkdtree_engine = ["lib/*"]\n'
    )
    for line in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *line], cwd=folder, check=True)
    return folder


@pytest.fixture
def host(tmp_path: pathlib.Path) -> LocalHost:
    return LocalHost(name="here", kind="local", root=str(tmp_path / "root"))


@pytest.mark.slow
def test_a_release_has_all_that_a_service_imports(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    deployment = Deployment(checkout, ("5f30ea020753", True))
    notes: list[str] = []
    (checkout / "left behind").write_text("")
    about = deployment.run(LocalTransport(), host, note=notes.append)
    assert about["release"].endswith("-5f30ea0-changed")
    assert notes[:3] == [
        "stays here, as git does not know it: left behind",
        "there is no kernel library (`kd build`): the release runs on CPUs alone",
        "builds the wheel",
    ]
    assert about["kernels"] is False
    placed = tmp_path / "root/releases" / about["release"]
    value = subprocess.run(
        [sys.executable, "-c", "import kdtree_engine; print(kdtree_engine.value)"],
        env={**os.environ, "PYTHONPATH": str(placed / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert value.stdout == "7\n"
    assert (placed / "source/README.md").is_file()
    releases = releases_of(LocalTransport(), host)
    assert releases.lock_holder() is None
    assert releases.known()["current"] is None, "it is placed, and not switched to"
    (line,) = (tmp_path / "root/audit.jsonl").read_text().splitlines()
    said = json.loads(line)
    assert (said["did"], said["from"], said["to"]) == ("deploy", None, about["release"])
    assert said["result"] == "placed"


def test_one_that_fails_stands_in_the_audit_log_too(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    (checkout / "kdtree-engine/kdtree_engine/__init__.py").write_text("raise ImportError('no')\n")
    with pytest.raises(KdError):
        Deployment(checkout, (None, None)).run(LocalTransport(), host)
    (line,) = (tmp_path / "root/audit.jsonl").read_text().splitlines()
    said = json.loads(line)
    assert (said["did"], said["from"], said["result"]) == ("deploy", None, "failed")
    assert "ImportError" in said["text"]
    assert not (tmp_path / "root/releases" / said["to"]).exists()


def test_a_preview_writes_nothing(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    found = Deployment(checkout, (None, None)).preview(LocalTransport(), host)
    assert "source/README.md" in found["new"]
    assert [(one["folder"], one["files"]) for one in found["sends"]] == [
        (".", 1),
        ("kdtree-engine", 6),
    ]
    assert not (tmp_path / "root").exists()


def test_a_preview_is_against_the_newest_where_none_is_current(
    checkout: pathlib.Path, host: LocalHost
) -> None:
    deployment = Deployment(checkout, (None, None))
    about = deployment.run(LocalTransport(), host)
    (checkout / "README.md").write_text("changed\n")
    found = deployment.preview(LocalTransport(), host)
    assert found == {
        "base": about["release"],
        "new": [],
        "changed": ["source/README.md"],
        "removed": [],
        "sends": [{"folder": ".", "files": 1, "bytes": len("changed\n")}],
        "kernels": "none",
    }


def test_a_preview_tells_other_kernels_of_the_same_sources(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    """No file that git knows says whether `kd build` has run since."""
    deployment = Deployment(checkout, (None, None), tmp_path / "cache")

    def kernels() -> object:
        found = deployment.preview(LocalTransport(), host)
        assert not (found["base"] and found["changed"])
        return found["kernels"]

    lib = checkout / "kdtree-engine/kdtree_engine/lib"
    library = lib / "libkdtree_engine.so"
    lib.mkdir()
    (checkout / ".gitignore").write_text("*.so\n")
    library.write_text("built")
    assert kernels() == "new"
    deployment.run(LocalTransport(), host, with_tools=False)
    assert kernels() == "the same"
    library.write_text("built again")
    assert kernels() == "changed"
    library.unlink()
    assert kernels() == "removed"


def test_a_host_is_looked_for_before_anything_is_built(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    nowhere = host.model_copy(update={"python": "/not/there", "cuda_arch": "sm_120"})
    with pytest.raises(ConfigError, match="/not/there is not there"):
        Deployment(checkout, (None, None)).run(LocalTransport(), nowhere)


def test_one_deployment_at_a_time(checkout: pathlib.Path, host: LocalHost) -> None:
    releases = releases_of(LocalTransport(), host)
    releases.lock(owner="ann", command="kd deploy", token="hers")
    with pytest.raises(ReleaseRefused, match="locked by ann"):
        Deployment(checkout, (None, None)).run(LocalTransport(), host)
    holder = releases.lock_holder()
    assert holder is not None
    assert holder["owner"] == "ann"


@pytest.mark.slow
def test_a_deployment_that_fails_gives_the_lock_back(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    (checkout / "kdtree-engine/pyproject.toml").write_text("[project]\nname = 1\n")
    with pytest.raises(CompileError, match="the wheel could not be built"):
        Deployment(checkout, (None, None)).run(LocalTransport(), host)
    releases = releases_of(LocalTransport(), host)
    assert releases.lock_holder() is None
    assert releases.known()["releases"] == []


def test_a_gpu_host_wants_the_kernels(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    gpu = host.model_copy(update={"cuda_arch": "sm_120"})
    deployment = Deployment(checkout, (None, None))
    with pytest.raises(MissingError, match=r"has a GPU \(sm_120\), and there is no kernel library"):
        deployment.run(LocalTransport(), gpu)
    library = checkout / "kdtree-engine/kdtree_engine/lib/libkdtree_engine.so"
    library.parent.mkdir()
    library.write_bytes(b"of other sources")
    with pytest.raises(CompileError, match="was not built from"):
        deployment.run(LocalTransport(), gpu)
    assert not (tmp_path / "root").exists()


def test_the_engine_is_one_in_a_release_as_in_a_checkout(
    checkout: pathlib.Path, host: LocalHost, tmp_path: pathlib.Path
) -> None:
    """Gates hold a library of `site` against sources, and start servers on `source`."""
    library = checkout / "kdtree-engine/kdtree_engine/lib/libkdtree_engine.so"
    library.parent.mkdir()
    library.write_bytes(b"of some sources")
    about = Deployment(checkout, (None, None)).run(LocalTransport(), host)
    placed = tmp_path / "root/releases" / about["release"]
    assert (placed / "site/csrc/one.cu").read_text() == "// nothing\n"
    for engine in ("site", "source/kdtree-engine"):
        assert (placed / engine / "kdtree_engine/lib" / library.name).read_bytes()
    (placed / "site/build/objects").mkdir(parents=True)
    assert (tmp_path / "root/build/objects").is_dir(), "a release never changes"
    assert not list(placed.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("attention.py", "import no_such_module\n", "No module named 'no_such_module'"),
        ("sglang_ext/plugin.py", "", "has no attribute 'register'"),
        ("__init__.py", "raise SystemExit('not with this torch')\n", "not with this torch"),
        ("__init__.py", "__file__ = '/else/where.py'\n", "comes from /else/where.py"),
    ],
)
def test_what_the_hosts_python_cannot_import_is_no_release(
    checkout: pathlib.Path, host: LocalHost, file: str, text: str, says: str
) -> None:
    (checkout / "kdtree-engine/kdtree_engine" / file).write_text(text)
    with pytest.raises(ReleaseRefused, match="cannot import the engine from it: .*" + says) as why:
        Deployment(checkout, (None, None)).run(LocalTransport(), host)
    assert "\n" not in str(why.value)
    releases = releases_of(LocalTransport(), host)
    assert releases.known()["releases"] == []
    assert releases.lock_holder() is None


def test_a_plugin_that_sglang_would_not_find_is_no_release(
    checkout: pathlib.Path, host: LocalHost
) -> None:
    project = checkout / "kdtree-engine/pyproject.toml"
    project.write_text(project.read_text().replace("kdtree_mla", "another"))
    with pytest.raises(ReleaseRefused, match="has no entry point kdtree_mla"):
        Deployment(checkout, (None, None)).run(LocalTransport(), host)


def test_a_library_that_a_gpu_host_cannot_load_is_no_release(
    checkout: pathlib.Path, host: LocalHost
) -> None:
    package = checkout / "kdtree-engine/kdtree_engine"
    (package / "lib").mkdir()
    (package / "lib/libkdtree_engine.so").write_bytes(b"no library")
    digest = sources_digest(checkout / "kdtree-engine/csrc")
    (package / "lib/libkdtree_engine.json").write_text(json.dumps({"sources": digest}))
    (package / "library.py").write_text("def kernels(): raise OSError('invalid ELF header')\n")
    subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    deployment = Deployment(checkout, (None, None))
    deployment.run(LocalTransport(), host)
    gpu = host.model_copy(update={"cuda_arch": "sm_120"})
    with pytest.raises(ReleaseRefused, match="invalid ELF header"):
        deployment.run(LocalTransport(), gpu)
