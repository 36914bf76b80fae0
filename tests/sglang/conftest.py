"""Every test here runs the real SGLang, in the Python that `server_python` names."""

from __future__ import annotations

import pathlib

import pytest

from kdtree_engine.errors import MissingError
from phases.gate import Context
from phases.p3_backend_wiring import checks
from phases.service import server_sglang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m sglang` is all of this folder: a test without its mark would run nowhere."""
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session", autouse=True)
def _sglang() -> None:
    """Skip where the server's Python has no SGLang, or one that the CPU support is not for."""
    release = server_sglang()
    if release is None:
        pytest.skip("SGLang is not installed; KD_SGLANG_PYTHON names a Python that has it")
    if release != "0.5.23":
        pytest.skip(f"SGLang {release}: the server runs on a CPU in 0.5.23 alone")
    try:
        checks.need_cpu_server()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    """For a gate; the logs of its servers stay in `tmp_path`."""
    return Context(seed=1, scratch=tmp_path)
