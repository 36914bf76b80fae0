"""What is on a GPU, and whether it fits."""

from __future__ import annotations

from typing import Any

import pytest

from kdtree_engine.capacity.dense import end_weights, weights_of_products
from kdtree_engine.capacity.drafting import DFLASH
from kdtree_engine.capacity.memory import Memory, memory_of
from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.gpus import GPUS


def kimi(gpu: str, **given: Any) -> Memory:
    settings: dict[str, Any] = {
        "context": 4096,
        "batch": 1,
        "nodes": 1,
        "ranks": 8,
        "expert_bytes": 0.5625,
        "dense_bytes": 2.0,
        "drafter": None,
    }
    return memory_of(KIMI_K2, GPUS[gpu], **{**settings, **given})


def test_weights_kv_and_room_by_hand() -> None:
    memory = Memory(weights=60, token=4, tokens=10, usable=100)
    assert (memory.kv, memory.fits, memory.holds_weights, memory.room) == (40, True, True, 10)
    assert not Memory(61, 4, 10, 100).fits
    full = Memory(101, 4, 0, 100)
    assert (full.fits, full.holds_weights, full.room) == (False, False, 0)


def test_kimi_k2_in_int4_has_the_600_gb_of_its_checkpoint() -> None:
    assert kimi("h200", ranks=1).weights == pytest.approx(595e9, rel=0.01)


def test_kimi_k2_fits_eight_rtx_pro_6000_with_the_kv_that_deployments_report() -> None:
    memory = kimi("rtx-pro-6000")
    assert memory.fits
    assert 170_000 <= memory.room <= 232_000


def test_kimi_k2_does_not_fit_eight_rtx_5090() -> None:
    memory = kimi("rtx-5090")
    assert not memory.holds_weights
    assert memory.room == 0


def test_kv_is_whole_on_every_rank_and_grows_with_context_and_batch() -> None:
    one = kimi("h200")
    assert one.token == 70_272
    assert kimi("h200", ranks=64).token == one.token
    assert kimi("h200", batch=16, context=65536).kv == 16 * 65537 * 70_272
    assert not kimi("h200", batch=16, context=65536).fits or one.fits


def test_a_drafter_takes_its_part() -> None:
    alone, both = kimi("h200"), kimi("h200", drafter=DFLASH)
    assert both.weights - alone.weights == pytest.approx(2 * DFLASH.weights(KIMI_K2, 8))
    assert both.token - alone.token == DFLASH.kv_bytes(8)


def test_head_and_embedding_stay_bf16_whatever_the_other_weights_are() -> None:
    wide, narrow = (kimi("h200", ranks=1, dense_bytes=size).weights for size in (2.0, 1.0))
    assert wide - narrow == pytest.approx(weights_of_products(KIMI_K2, 1))
    assert end_weights(KIMI_K2, 1) == 2 * 7168 * 163_840
