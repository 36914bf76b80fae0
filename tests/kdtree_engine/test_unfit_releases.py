"""The ways to break a release still fit the source that they break."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from unfit_releases import UNFIT, broken


@pytest.mark.parametrize("name", UNFIT)
def test_it_is_another_program_that_still_compiles(
    root: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    one = UNFIT[name]
    copy = tmp_path / one.file
    copy.parent.mkdir(parents=True)
    shutil.copy2(root / one.file, copy)
    before = copy.read_text()
    with broken(tmp_path, one):
        assert copy.read_text() != before
        compile(copy.read_text(), str(copy), "exec")
    assert copy.read_text() == before


def test_a_text_that_stands_nowhere_is_named(tmp_path: pathlib.Path) -> None:
    one = UNFIT["hangs"]
    copy = tmp_path / one.file
    copy.parent.mkdir(parents=True)
    copy.write_text("nothing\n")
    with pytest.raises(AssertionError, match=r"plugin\.py .* 0 times"), broken(tmp_path, one):
        pass
    assert copy.read_text() == "nothing\n"
