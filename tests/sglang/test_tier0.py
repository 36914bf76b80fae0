"""Tier 0 in the real server: a short churn of what the gate of phase 6 does for ten minutes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from phases.gate import Context
from phases.p6_defrag_tier0.service import churn_tokens
from phases.service import Service, serving

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def often(arguments: tuple[str, ...], **given: Any) -> contextlib.AbstractContextManager[Service]:
    """A server whose gauges change every few steps: a minute on a slow CPU has not many."""
    return serving((*arguments, "--decode-log-interval", "4"), **given)


def test_tokens_under_churn(ctx: Context) -> None:
    found = churn_tokens(ctx, start=often, seconds=60.0)
    figures = {figure.name: figure.value for figure in found}
    assert figures["traffic: near-ties accepted"] == figures["traffic: others refused"] == 0
    assert figures["traffic: KV slots leaked"] == 0
    assert figures["slots evicted"] > 768
    assert figures["answers that wrong slots change"] > 0
    (runs,) = (value for name, value in figures.items() if name.startswith("runs, mean of"))
    assert 1 <= runs < 20
