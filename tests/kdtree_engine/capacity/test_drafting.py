"""Drafters, and the tokens that a step gives."""

from __future__ import annotations

import pytest

from kdtree_engine.capacity.drafting import DFLASH, assumed_acceptance, drafter_parts
from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.gpus import GPUS, LINKS


def seconds(context: int = 4096, batch: int = 1, ranks: int = 8) -> float:
    parts = drafter_parts(
        DFLASH,
        KIMI_K2,
        GPUS["rtx-pro-6000"],
        LINKS["pcie"],
        context=context,
        batch=batch,
        ranks=ranks,
        reach=1.0,
    )
    return sum(parts.values())


def test_the_assumed_law_gives_one_token_for_one_node_and_plan_20s_for_trees() -> None:
    assert assumed_acceptance(1) == 1
    for nodes, offline in ((9, 2.91), (17, 3.32), (33, 3.72)):
        assert assumed_acceptance(nodes) == pytest.approx(offline, rel=0.07)
    assert all(assumed_acceptance(nodes) <= nodes for nodes in range(1, 129))


def test_a_drafter_for_kimi_k2_has_three_and_a_half_billion_weights() -> None:
    assert DFLASH.weights(KIMI_K2, 1) == pytest.approx(3.5e9, rel=0.02)
    assert DFLASH.weights(KIMI_K2, 8) == DFLASH.weights(KIMI_K2, 1) / 8


def test_its_kv_is_divided_by_heads_down_to_one() -> None:
    assert DFLASH.kv_bytes(1) == 6 * 2 * 2 * 128 * 8
    assert DFLASH.kv_bytes(8) == DFLASH.kv_bytes(16) == 6 * 2 * 2 * 128


def test_its_pass_costs_at_least_its_weights_and_more_for_more() -> None:
    read = 2 * DFLASH.weights(KIMI_K2, 8) / GPUS["rtx-pro-6000"].bandwidth
    assert seconds() > read
    assert seconds(context=65536) > seconds()
    assert seconds(batch=16) > seconds()
    assert seconds(ranks=1) > seconds(), "eight times the bytes outweigh the messages saved"
