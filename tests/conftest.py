"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kdtree_engine import timing
from kdtree_engine.build import BuildReport, build
from kdtree_engine.library import LIBRARY_NAME
from phases.checkout import Checkout
from phases.evidence import Store

if TYPE_CHECKING:
    from stand_in_host import StandInHost
    from systemd_machine import SystemdMachine

_SHARING = (
    *("test_csrc.py", "test_csrc_trees.py", "test_simt.py", "test_validation.py"),
    *("test_roofline.py", "test_trained_models.py"),
)
"""Their fixtures take long and are made once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a machine for itself runs one after the other, however many processes test.

    That is one server or GPU at a time, and one file's tests where they share what was compiled.
    """
    for item in items:
        for name in ("gpu", "sglang"):
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.xdist_group(name))
        if item.path.name in _SHARING:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(scope="session", autouse=True)
def signals_are_heard() -> Iterator[None]:
    """In a background job of a shell SIGINT and SIGHUP are ignored, and children inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if before[signal.SIGHUP] is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The root of the repository."""
    return pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """The kernel library of csrc as it is, for all architectures; 40 to 110 s on two cores.

    Objects that an earlier build kept are used again.
    """
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    return build(library=tmp_path_factory.mktemp("library") / LIBRARY_NAME)


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


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdMachine]:
    """A machine with a systemd of its own."""
    from systemd_machine import SystemdMachine, Unavailable

    try:
        running = SystemdMachine(tmp_path_factory.mktemp("systemd"))
    except Unavailable as error:
        pytest.skip(str(error))
    yield running
    running.stop()


@pytest.fixture
def host(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[StandInHost]:
    """Of supervisord, if a test does not ask for both managers."""
    from stand_in_host import stand_in

    manager = getattr(request, "param", "supervisor")
    if manager == "supervisor":
        pytest.importorskip("supervisor", reason="supervisor is not installed")
    machine = request.getfixturevalue("machine") if manager == "systemd" else None
    with stand_in(tmp_path, machine) as made:
        yield made
