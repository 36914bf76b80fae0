"""The KDTREE_ variables: typed, refused when wrong, warned about when unknown, documented."""

from __future__ import annotations

import pathlib
import re

import pytest

from kdtree_engine.errors import ConfigError
from kdtree_engine.sglang_ext.settings import VARIABLES, Settings, read_settings


def test_nothing_set_means_tree_verification_alone() -> None:
    settings, warnings = read_settings({"PATH": "/bin"})
    assert settings == Settings(verify=True, decode=True, graph_buffers=True)
    assert not warnings


def test_each_switch_switches_one_thing() -> None:
    assert not read_settings({"KDTREE_VERIFY": "0"})[0].verify
    assert not read_settings({"KDTREE_DECODE": "0"})[0].decode
    assert not read_settings({"KDTREE_GRAPH_BUFFERS": "0"})[0].graph_buffers
    assert not read_settings({"KDTREE_KV_INDICES": "0"})[0].kv_indices
    assert read_settings({"KDTREE_DEFRAG": "tier0"})[0].tier0
    assert not read_settings({"KDTREE_DEFRAG": "tier0"})[0].tier1
    both = read_settings({"KDTREE_DEFRAG": "tier1", "KDTREE_DEFRAG_EVERY": "8"})[0]
    assert (both.tier0, both.tier1, both.relocate_every) == (True, True, 8)
    assert not read_settings({"KDTREE_GAUGES": "0"})[0].gauges
    assert read_settings({"KDTREE_DECODE": ""})[0] == Settings()  # empty is unset


def test_all_off_is_stock() -> None:
    off = {"KDTREE_VERIFY": "0", "KDTREE_DECODE": "0", "KDTREE_GRAPH_BUFFERS": "0"}
    assert read_settings(off)[0].stock
    assert not read_settings(off | {"KDTREE_GRAPH_BUFFERS": "1"})[0].stock
    assert not read_settings(off | {"KDTREE_DEFRAG": "tier0"})[0].stock


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KDTREE_VERIFY", "yes", "KDTREE_VERIFY: expected 0 or 1, got 'yes'"),
        ("KDTREE_WGMMA", "2", "KDTREE_WGMMA: expected 0 or 1, got '2'"),
        ("KDTREE_DEFRAG", "tier2", "KDTREE_DEFRAG: expected off or tier0 or tier1, got 'tier2'"),
        ("KDTREE_GAUGES", "on", "KDTREE_GAUGES: expected 0 or 1, got 'on'"),
        # The kernel library takes it as it stands, and would not hear it.
        ("KDTREE_WGMMA", "1 ", "KDTREE_WGMMA: '1 ' begins or ends with a space"),
        ("KDTREE_LIBRARY", " /lib.so", "KDTREE_LIBRARY: ' /lib.so' begins or ends with a space"),
        ("KDTREE_DECODE", " ", "KDTREE_DECODE: ' ' begins or ends with a space"),
        ("KDTREE_DDTREE_BUDGET", "128", "KDTREE_DDTREE_BUDGET: expected a whole number in 1..127"),
        ("KDTREE_DDTREE_BUDGET", "many", "KDTREE_DDTREE_BUDGET: expected a whole number in 1..127"),
        (
            "KDTREE_DDTREE_TOPK",
            "0",
            "KDTREE_DDTREE_TOPK: expected a whole number in 1..64",
        ),
        ("KDTREE_DDTREE_TOPK", "-1", "KDTREE_DDTREE_TOPK: expected a whole number in 1..64"),
        ("KDTREE_DDTREE_TOPK", "²", "KDTREE_DDTREE_TOPK: expected a whole number in 1..64"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        read_settings({name: value})
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_warned_about() -> None:
    _, warnings = read_settings({"KDTREE_VERFY": "0", "KDTREE_0": "1", "KD_STATE": "elsewhere"})
    assert warnings[1] == "KDTREE_VERFY is set and nothing reads it (did you mean KDTREE_VERIFY?)"
    assert warnings[0].startswith("KDTREE_0 is set and nothing reads it (")
    assert len(warnings) == 2


def test_readme_documents_every_variable_with_its_default(root: pathlib.Path) -> None:
    readme = (root / "README.md").read_text()
    for variable in VARIABLES:
        default = f"`{variable.default}`" if variable.default else ""
        row = rf"\| `{variable.name}` \| {re.escape(default)} *\| {re.escape(variable.meaning)} \|"
        assert re.search(row, readme), f"README has no row for {variable}"


def test_every_variable_that_the_engine_reads_is_known(root: pathlib.Path) -> None:
    known = {variable.name for variable in VARIABLES}
    for path in (root / "kdtree-engine").rglob("*.py"):
        read = set(re.findall(r'"(KDTREE_[A-Z_]+)"', path.read_text()))
        assert read <= known | {"KDTREE_"}, path
