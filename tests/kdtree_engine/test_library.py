"""Finding and loading the kernel library."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest

from kdtree_engine import library
from kdtree_engine.errors import ConfigError, MissingError


def test_an_absent_library_says_how_to_get_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KDTREE_LIBRARY", raising=False)
    monkeypatch.setattr(library, "PACKAGED_LIBRARY", tmp_path / "absent.so")
    with pytest.raises(MissingError, match=r"the kernel library is not built .*kd build"):
        library.library_path()


def test_the_environment_may_name_another(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.so"
    monkeypatch.setenv("KDTREE_LIBRARY", str(other))
    with pytest.raises(ConfigError, match=r"KDTREE_LIBRARY: no file .*other\.so"):
        library.library_path()
    other.touch()
    assert library.library_path() == other


def test_wgmma_is_asked_for_once_and_only_by_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    loaded = types.SimpleNamespace(set_tuning=lambda *tile: asked.append(tile))
    monkeypatch.setattr(library, "load", lambda path: loaded)
    (tmp_path / "any.so").touch()
    monkeypatch.delenv("KDTREE_WGMMA", raising=False)
    with library.using(tmp_path / "any.so"):
        library.kernels()
    assert asked == []
    monkeypatch.setenv("KDTREE_WGMMA", "1")
    with library.using(tmp_path / "any.so"):
        library.kernels()
        assert asked == [(0, 64, 0)]


def test_another_library_is_used_for_a_while(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "load", lambda path: path)
    monkeypatch.setattr(library, "PACKAGED_LIBRARY", tmp_path / "packaged.so")
    monkeypatch.delenv("KDTREE_LIBRARY", raising=False)
    monkeypatch.delenv("KDTREE_WGMMA", raising=False)
    for name in ("packaged.so", "trial.so"):
        (tmp_path / name).touch()
    library.kernels.cache_clear()
    assert library.kernels() == tmp_path / "packaged.so"
    with library.using(tmp_path / "trial.so") as used:
        assert used == library.kernels() == tmp_path / "trial.so"
    assert library.kernels() == tmp_path / "packaged.so"
    library.kernels.cache_clear()


def test_a_file_that_is_no_library_is_named(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tvm_ffi")
    path = tmp_path / "broken.so"
    path.write_text("not an ELF file")
    with pytest.raises(ConfigError, match=r"broken\.so: cannot be loaded"):
        library.load(path)


def test_without_the_loader_it_says_what_to_install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(MissingError, match=r"apache-tvm-ffi.*pip install 'kdtree-engine\[cuda\]'"):
        library.load(tmp_path / "any.so")
