"""The revision of a checkout, with and without git."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from phases.checkout import Checkout, find_checkout


def git(folder: pathlib.Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", *identity, *arguments), cwd=folder, check=True, capture_output=True)


def test_the_revision_says_whether_tracked_files_were_changed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    checkout = Checkout(tmp_path, tmp_path / ".kd")

    (tmp_path / "untracked").write_text("no code lies here")
    commit, dirty = checkout.revision()
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (tmp_path / "file").write_text("2")
    assert checkout.revision() == (commit, True)
    (tmp_path / "file").write_text("1")
    assert checkout.revision() == (commit, False)
    (tmp_path / "phases").mkdir()
    (tmp_path / "phases" / "new.py").write_text("can be imported")
    assert checkout.revision() == (commit, True)


def test_a_copy_without_git_states_its_revision(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Checkout(tmp_path, tmp_path / ".kd")
    assert checkout.revision() == (None, None)
    monkeypatch.setenv("KD_REVISION", "abc123")
    assert checkout.revision() == ("abc123", None)


def test_kd_state_moves_the_state_folder(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KD_STATE", raising=False)
    assert find_checkout() == Checkout(root, root / ".kd")
    monkeypatch.setenv("KD_STATE", str(tmp_path))
    assert find_checkout() == Checkout(root, tmp_path)
