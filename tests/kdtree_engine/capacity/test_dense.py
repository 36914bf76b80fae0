"""Products of weights that every token takes part in."""

from __future__ import annotations

import dataclasses

import pytest

from kdtree_engine.capacity.dense import (
    LAUNCH,
    Product,
    end_weights,
    head,
    parts_of,
    products,
)
from kdtree_engine.capacity.shapes import KIMI_K2
from kdtree_engine.gpus import GPUS

GPU = dataclasses.replace(GPUS["h200"], bandwidth=100, flops=1000)


def test_a_product_is_bound_by_its_bytes_until_its_flops_take_longer() -> None:
    one = Product("toy", weights=200, count=3, sliced=True)
    given = {"ranks": 2, "bytes_per_weight": 2.0, "reach": 0.5}
    # 100 weights a rank: 200 bytes at 50 a second; 200 flop a token at 500 a second.
    few = parts_of([one], GPU, tokens=1, **given)  # type: ignore[arg-type]
    assert few == {"latency": 3 * LAUNCH, "bytes": pytest.approx(3 * 4), "flops": 0}
    many = parts_of([one], GPU, tokens=20, **given)  # type: ignore[arg-type]
    assert many == {"latency": 3 * LAUNCH, "bytes": 0, "flops": pytest.approx(3 * 8)}


def test_what_is_not_sliced_is_whole_on_every_rank() -> None:
    assert Product("whole", 200, 1, sliced=False).of_rank(8) == 200
    assert Product("slice", 200, 1).of_rank(8) == 25


def test_an_attention_layer_of_kimi_k2_has_101_million_weights() -> None:
    layer = sum(one.weights for one in products(KIMI_K2) if one.count == KIMI_K2.layers)
    assert layer == (
        7168 * (1536 + 576)  # down
        + 1536 * 64 * 192  # queries, up
        + 2 * 64 * 128 * 512  # absorbed
        + 64 * 128 * 7168  # output
    )
    assert layer == pytest.approx(101e6, rel=0.01)


def test_dense_and_shared_layers_are_counted_once_each() -> None:
    counts = {one.name: one.count for one in products(KIMI_K2)}
    assert (counts["dense, down"], counts["shared, down"], counts["router"]) == (1, 60, 60)
    plain = dataclasses.replace(KIMI_K2, dense_layers=61, shared_experts=0, query_rank=0)
    names = {one.name: one.weights for one in products(plain)}
    assert not {"shared, down", "router"} & set(names)
    assert names["queries"] == 7168 * 64 * 192


def test_an_embedding_that_is_the_head_is_held_once() -> None:
    tied = dataclasses.replace(KIMI_K2, tied=True)
    difference = end_weights(KIMI_K2, 8) - end_weights(tied, 8)
    assert difference == pytest.approx(head(KIMI_K2).weights / 8)
