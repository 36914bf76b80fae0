"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import pathlib

import pytest

from kdtree_engine import timing
from phases.checkout import Checkout
from phases.evidence import Store


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The root of the repository."""
    return pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(root: pathlib.Path, tmp_path: pathlib.Path) -> Checkout:
    """The real checkout with a state folder of its own."""
    return Checkout(root=root, state=tmp_path / "state")


@pytest.fixture
def store(checkout: Checkout, tmp_path: pathlib.Path) -> Store:
    """An empty store: no own records, none kept."""
    return Store(checkout.evidence, tmp_path / "kept", checkout.root)


@pytest.fixture
def small_cpu_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated readings on the CPU take 4 calls on every machine, however large its cache."""
    true_size = timing._cache_bytes
    monkeypatch.setattr(
        timing, "_cache_bytes", lambda device: 0 if device.type == "cpu" else true_size(device)
    )
