"""What gates import and a host's Python lacks, by the real pip, from a folder of wheels."""

from __future__ import annotations

import json
import pathlib
import sys
import venv
import zipfile

import pytest
from small_checkout import small_checkout
from small_wheel import make_wheel

from kdtree_engine.errors import ConfigError, MissingError
from remote.agent import file_digest
from remote.local import LocalTransport
from remote.releases import ReleaseRefused, Releases
from remote.tools import distribution_of, fetch_tools, needed_tools
from remote.transport import Transport

PYTHON = {"version": "3.12", "machine": "x86_64", "glibc": "2.35"}


@pytest.fixture
def shelf(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where pip looks, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


def test_what_gates_need_is_what_kd_needs_but_for_sglangs_own(root: pathlib.Path) -> None:
    needed = needed_tools(root)
    assert {"hypothesis", "python-frontmatter", "pydantic", "filelock"} <= set(needed)
    assert not {"torch", "numpy", "fabric", "kdtree-engine"} & set(needed)
    assert needed["click"].startswith("click==")


def test_a_checkout_whose_needs_cannot_be_read_is_one_line(tmp_path: pathlib.Path) -> None:
    assert needed_tools(tmp_path) == {}
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(ConfigError, match=r"pyproject.toml: cannot be read"):
        needed_tools(tmp_path)


def test_wheels_are_fetched_with_what_they_need_and_kept(
    shelf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """For the host's Python: another's are passed over."""
    make_wheel(shelf, "kd_upper", tag="cp312-cp312-manylinux_2_28_x86_64", needs="kd-lower")
    make_wheel(shelf, "kd_upper", tag="cp311-cp311-manylinux_2_28_x86_64", needs="kd-lower")
    make_wheel(shelf, "kd_lower")
    cache = tmp_path / "cache"
    notes: list[str] = []
    found = fetch_tools(["kd-upper"], PYTHON, cache, notes.append)
    assert [path.name for path in found] == [
        "kd_lower-1-py3-none-any.whl",
        "kd_upper-1-cp312-cp312-manylinux_2_28_x86_64.whl",
    ]
    assert notes == ["fetches kd-upper for Python 3.12"]
    for wheel in shelf.iterdir():
        wheel.unlink()
    assert fetch_tools(["kd-upper"], PYTHON, cache) == found, "kept"
    old = PYTHON | {"glibc": "2.17"}
    with pytest.raises(MissingError, match="kd-upper"):
        fetch_tools(["kd-upper"], old, cache)
    assert not list(cache.rglob(".fetch-*"))


def test_what_cannot_be_fetched_is_named_with_what_to_do(
    shelf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(MissingError, match=r"kd-absent==1: gates need them.*kd bundle") as why:
        fetch_tools(["kd-absent==1"], PYTHON, tmp_path / "cache")
    assert "\n" not in str(why.value)


def test_names_compare_as_pips_do() -> None:
    assert distribution_of("python_frontmatter-1.3.0-py3-none-any.whl") == "python-frontmatter"


def test_a_host_says_what_its_python_has(
    transport: Transport, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever PYTHONPATH says here: a release has one of its own."""
    make_wheel(tmp_path, "kd_other")
    with zipfile.ZipFile(tmp_path / "kd_other-1-py3-none-any.whl") as packed:
        packed.extractall(tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    host = Releases(transport, python=sys.executable, root=str(tmp_path / "root"))
    found = host.look_at_python(["click", "kd-other", "it's $(none)"])
    assert found["packages"]["click"]
    assert (found["packages"]["kd-other"], found["packages"]["it's $(none)"]) == (None, None)
    assert found["version"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert found["root"] == str(tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.fixture
def bare(tmp_path: pathlib.Path) -> pathlib.Path:
    """A Python that has one package of its own, kd-there."""
    venv.create(tmp_path / "venv", with_pip=False)
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(make_wheel(tmp_path, "kd_there")) as packed:
        packed.extractall(own)
    return tmp_path / "venv/bin/python"


def arrives(host: Releases, wheels: list[pathlib.Path], root: pathlib.Path) -> dict[str, object]:
    host.prepare()
    host.expect([])
    manifest: dict[str, object] = {}
    for wheel in wheels:
        target = root / "incoming/wheel/tools" / wheel.name
        target.write_bytes(wheel.read_bytes())
        manifest[f"wheel/tools/{wheel.name}"] = {
            "sha256": file_digest(target),
            "executable": False,
        }
    return manifest


def test_what_the_host_has_by_itself_is_not_put_before_it(
    bare: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """All of PYTHONPATH comes before what is installed."""
    root = tmp_path / "root"
    host = Releases(LocalTransport(), python=str(bare), root=str(root))
    more = "kd_new-1.data/scripts/run"
    wheels = [make_wheel(tmp_path, "kd_there"), make_wheel(tmp_path, "kd_new", more=more)]
    about = host.place("first", arrives(host, wheels, root), {})
    assert about["tools"] == ["kd-new"]
    tools = root / "releases/first/tools"
    assert sorted(path.name for path in tools.iterdir()) == ["kd_new-1.dist-info", "kd_new.py"]
    assert not (root / "releases/first/site").exists(), "the service gets none of it"


def test_a_tool_is_held_against_its_hash_and_stays_inside(
    bare: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    root = tmp_path / "root"
    host = Releases(LocalTransport(), python=str(bare), root=str(root))
    manifest = arrives(host, [make_wheel(tmp_path, "kd_new")], root)
    (root / "incoming/wheel/tools/kd_new-1-py3-none-any.whl").write_bytes(b"other")
    with pytest.raises(ReleaseRefused, match="has other content"):
        host.place("first", manifest, {})
    manifest = arrives(host, [make_wheel(tmp_path, "kd_new", more="../out.py")], root)
    with pytest.raises(ReleaseRefused, match="has a file outside of it"):
        host.place("first", manifest, {})
    assert host.known()["releases"] == []
    assert not list(tmp_path.rglob("out.py"))


@pytest.mark.slow
def test_a_release_brings_what_its_host_lacks(
    bare: pathlib.Path, shelf: pathlib.Path, root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Through `kd deploy`'s own parts, with a checkout that needs one package more."""
    from remote.deploy import Deployment
    from remote.inventory import LocalHost

    pytest.importorskip("setuptools.command.bdist_wheel")
    checkout = small_checkout(tmp_path / "checkout", "kd-new>=1", "kd-there")
    host = LocalHost(name="here", kind="local", root=str(tmp_path / "root"), python=str(bare))
    deployment = Deployment(checkout, (None, None), tmp_path / "cache")
    with pytest.raises(MissingError, match="kd-new>=1"):
        deployment.run(LocalTransport(), host)
    notes: list[str] = []
    about = deployment.run(LocalTransport(), host, with_tools=False, note=notes.append)
    assert about["tools"] == []
    assert any("without what gates need there: kd-new>=1" in text for text in notes)
    make_wheel(shelf, "kd_new", needs="kd-there")
    make_wheel(shelf, "kd_there")
    about = deployment.run(LocalTransport(), host)
    folder = tmp_path / "root/releases" / about["release"]
    assert about["tools"] == ["kd-new"]
    sent = json.loads((folder / "manifest.json").read_text())
    assert [name for name in sent if "tools" in name] == ["wheel/tools/kd_new-1-py3-none-any.whl"]
    assert (folder / "tools/kd_new.py").is_file()
