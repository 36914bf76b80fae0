"""DDTREE in the real SGLang on this machine: phase 8's gates, run for real."""

from __future__ import annotations

import pytest

from phases.gate import Context
from phases.p8_ddtree import service

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_greedy_tokens_are_those_of_stock_decoding(ctx: Context) -> None:
    found = {figure.name: figure.value for figure in service.ddtree_token_exact(ctx)}
    assert found["tokens equal"] == 4 * 4 * 48
    assert found["branching trees"] >= 20
    assert found["moved rows"] >= 10


def test_sampled_tokens_have_the_targets_distribution(ctx: Context) -> None:
    found = {figure.name: figure.value for figure in service.ddtree_distribution(ctx)}
    assert found["answers"] == 512
