"""Routed experts of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kdtree_engine.capacity.experts import expert_parts
from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.errors import UnknownName
from kdtree_engine.gpus import GPUS

PRO = GPUS["rtx-pro-6000"]
FOUR = dataclasses.replace(KIMI_K2, experts=4, top_k=4, hidden=10, expert_intermediate=2)


def taken(shape: Any = KIMI_K2, **given: Any) -> dict[Any, float]:
    settings: dict[str, Any] = {
        "batch": 1,
        "nodes": 9,
        "ranks": 8,
        "placement": "tp",
        "bytes_per_weight": 0.5625,
        "reach": 1.0,
    }
    return expert_parts(shape, given.pop("gpu", PRO), **{**settings, **given})


def test_where_every_token_chooses_every_expert_it_is_by_hand() -> None:
    # Four experts of 60 weights, halves of them on two ranks: 60 bytes a layer at 30 a second.
    gpu = dataclasses.replace(PRO, bandwidth=30, flops=1e9, launch=0.5)
    parts = taken(FOUR, gpu=gpu, ranks=2, bytes_per_weight=0.5)
    assert parts == {"latency": pytest.approx(60 * 0.5), "bytes": pytest.approx(60 * 2)}
    assert taken(FOUR, gpu=gpu, ranks=2, bytes_per_weight=0.5, reach=0.5)["bytes"] == 60 * 4


def test_many_tokens_are_bound_by_flops() -> None:
    # Nine tokens in four experts, 120 flop each, half of it on a rank: 2,160 flop a layer.
    gpu = dataclasses.replace(PRO, bandwidth=1e9, flops=2160)
    assert taken(FOUR, gpu=gpu, ranks=2)["flops"] == pytest.approx(60)


def test_it_is_the_prediction_of_kd_moe() -> None:
    """Plan 41's table: at batch 1 a layer takes 90 us under tp and 136 under ep."""
    for placement, layer in (("tp", 90e-6), ("ep", 136e-6)):
        parts = taken(placement=placement)
        assert sum(parts.values()) / 60 == pytest.approx(layer, rel=0.03)


def test_more_requests_are_never_cheaper() -> None:
    seconds = [sum(taken(batch=batch).values()) for batch in (1, 2, 4, 16, 64)]
    assert seconds == sorted(seconds)


def test_a_model_without_experts_takes_no_time_in_them() -> None:
    assert taken(dataclasses.replace(KIMI_K2, dense_layers=61, experts=0, top_k=0)) == {}


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(UnknownName, match="placement"):
        taken(placement="eplb")
