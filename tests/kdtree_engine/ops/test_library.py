"""The library of the tree kernels: what is said where it is absent, and when values may be read."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

from kdtree_engine.errors import ConfigError, MissingError
from kdtree_engine.ops import library


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    library.tree_kernels.cache_clear()
    yield
    library.tree_kernels.cache_clear()


def test_a_library_that_is_not_built_says_how_to_get_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KDTREE_TREES_LIBRARY", raising=False)
    monkeypatch.setattr(library, "TREES_LIBRARY", tmp_path / "absent.so")
    with pytest.raises(MissingError, match=r"tree kernels is not built \(run `kd build`"):
        library.tree_kernels()


def test_a_file_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_TREES_LIBRARY", "/nowhere/lib.so")
    with pytest.raises(ConfigError, match=r"KDTREE_TREES_LIBRARY: no file /nowhere/lib\.so"):
        library.tree_kernels()


def test_the_sources_lie_beside_the_package_and_the_library_beside_the_other() -> None:
    assert (library.TREES_CSRC / "build.cu").is_file()
    assert library.TREES_LIBRARY.parent.name == "lib"


def test_values_are_read_only_where_checks_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDTREE_CHECK", raising=False)
    assert not library.may_read(torch.device("cpu"))
