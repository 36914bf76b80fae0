"""One file that a release is made of: written, read, deployed from, and refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import shutil
import sys
import tarfile
import venv
from collections.abc import Callable
from typing import Any

import pytest
import ssh_server
from small_checkout import small_checkout
from small_wheel import make_wheel

from kdtree_engine.errors import ConfigError, MissingError
from remote.agent import file_digest
from remote.bundle import Bundle, read_bundle, write_bundle
from remote.deploy import Deployment, deploy_bundle, preview_bundle
from remote.inventory import LocalHost
from remote.local import LocalTransport
from remote.ssh import SshTransport
from remote.tools import some_python

NAMES = ("plain.py", "two words", "it's $(id)", "-n", "ü/new\nline", "a/b/c.txt", "x" * 200)
ABOUT = {
    "revision": "5f30ea020753",
    "changed": False,
    "wheel": "engine-1-py3-none-any.whl",
    "kernels": False,
    "python": "3.12",
}


@pytest.fixture
def parts(tmp_path: pathlib.Path) -> Bundle:
    source = tmp_path / "source"
    for name in NAMES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"{name}\n" * 50)
    (source / "plain.py").chmod(0o755)
    wheel, tool = tmp_path / "engine-1-py3-none-any.whl", tmp_path / "kd_new-1-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    tool.write_bytes(b"a tool")
    return Bundle(source, NAMES, wheel, (tool,), ABOUT)


def test_what_was_written_is_what_is_read(parts: Bundle, tmp_path: pathlib.Path) -> None:
    path, again = tmp_path / "a.tar", tmp_path / "b.tar"
    write_bundle(path, parts)
    for name in NAMES:
        os.utime(parts.checkout / name, (1, 1))
    write_bundle(again, dataclasses.replace(parts, names=tuple(reversed(NAMES))))
    assert path.read_bytes() == again.read_bytes(), "the same content makes the same bytes"
    folder = tmp_path / "read"
    found = read_bundle(path, folder)
    assert sorted(found.names) == sorted(NAMES)
    for name in NAMES:
        assert (found.checkout / name).read_bytes() == (parts.checkout / name).read_bytes()
    assert (found.checkout / "plain.py").stat().st_mode & 0o777 == 0o700
    assert (found.checkout / "two words").stat().st_mode & 0o777 == 0o600
    assert found.wheel.read_bytes() == b"a wheel"
    assert [tool.name for tool in found.tools] == ["kd_new-1-py3-none-any.whl"]
    assert found.about == ABOUT


def test_a_bundle_that_cannot_be_written_leaves_the_old_one(
    parts: Bundle, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "shelf" / "a.tar"
    path.parent.mkdir()
    write_bundle(path, parts)
    before = path.read_bytes()
    with pytest.raises(OSError, match="no such"):
        write_bundle(path, dataclasses.replace(parts, names=(*NAMES, "no such")))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


Entry = tuple[tarfile.TarInfo, bytes]


def rewritten(path: pathlib.Path, change: Callable[[list[Entry]], None]) -> None:
    """The bundle with its entries changed."""
    with tarfile.open(path) as packed:
        entries = []
        for entry in packed:
            given = packed.extractfile(entry)
            assert given is not None
            entries.append((entry, given.read()))
    change(entries)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as packed:
        for entry, content in entries:
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[list[Entry]], None]:
    def changed(entries: list[Entry]) -> None:
        said = json.loads(entries[0][1])
        change(said)
        entries[0] = (entries[0][0], json.dumps(said).encode())

    return changed


def added(name: str, kind: bytes = tarfile.REGTYPE, *, known: bool = True, target: str = "") -> Any:
    """A file more, which the index tells of as well."""

    def changed(entries: list[Entry]) -> None:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, target
        content = b"hostile" if kind == tarfile.REGTYPE else b""
        entries.append((entry, content))
        if known:
            digest = "8f383ccddc6f17eb57a96c711523e4a8072d8e791b4a773ea0153e0d993d03e1"
            index(
                lambda said: said["files"].update({name: {"sha256": digest, "executable": False}})
            )(entries)

    return changed


def renamed(entries: list[Entry]) -> None:
    entries[2][0].name = entries[3][0].name


def spoiled(entries: list[Entry]) -> None:
    entries[2] = (entries[2][0], entries[2][1] + b"more")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (added("/etc/kd-hostile"), "'/etc/kd-hostile' has no place in a bundle"),
        (added("source/../../out"), r"'source/../../out' has no place"),
        (added("../out"), "has no place"),
        (added("source//out"), "has no place"),
        (added("source"), "has no place"),
        (added("site/x.py"), "has no place"),
        (added("wheel/tools/deep/x.whl"), "has no place"),
        (added("wheel/tools/x.py"), "has no place"),
        (added("wheel/second.whl"), "has not one wheel"),
        (added("source/more", known=False), "'source/more' is not in bundle.json"),
        (added("source/link", tarfile.SYMTYPE, target="/etc"), "'source/link' is no plain file"),
        (added("source/link", tarfile.LNKTYPE, target="source/-n"), "is no plain file"),
        (added("source/pipe", tarfile.FIFOTYPE), "is no plain file"),
        (added("source/folder", tarfile.DIRTYPE), "is no plain file"),
        (added("source/-n/below"), "'source/-n/below' lies below a file"),
        (added("source/a"), "is there twice|lies below|is no plain"),
        (renamed, "is there twice|has other content"),
        (spoiled, "has other content than when it was made"),
        (lambda entries: entries.pop(2), "is missing"),
        (lambda entries: entries.append(entries[2]), "is there twice"),
        (lambda entries: entries.reverse(), "does not begin with bundle.json"),
        (lambda entries: entries.clear(), "does not begin with bundle.json"),
        (index(lambda said: said.update(version=9)), "has version 9, expected 1"),
        (index(lambda said: said.pop("files")), "files"),
        (index(lambda said: said.update(files=[])), "does not say what is in it"),
        (index(lambda said: said["files"].update({"source/-n": 3})), "is no whole bundle"),
        (index(lambda said: said["about"].update(revision=3)), "does not say its revision"),
        (index(lambda said: said["about"].pop("kernels")), "does not say its kernels"),
    ],
)
def test_a_hostile_bundle_is_refused_in_one_line(
    parts: Bundle, tmp_path: pathlib.Path, change: Any, says: str
) -> None:
    path = tmp_path / "a.tar"
    write_bundle(path, parts)
    rewritten(path, change)
    (tmp_path / "inner").mkdir()
    with pytest.raises(ConfigError, match=says) as why:
        read_bundle(path, tmp_path / "inner" / "folder")
    assert "\n" not in str(why.value)
    assert str(path) in str(why.value)
    assert {one.name for one in (tmp_path / "inner").iterdir()} <= {"folder"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [0, 100, 700, 3000, -1500])
def test_a_damaged_bundle_is_refused_in_one_line(
    parts: Bundle, tmp_path: pathlib.Path, cut: int
) -> None:
    path = tmp_path / "a.tar"
    write_bundle(path, parts)
    whole = path.read_bytes().rstrip(b"\0")
    path.write_bytes(whole[:cut])
    with pytest.raises(ConfigError, match="is no whole bundle of kd"):
        read_bundle(path, tmp_path / "folder")


@pytest.mark.parametrize("content", [b"no tar", b"\0" * 10240, b"PK\x03\x04", b"\x1f\x8b\x08\0"])
def test_what_is_no_bundle_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ConfigError, match="is no whole bundle of kd"):
        read_bundle(tmp_path / "a.tar", tmp_path / "folder")
    with pytest.raises(ConfigError, match="there is no such file"):
        read_bundle(tmp_path / "b.tar", tmp_path / "folder")


def test_a_file_that_says_to_be_larger_than_it_is_takes_no_room(
    parts: Bundle, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "a.tar"
    write_bundle(path, parts)
    size = path.stat().st_size

    def sparse(entries: list[Entry]) -> None:
        entry = entries[2][0]
        entry.pax_headers = {
            "GNU.sparse.map": "0,1",
            "GNU.sparse.size": str(1 << 40),
            "GNU.sparse.numblocks": "1",
        }

    rewritten(path, sparse)
    with pytest.raises(ConfigError, match="is no whole bundle of kd"):
        read_bundle(path, tmp_path / "folder")
    found = sum(one.stat().st_size for one in (tmp_path / "folder").rglob("*") if one.is_file())
    assert found <= size


@pytest.fixture
def shelf(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where pip looks, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return tmp_path / "shelf"


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """One whose gates need a package that no Python has."""
    return small_checkout(tmp_path / "checkout", "kd-new>=1")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not on PATH")
def test_a_release_comes_of_a_bundle_alone(
    checkout: pathlib.Path,
    shelf: pathlib.Path,
    server: ssh_server.SshServer,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over SSH, where there is neither the checkout nor a registry."""
    pytest.importorskip("setuptools.command.bdist_wheel")
    make_wheel(shelf, "kd_new")
    venv.create(tmp_path / "venv", with_pip=False)
    bare = str(tmp_path / "venv/bin/python")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    bundles = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for path in bundles:
        deployment = Deployment(checkout, ("5f30ea020753", True), tmp_path / "cache")
        deployment.bundle(path, some_python(version))
    assert bundles[0].read_bytes() == bundles[1].read_bytes()
    with pytest.raises(ConfigError, match="there is no such folder"):
        deployment.bundle(tmp_path / "absent/a.tar", some_python(version))

    shutil.rmtree(checkout)
    shutil.rmtree(shelf)
    shutil.rmtree(tmp_path / "cache")
    host = server.host(root=str(tmp_path / "root"), python=bare)
    transport = SshTransport(host, folder=server.person)
    try:
        assert "source/pyproject.toml" in preview_bundle(bundles[0], transport, host)["new"]
        assert not (tmp_path / "root").exists()
        about = deploy_bundle(bundles[0], transport, host)
    finally:
        transport.close()
    folder = tmp_path / "root/releases" / about["release"]
    assert about["release"].endswith("-5f30ea0-changed")
    assert about["tools"] == ["kd-new"]
    for name in ("source/pyproject.toml", "site/kdtree_engine/__init__.py", "tools/kd_new.py"):
        assert (folder / name).is_file()
    assert set(json.loads((folder / "manifest.json").read_text())) >= {
        "wheel/tools/kd_new-1-py3-none-any.whl"
    }
    assert "python" not in about
    assert about["wheel_sha256"] == file_digest(folder / "wheel" / about["wheel"])


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not on PATH")
def test_a_bundle_for_another_python_says_so(
    checkout: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    tool = tmp_path / "kd_new-1-cp39-cp39-linux_x86_64.whl"
    tool.write_bytes(b"a tool")
    about = ABOUT | {"python": "3.9"}
    path = tmp_path / "a.tar"
    write_bundle(path, Bundle(checkout, ("pyproject.toml",), wheel, (tool,), about))
    host = LocalHost(name="here", kind="local", root=str(tmp_path / "root"), python=sys.executable)
    with pytest.raises(MissingError, match=r"need kd-new, .* made for Python 3.9, .*kd bundle"):
        deploy_bundle(path, LocalTransport(), host)
    gpu = host.model_copy(update={"cuda_arch": "sm_90"})
    with pytest.raises(MissingError, match="has no kernel library"):
        deploy_bundle(path, LocalTransport(), gpu, with_tools=False)
    assert not (tmp_path / "root").exists()


def test_a_version_of_python_is_named_as_people_do() -> None:
    assert some_python("3.12")["version"] == "3.12"
    for word in ("312", "3.12.1", "../3.12", "3.x"):
        with pytest.raises(ConfigError, match="is no version of Python"):
            some_python(word)


def test_the_digest_of_the_hostile_file_is_right(tmp_path: pathlib.Path) -> None:
    """Else the tests above would be passed by the hash alone."""
    (tmp_path / "x").write_bytes(b"hostile")
    entries: list[Entry] = [(tarfile.TarInfo("bundle.json"), b'{"files": {}}')]
    added("source/x")(entries)
    said = json.loads(entries[0][1])["files"]["source/x"]["sha256"]
    assert said == file_digest(tmp_path / "x")
