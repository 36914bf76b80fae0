"""Tier 1 in the real server: a short churn of what phase 7's gate does for ten minutes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from phases.gate import Context
from phases.p7_defrag_tier1.service import relocated_tokens
from phases.service import Service, serving

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def often(arguments: tuple[str, ...], **given: Any) -> contextlib.AbstractContextManager[Service]:
    """A server whose gauges change every few steps: a minute on a slow CPU has not many."""
    return serving((*arguments, "--decode-log-interval", "4"), **given)


def test_tokens_while_rows_move(ctx: Context) -> None:
    figures = {
        figure.name: figure.value for figure in relocated_tokens(ctx, start=often, seconds=60.0)
    }
    assert figures["rows moved"] > 0
    assert figures["traffic: near-ties accepted"] == figures["traffic: others refused"] == 0
    assert figures["traffic: KV slots leaked"] == 0
    assert figures["answers that wrong slots change"] > 0
