"""The real SGLang on this machine: phase 3's gates, run for real."""

from __future__ import annotations

import pytest

from phases.gate import Context
from phases.p3_backend_wiring import checks

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_trees_on_the_kernel_give_the_tokens_of_stock_decoding(ctx: Context) -> None:
    """Trees of n-grams and of a draft model; with a wrong mask both must give other tokens."""
    found = {figure.name: figure.value for figure in checks.service_token_exact(ctx)}
    assert found["tokens equal"] == 2 * (2 * 6 * 48 + 3 * 16)
    for prefix, branching, moved, wrong in (("", 20, 10, 4), ("draft model: ", 10, 5, 2)):
        assert found[f"{prefix}branching trees"] >= branching
        assert found[f"{prefix}masks of T x T bytes"] >= branching
        assert found[f"{prefix}moved rows"] >= moved
        assert found[f"{prefix}answers that a wrong mask changes"] >= wrong


def test_the_plugin_stops_a_server_that_it_cannot_serve(ctx: Context) -> None:
    (figure,) = checks.plugin_self_check(ctx)
    assert figure.value == len(checks.REFUSALS) + 1


def test_the_wheel_changes_no_other_package_and_loads_fast(ctx: Context) -> None:
    (figure,) = checks.plugin_installs_clean(ctx)
    assert figure.value > 100
