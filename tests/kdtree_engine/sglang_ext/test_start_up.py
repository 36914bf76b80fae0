"""What is decided where a server makes the backend, as far as it needs no SGLang."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from kdtree_engine.sglang_ext import start_up
from kdtree_engine.sglang_ext.settings import Settings

ON = Settings()


@pytest.fixture
def algorithm(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The speculative algorithm of the server; its `name` can be changed."""
    chosen = types.SimpleNamespace(name="NGRAM")
    for module in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    vars(sys.modules["sglang.srt.runtime_context"])["get_spec"] = lambda: types.SimpleNamespace(
        speculative_algorithm=chosen.name
    )
    return chosen


def test_ends_of_prompts_are_for_the_ngram_drafter(algorithm: types.SimpleNamespace) -> None:
    assert start_up._wants_ends(ON)
    assert not start_up._wants_ends(dataclasses.replace(ON, prompt_ends=False))
    assert not start_up._wants_ends(dataclasses.replace(ON, verify=False))
    for other in ("EAGLE", None):
        algorithm.name = other
        assert not start_up._wants_ends(ON)


def test_short_masks_are_for_algorithms_that_have_them(algorithm: types.SimpleNamespace) -> None:
    assert start_up._qlen(ON, {}) == "NGRAM"
    assert start_up._qlen(ON, {"logit cap": 1}) is None
    assert start_up._qlen(dataclasses.replace(ON, qlen_mask=False), {}) is None
    algorithm.name = "DFLASH"
    assert start_up._qlen(ON, {}) is None


def test_chains_are_verified_without_a_mask(algorithm: types.SimpleNamespace) -> None:
    for name, chains in (("DFLASH", True), ("DSPARK", True), ("DDTREE", False), (None, False)):
        algorithm.name = name
        assert start_up._verifies_chains() is chains, name


@pytest.mark.parametrize("short", [False, True])
def test_the_line_says_what_is_active(short: bool) -> None:
    line = start_up._line("0.5.17", "a library", ON, {}, "cpu", short, short, short)
    assert f"masks: {'T x T' if short else 'stock'}; " in line
    assert f"n-gram prompts: {'ends' if short else 'stock'}; " in line
    assert f"accepted rows: {'one launch' if short else 'stock'}; " in line
    assert "slots: one launch; " in line
    off = dataclasses.replace(ON, kv_indices=False)
    assert "slots: stock; " in start_up._line(
        "0.5.17", "a library", off, {}, "cpu", short, short, short
    )
    for tier in ("tier0", "tier1"):
        given = dataclasses.replace(ON, tier0=True, tier1=tier == "tier1")
        line_of = start_up._line("0.5.17", "a library", given, {}, "cpu", short, short, short)
        assert f"defrag: {tier}; " in line_of
    assert line.startswith("kdtree_mla: SGLang 0.5.17; cpu; library: a library; verify: kernel; ")
