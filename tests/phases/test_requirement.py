"""What a machine lacks, as the runner asks it."""

from __future__ import annotations

import pytest

from kdtree_engine.machine import Machine
from phases.requirement import Requirement

BARE = Machine(
    hostname="here", system="Linux", python="3.12", torch="2.11", cuda=None, driver=None, gpus=(),
    nvcc=None, compute_sanitizer=None, sglang=None, ssh=None, rsync=None,
)  # fmt: skip


def test_sglang_may_be_another_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KD_SGLANG_PYTHON", raising=False)
    for need in (Requirement.SGLANG, Requirement.SERVICE):
        assert "SGLang is not installed" in str(need.missing(BARE))
    monkeypatch.setenv("KD_SGLANG_PYTHON", "elsewhere/python")
    for need in (Requirement.SGLANG, Requirement.SERVICE):
        assert need.missing(BARE) is None
    assert Requirement.GPU.missing(BARE) is not None
