"""The real SGLang on this machine: phase 3's gates, and SGLang's own kit, run for real."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

from kdtree_engine.errors import MissingError
from phases.gate import Context
from phases.p3_backend_wiring import checks
from phases.service import server_python

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    """Skip where the server's Python has no SGLang, or one that the CPU support is not for."""
    question = "import importlib.metadata as m; print(m.version('sglang'))"
    asked = subprocess.run(
        [server_python(), "-c", question], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        pytest.skip("SGLang is not installed; KD_SGLANG_PYTHON names a Python that has it")
    if asked.stdout.strip() != "0.5.23":
        pytest.skip(f"SGLang {asked.stdout.strip()}: the server runs on a CPU in 0.5.23 alone")
    try:
        checks.need_cpu_server()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def ctx(tmp_path: pathlib.Path) -> Context:
    """The logs of the servers stay in `tmp_path`."""
    return Context(seed=1, scratch=tmp_path)


def test_trees_on_the_kernel_give_the_tokens_of_stock_decoding(ctx: Context) -> None:
    """Four servers; the last one has a wrong mask, and must give other tokens."""
    found = {figure.name: figure.value for figure in checks.service_token_exact(ctx)}
    assert found["tokens equal"] == 2 * 2 * 6 * 48
    assert found["branching trees"] >= 20
    assert found["moved rows"] >= 10
    assert found["answers that a wrong mask changes"] >= 6


def test_the_plugin_stops_a_server_that_it_cannot_serve(ctx: Context) -> None:
    (figure,) = checks.plugin_self_check(ctx)
    assert figure.value == len(checks.REFUSALS) + 1


def test_the_wheel_changes_no_other_package_and_loads_fast(ctx: Context) -> None:
    (figure,) = checks.plugin_installs_clean(ctx)
    assert figure.value > 100


def conformance(root: pathlib.Path, **environment: str) -> dict[str, Any]:
    """What each case of SGLang's attention kit gave with `kdtree_mla`, and what was counted."""
    paths = [root / "tests/support/sglang_cpu", root / "kdtree-engine"]
    done = subprocess.run(
        [server_python(), "-W", "ignore", "-m", "kd_sglang_cpu.conformance"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "KDTREE_DECODE": "1",
        }
        | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_sglangs_own_attention_kit(root: pathlib.Path) -> None:
    found = conformance(root)
    failed = {name: said for name, said in found["cases"].items() if said != "passed"}
    assert not failed
    assert len(found["cases"]) == 38
    assert found["seen"]["branching"] >= 20
    assert found["seen"]["decode"] == 8


def test_sglangs_own_attention_kit_sees_a_wrong_mask(root: pathlib.Path) -> None:
    found = conformance(root, KD_TEST_WRONG_MASK="1")
    trees = {
        name: said for name, said in found["cases"].items() if "tree" in name or "topk" in name
    }
    assert len(trees) == 33
    assert "passed" not in trees.values()
